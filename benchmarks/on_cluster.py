"""What benchmarks use on the test cluster: a namespace, an open job, and a process in its runner's pod.

Measurements of a runner are made in a runner's pod, with its rights, its key and its network.
"""

import contextlib
import io
import json
import secrets
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.conversation import ROOT, Process
from rollout_api.cluster import runner_name
from tests.support.cluster import (
    QUICKSTART_IMAGE,
    STORAGE_SECRET,
    Cluster,
    Job,
    Object,
    eventually,
    find_cluster,
    storage_secret,
)

SUBJECT = "benchmarks.subjects.runner_pod"
SUBJECT_FILES = ("conversation.py", "subjects/runner_pod.py", "__init__.py", "subjects/__init__.py")
"""Benchmark files that SUBJECT imports; everything else is in the runtime image."""
PLACES = 16  # workspaces of a sandbox: more than any benchmark uses at once
START_SECONDS = 180.0
END_SECONDS = 1200.0
WRITES = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"})
REVIEWS = frozenset({"authentication.k8s.io", "authorization.k8s.io"})
OPERATOR = "system:serviceaccount:agent-rollouts:agent-rollouts"


class NoCluster(Exception):
    """There is no cluster for this benchmark; the message says how to start one."""


def any_cluster() -> Cluster:
    """Return the cluster of hack/cluster, or the one that ROLLOUT_TEST_KUBECONFIG names. Raises NoCluster."""
    found = find_cluster()
    if found is None:
        raise NoCluster("no cluster is running: start one with `make cluster`, or name one in ROLLOUT_TEST_KUBECONFIG")
    return found


def harness_cluster() -> Cluster:
    """Return the cluster of hack/cluster, whose audit log can be read. Raises NoCluster."""
    found = any_cluster()
    if not found.details:
        raise NoCluster("it counts writes in the audit log, which can be read only on the cluster of hack/cluster")
    return found


@contextlib.contextmanager
def new_namespace(cluster: Cluster) -> Iterator[str]:
    """Yield a namespace that admits both workspace modes and has the storage's Secret; deleted at the end."""
    name = f"benchmark-{secrets.token_hex(3)}"
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    try:
        cluster.apply(storage_secret(cluster, name))
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        # Waits, so that the deletion does not affect the next benchmark.
        eventually(lambda: cluster.get("namespace", name, name) is None or None, END_SECONDS, lambda: f"{name} stays")


def job_in(cluster: Cluster, namespace: str, name: str, spec: Mapping[str, Any]) -> Job:
    """Apply a job with the quickstart's image; its results go to the cluster's storage."""
    sandbox = {"image": QUICKSTART_IMAGE, **spec.get("sandbox", {})}
    output = {"uri": f"s3://{cluster.bucket}/{namespace}", "secretRef": STORAGE_SECRET}
    manifest: Object = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {"agent": {"type": "Nop"}, **spec, "sandbox": sandbox, "output": output},
    }
    return Job(cluster, namespace, manifest).apply()


def open_job(cluster: Cluster, namespace: str, **sandbox: Any) -> Job:
    """Return a job without submitted tasks: its runner waits, and the benchmark creates its Sandboxes."""
    workspaces = {"mode": "Overlay", "perSandbox": PLACES}
    spec = {"tasks": {"stream": {}}, "sandbox": {"workspaces": workspaces, **sandbox}}
    job = job_in(cluster, namespace, "open", spec)
    job.wait("Ready", START_SECONDS)
    return job


@contextlib.contextmanager
def runner_process(cluster: Cluster) -> Iterator[tuple[Process, Job]]:
    """Yield `benchmarks.subjects.runner_pod`, which runs in the runner's pod of an open job and is ready for requests; and
    the job.
    """
    with new_namespace(cluster) as namespace:
        job = open_job(cluster, namespace)
        cluster.apply(*_peers_rights(job))
        pod = eventually(lambda: _running_runner(job), START_SECONDS, job.describe)
        into = ("exec", "-i", "-n", namespace, pod, "--", "python3")
        kubectl = [cluster.program("kubectl"), "--kubeconfig", str(cluster.kubeconfig)]
        unpack = "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall('/tmp')"
        subprocess.run([*kubectl, *into, "-c", unpack], input=_subject_files(), check=True)
        start = f"import sys, runpy; sys.path.insert(0, '/tmp'); runpy.run_module({SUBJECT!r}, run_name='__main__')"
        with Process(SUBJECT, [*kubectl, *into, "-c", start]) as process:
            yield process, job


