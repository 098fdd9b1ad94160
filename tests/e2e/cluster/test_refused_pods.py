"""Fields that would grant privileges to a sandbox are refused by name for every user. A key opens only the sandboxes of
its own job.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollout_api.cluster import EXECUTOR_PORT, KEY_FILE, executor_token, runner_name
from tests.support.cluster import (
    QUICKSTART_IMAGE,
    STORAGE_SECRET,
    Cluster,
    Job,
    Object,
    eventually,
    slow_quickstart,
    small_job,
)
from tests.support.sandboxes import ByHand, answer_of_executor, secret_value


def volume(**source: object) -> Object:
    return {"volumes": [{"name": "data", **source}]}


def container(**fields: object) -> Object:
    return {"containers": [{"name": "sandbox", **fields}]}


CONTEXT = "spec.containers[0].securityContext"
# Pod specs that grant rights: by the name of their Sandbox, with the field that the refusal must name.
LENDING: dict[str, tuple[Object, str]] = {
    "service-account": ({"serviceAccountName": "admin"}, "spec.serviceAccountName"),
    "old-service-account": ({"serviceAccount": "admin"}, "spec.serviceAccount"),
    "token": ({"automountServiceAccountToken": True}, "spec.automountServiceAccountToken"),
    "token-volume": (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]}),
        "spec.volumes[0].projected",
    ),
    "secret-volume": (volume(secret={"secretName": "storage"}), "spec.volumes[0].secret"),
    "secret-env": (container(envFrom=[{"secretRef": {"name": "storage"}}]), "spec.containers[0].envFrom"),
    "secret-variable": (
        container(
            env=[{"name": "K", "valueFrom": {"secretKeyRef": {"name": "storage", "key": "AWS_SECRET_ACCESS_KEY"}}}]
        ),
        "spec.containers[0].env[0].valueFrom",
    ),
    "config-map": (volume(configMap={"name": "kube-root-ca.crt"}), "spec.volumes[0].configMap"),
    "claim": (volume(persistentVolumeClaim={"claimName": "data"}), "spec.volumes[0].persistentVolumeClaim"),
    "csi": (volume(csi={"driver": "secrets-store.csi.k8s.io"}), "spec.volumes[0].csi"),
    "host-path": (volume(hostPath={"path": "/"}), "spec.volumes[0].hostPath"),
    "host-network": ({"hostNetwork": True}, "spec.hostNetwork"),
    "host-pid": ({"hostPID": True}, "spec.hostPID"),
    "host-ipc": ({"hostIPC": True}, "spec.hostIPC"),
    "host-users": ({"hostUsers": True}, "spec.hostUsers"),
    "sidecar": ({"containers": [{"name": "mine", "image": QUICKSTART_IMAGE}]}, "spec.containers[0].name"),
    "init-container": ({"initContainers": [{"name": "mine", "image": QUICKSTART_IMAGE}]}, "spec.initContainers"),
    "shared-processes": ({"shareProcessNamespace": True}, "spec.shareProcessNamespace"),
    "command": (container(command=["sh"]), "spec.containers[0].command"),
    "lifecycle": (container(lifecycle={"postStart": {"exec": {"command": ["sh"]}}}), "spec.containers[0].lifecycle"),
    "privileged": (container(securityContext={"privileged": True}), CONTEXT),
    "capabilities": (container(securityContext={"capabilities": {"add": ["SYS_PTRACE"]}}), CONTEXT),
    "seccomp": ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "spec.securityContext"),
    "over-the-executor": (
        volume(emptyDir={}) | container(volumeMounts=[{"name": "data", "mountPath": "/.rollout/executor"}]),
        "spec.containers[0].volumeMounts[0].mountPath",
    ),
}
# Likewise outside of the pod's spec: labels and annotations that other software reads.
METADATA: dict[str, tuple[Object, str]] = {
    "another-job": ({"labels": {"rollout.dev/job-uid": "of-another-job"}}, "metadata.labels[rollout.dev/job-uid]"),
    "another-network": (
        {"annotations": {"k8s.v1.cni.cncf.io/networks": "lan"}},
        "metadata.annotations[k8s.v1.cni.cncf.io/networks]",
    ),
}
TEMPLATES = {name: ({"spec": spec}, field) for name, (spec, field) in LENDING.items()} | {
    name: ({"metadata": metadata}, field) for name, (metadata, field) in METADATA.items()
}


def invalid(sandbox: ByHand) -> str:
    """Return why a Sandbox was refused."""
    finished = sandbox.wait_finished()
    assert (finished["status"], finished["reason"]) == ("True", "Invalid"), finished
    return str(finished["message"])


def test_a_sandbox_cannot_get_privileges_from_its_pod_template(cluster: Cluster, unasked_namespace: str) -> None:
    sandboxes = {name: ByHand(cluster, unasked_namespace, name) for name in TEMPLATES}
    for name, sandbox in sandboxes.items():
        sandbox.apply(podTemplate=TEMPLATES[name][0], whenFinished="Retain")
    for name, (_, field) in TEMPLATES.items():
        assert f"spec.podTemplate.{field}: " in invalid(sandboxes[name]), name
    assert not cluster.list("pods", unasked_namespace)


def test_privileged_pods_are_for_the_namespaces_that_the_chart_lists(cluster: Cluster, unasked_namespace: str) -> None:
    namespace = unasked_namespace
    sandbox = ByHand(cluster, namespace, "privileged")
    sandbox.apply(podTemplate={"spec": {"hostNetwork": True}}, security="Privileged", whenFinished="Retain")
    assert f"spec.security: Privileged is not allowed in namespace {namespace}" in invalid(sandbox)
    assert not cluster.list("pods", namespace)


@pytest.mark.full
@pytest.mark.alone
def test_privileged_sandbox_gets_its_templates_rights_where_the_chart_allows(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], chart_values: Callable[..., None]
) -> None:
    chart_values("--set", f"privilegedNamespaces={{{namespace}}}")
    volume = {"name": "lent", "secret": {"secretName": STORAGE_SECRET}}
    container = {
        "name": "sandbox",
        "command": ["sleep", "1000"],
        "volumeMounts": [{"name": "lent", "mountPath": "/lent"}],
    }
    plain = {"mode": "Plain"}
    template = {"spec": {"restartPolicy": "Always", "volumes": [volume], "containers": [container]}}

    sandbox = ByHand(cluster, namespace, "lent")
    sandbox.apply(podTemplate=template, security="Privileged", workspaces=plain).wait_ready()
    assert sandbox.run("cat", "/lent/AWS_REGION") == cluster.environ["AWS_REGION"]
    assert sandbox.pod["spec"]["restartPolicy"] == "Never"

    asked = {"image": QUICKSTART_IMAGE, "podTemplate": template, "workspaces": plain}
    job = new_job(small_job("lent", sandbox=asked, security="Privileged"))
    job.manifest["spec"]["tasks"]["inline"][0]["solution"] = ["cp /lent/AWS_REGION solved"]
    job.apply().wait("Succeeded")
    assert [result["reward"] for result in job.results()] == [1]


def test_a_job_cannot_get_privileges_from_its_sandboxes_pod_template(
    cluster: Cluster, new_job: Callable[..., Job], unasked_namespace: str
) -> None:
    jobs = []
    for name, (template, _) in TEMPLATES.items():
        manifest = small_job(name, sandbox={"image": QUICKSTART_IMAGE, "podTemplate": template})
        jobs.append(new_job(manifest, unasked_namespace))
    cluster.apply(*(job.manifest for job in jobs))
    for job in jobs:
        refused = eventually(lambda job=job: job.condition("Invalid") or None, 120, job.describe)  # type: ignore[misc]
        assert f"spec.sandbox.podTemplate.{TEMPLATES[job.name][1]}: " in refused["message"], job.name
    assert not cluster.list("pods", jobs[0].namespace)


@pytest.fixture
def running(new_job: Callable[[Object], Job]) -> Callable[..., list[Job]]:
    """Start jobs that run long enough, and wait for their first sandboxes."""

    def start(*names: str) -> list[Job]:
        jobs = []
        for name in names:
            manifest = slow_quickstart(600, groupSize=1, runners={"concurrency": 1})
            manifest["metadata"]["name"] = name
            jobs.append(new_job(manifest).apply())
        for job in jobs:
            eventually(lambda job=job: _ready(job), 120, job.describe)  # type: ignore[misc]
        return jobs

    return start


def _ready(job: Job) -> Object | None:
    """Return a Sandbox of the job that has an address."""
    return next((found for found in job.sandboxes() if found.get("status", {}).get("podIP")), None)


def as_runner(job: Job) -> str:
    """Return the options with which kubectl impersonates a job's runners."""
    return f"--as=system:serviceaccount:{job.namespace}:{runner_name(job.name)}"


