"""A HorizontalPodAutoscaler of a ModelServer adds and removes servers as the number of the job's calls changes."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.cluster import QUICKSTART_IMAGE, REPOSITORY, Cluster, Job, Object
from tests.support.documentation import blocks
from tests.support.model_server import NAME, Server, upload_weights
from tests.support.served_jobs import MEMBERS, endless_model, let_end, results_of, served_job, wait_tokens

pytestmark = pytest.mark.full

API = "v1beta1.external.metrics.k8s.io"
TASKS = 4
MOST_SERVERS = 3
CALLS_OF_A_SERVER = 6
"""Calls for each server. 16 rollouts make 16 concurrent calls, so the autoscaler wants three servers."""


@pytest.fixture
def metrics_adapter(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[None]:
    """Serve the metric `rollout_model_calls` as prometheus-adapter would."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=adapter"
    files = ("-keyout", tmp_path / "tls.key", "-out", tmp_path / "tls.crt")
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    name, labels = "metrics-adapter", {"app": "metrics-adapter"}
    metadata = {"name": name, "namespace": namespace}
    account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    autoscaler = {"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler", "namespace": "kube-system"}
    code = (REPOSITORY / "tests/support/metrics_adapter.py").read_text()
    container = {
        "name": "main",
        "image": QUICKSTART_IMAGE,
        "command": ["python3", "-c", code, "/tls/tls.crt", "/tls/tls.key"],
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
        "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
    }
    pod = {
        "serviceAccountName": name,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "tls", "secret": {"secretName": name}}],
    }
    rbac = "rbac.authorization.k8s.io"
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "view"},
            "subjects": [account],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": f"{namespace}-metrics"},
            "rules": [{"apiGroups": ["external.metrics.k8s.io"], "resources": ["*"], "verbs": ["get", "list"]}],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{namespace}-metrics"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": f"{namespace}-metrics"},
            "subjects": [autoscaler],
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "stringData": {file: (tmp_path / file).read_text() for file in ("tls.crt", "tls.key")},
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata | {"labels": labels}, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": [{"port": 443, "targetPort": 8443}]},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": API},
            "spec": {
                "group": "external.metrics.k8s.io",
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {"name": name, "namespace": namespace},
            },
        },
    )
    cluster.kubectl("wait", "--for=condition=Available", f"apiservice/{API}", "--timeout=120s")
    yield
    cluster.kubectl("delete", f"apiservice/{API}", f"clusterrole/{namespace}-metrics")
    cluster.kubectl("delete", f"clusterrolebinding/{namespace}-metrics")


def test_servers_scale_up_and_down_with_the_calls_of_a_job(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], metrics_adapter: None
) -> None:
    server = Server(cluster, namespace).apply(replicas=1, **endless_model(cluster, namespace)).wait_ready(1)
    [first] = server.ready
    server.update(1, upload_weights(cluster, namespace, "policy-1", 1))
    [page] = [
        block for block in blocks(REPOSITORY / "docs/scaling-model-servers.md") if block.title == "autoscaler.yaml"
    ]
    autoscaler = yaml.safe_load(page.text)
    autoscaler["metadata"] = {"name": NAME, "namespace": namespace}
    autoscaler["spec"]["scaleTargetRef"]["name"] = NAME
    autoscaler["spec"]["maxReplicas"] = MOST_SERVERS
    autoscaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 5
    [metric] = autoscaler["spec"]["metrics"]
    metric["external"]["metric"]["selector"]["matchLabels"] = {"model_server": NAME}
    metric["external"]["target"]["averageValue"] = str(CALLS_OF_A_SERVER)
    cluster.apply(autoscaler)

    job = new_job(served_job("served", {"serverRef": NAME}, tasks=TASKS, runners=1)).apply()
    server.wait_ready(MOST_SERVERS)
    wait_tokens(server, TASKS * MEMBERS)
    assert {entry["policyVersion"] for entry in server.ready} == {1}, "a new server has the policy of the others"
    assert job.sealed() == 0
    let_end(server)
    job.wait("Succeeded")
    _, results = results_of(job)
    assert [result.failed_attempts for result in results] == [[]] * (TASKS * MEMBERS)
    server.wait_ready(1)
    assert [entry["uid"] for entry in server.ready] == [first["uid"]]