def _running_runner(job: Job) -> str | None:
    for pod in job.pods("runner"):
        if pod["status"]["phase"] == "Running" and all(c["ready"] for c in pod["status"]["containerStatuses"]):
            return str(pod["metadata"]["name"])
    return None


def _subject_files() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in SUBJECT_FILES:
            archive.add(ROOT / "benchmarks" / file, arcname=f"benchmarks/{file}")
    return packed.getvalue()


def _peers_rights(job: Job) -> tuple[Object, Object]:
    """Return a role and its binding for pods/exec and bare pods, in addition to a runner's own rights."""
    metadata = {"name": "benchmark", "namespace": job.namespace}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "create", "delete"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
    ]
    account = {"kind": "ServiceAccount", "name": runner_name(job.name), "namespace": job.namespace}
    group = "rbac.authorization.k8s.io"
    return (
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "benchmark"},
            "subjects": [account],
        },
    )


def api_writes(cluster: Cluster) -> Counter[str]:
    """Return the writes that the API server has had so far from anyone, by `VERB resource[/subresource]`. Without leases,
    which are renewed at all times, and without requests that only ask for a token or a review.
    """
    found: Counter[str] = Counter()
    lines = cluster.kubectl("get", "--raw", "/metrics").stdout.splitlines()
    text = "\n".join(line for line in lines if line.startswith("apiserver_request_total{"))
    for family in text_string_to_metric_families(f"{text}\n"):
        for sample in family.samples:
            labels = sample.labels
            verb, resource, subresource = (labels[name] for name in ("verb", "resource", "subresource"))
            stored = resource != "leases" and subresource != "token" and labels["group"] not in REVIEWS
            if verb in WRITES and stored:
                found[f"{verb} {'/'.join(filter(None, (resource, subresource)))}"] += int(sample.value)
    return found


class AuditLog:
    """Counts writes to the API server since the creation of this object, from the API server's audit log."""

    def __init__(self, cluster: Cluster) -> None:
        self._path = Path(cluster.details["auditLog"])
        self._from = self._path.stat().st_size

    def writes(self, namespace: str) -> Counter[str]:
        """Return the number of writes by the operator and by runners in one namespace, by `verb resource[/subresource]`."""
        ours = (OPERATOR, f"system:serviceaccount:{namespace}:")
        found: Counter[str] = Counter()
        with self._path.open("rb") as file:
            file.seek(self._from)
            for line in file:
                if namespace.encode() not in line or not line.endswith(b"\n"):
                    continue
                entry = json.loads(line)
                target = entry.get("objectRef", {})
                if target.get("namespace") == namespace and entry["user"]["username"].startswith(ours):
                    parts = (target["resource"], target.get("subresource"))
                    found[f"{entry['verb']} {'/'.join(filter(None, parts))}"] += 1
        return found


def of_sandboxes(writes: Counter[str]) -> int:
    """Return the number of writes of Sandboxes and their pods."""
    return sum(count for what, count in writes.items() if what.split()[1].startswith(("sandboxes", "pods")))


def operator_kubeconfig(cluster: Cluster, place: Path) -> Path:
    """Write and return a kubeconfig for the operator's account, so that an operator outside a pod has the same rights and
    name.
    """
    namespace, account = OPERATOR.split(":")[2:]
    admin = json.loads(cluster.kubectl("config", "view", "--raw", "--flatten", "-o", "json").stdout)
    token = cluster.kubectl("create", "token", account, "-n", namespace, "--duration", "2h").stdout.strip()
    place.write_text(json.dumps(admin | {"users": [{"name": admin["users"][0]["name"], "user": {"token": token}}]}))
    return place