def test_compromised_runner_gets_no_privileges_through_its_sandboxes(
    cluster: Cluster, running: Callable[..., list[Job]]
) -> None:
    (job,) = running("taken")
    owner = {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "name": job.name, "uid": job.uid}
    asked: dict[str, Any] = {
        "podTemplate": {"spec": {"hostNetwork": True}},
        "clients": {"matchLabels": {"app": "mine"}},
        "security": "Privileged",
    }
    for field, value in asked.items():
        manifest = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "Sandbox",
            "metadata": {
                "name": field.lower(),
                "namespace": job.namespace,
                "ownerReferences": [owner | {"controller": True}],
            },
            "spec": {"image": QUICKSTART_IMAGE, "whenFinished": "Retain", field: value},
        }
        cluster.kubectl("create", as_runner(job), "-f", "-", text=json.dumps(manifest))
        told = invalid(ByHand(cluster, job.namespace, field.lower()))
        assert f"spec.{field}: a Sandbox takes it from its RolloutJob {job.name}" in told
        assert cluster.get("pod", field.lower(), job.namespace) is None

    for verb, what in (
        *(("get", "secrets"), ("list", "secrets"), ("create", "pods"), ("create", "pods/exec"), ("get", "pods")),
        *(("create", "rolloutjobs"), ("patch", "rolloutjobs"), ("patch", "sandboxes/status"), ("create", "roles")),
        *(("patch", "networkpolicies"), ("delete", "networkpolicies"), ("create", "serviceaccounts/token")),
    ):
        allowed = cluster.kubectl("auth", "can-i", verb, what, "-n", job.namespace, as_runner(job), check=False)
        assert (allowed.returncode, allowed.stdout) == (1, "no\n"), f"{verb} {what}"


CONNECT = f"import socket, sys; socket.create_connection((sys.argv[1], {EXECUTOR_PORT}), timeout=5)"


def test_one_jobs_key_commands_no_other_jobs_sandboxes(cluster: Cluster, running: Callable[..., list[Job]]) -> None:
    one, other = running("one", "other")
    keys = {job.name: secret_value(cluster, job.namespace, runner_name(job.name), KEY_FILE) for job in (one, other)}
    sandbox = _ready(other)
    assert sandbox is not None
    name, uid = sandbox["metadata"]["name"], sandbox["metadata"]["uid"]
    found = {
        whose: answer_of_executor(cluster, other.namespace, name, executor_token(key, name, uid))
        for whose, key in keys.items()
    }
    assert found == {"one": 401, "other": 200}

    reached = {}
    for job in (one, other):
        (runner,) = job.pods("runner")
        command = ("exec", runner["metadata"]["name"], "-n", job.namespace, "--", "python", "-c", CONNECT)
        reached[job.name] = cluster.kubectl(*command, sandbox["status"]["podIP"], check=False)
    assert "timed out" in reached["one"].stderr, reached["one"]
    assert reached["other"].returncode == 0, reached["other"].stderr
