"""A Gateway in front of a ModelServer's InferencePool: real Envoy, and the endpoint picker of the Gateway API Inference
Extension."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Object, eventually
from tests.support.gateway import envoy_config, envoy_program, picker_arguments, picker_program
from tests.support.model_server import NAME, Server, quick_pods, upload_weights

pytestmark = [pytest.mark.alone, pytest.mark.full]  # it adds a kind to the cluster, for all

GATEWAY, PICKER_PORT, PORT = "gateway", 9002, 8080
ASK = """
import json, sys, urllib.request
for prompt in sys.argv[1:]:
    body = json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request("http://127.0.0.1:8080/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        usage = json.load(response)["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        print(json.dumps([response.headers["X-Policy-Version"], cached]))
"""


@pytest.fixture
def pools(cluster: Cluster) -> Iterator[None]:
    if not cluster.details:
        pytest.skip("this test adds to the cluster itself, which only the harness (hack/cluster) lets it do")
    cluster.node_process("addon", "start", "inference-pools")
    yield
    cluster.node_process("addon", "stop", "inference-pools")


def test_gateway_forwards_requests_to_servers_with_the_current_policy(
    cluster: Cluster, namespace: str, pools: None, tmp_path: Path
) -> None:
    server = Server(cluster, namespace).apply(
        replicas=2,
        inferencePool={"endpointPicker": {"name": GATEWAY, "port": PICKER_PORT}},
        clients=[{"podSelector": {"matchLabels": {"app": GATEWAY}}}],
        podTemplate={"spec": quick_pods()},
    )
    server.wait_ready(2)
    assert server.condition("InferencePool")["status"] == "True"
    start_gateway(cluster, namespace, tmp_path)
    prompts = [f"{number} " * 100 for number in range(8)]
    first, again = ask(cluster, namespace, prompts), ask(cluster, namespace, prompts)
    assert [version for version, _ in first + again] == ["0"] * 16
    assert all(cached > 0 for _, cached in again), "the picker sends a prompt to the server that has it in its cache"
    served = [len(server.ask_engine(f"{NAME}-{index}", "/_standin/served")) for index in range(2)]
    assert min(served) > 0, f"both servers get requests: {served}"

    server.patch(policy={"version": 1, "uri": upload_weights(cluster, namespace, "policy-1", 1)})
    server.wait_policy(1)
    assert {version for version, _ in ask(cluster, namespace, prompts)} == {"1"}

    server.patch(inferencePool=None)
    eventually(lambda: cluster.get("inferencepool", NAME, namespace) is None or None, 60, server.describe)
    server.delete()


def start_gateway(cluster: Cluster, namespace: str, folder: Path) -> None:
    """Start Envoy and the picker in one pod, from programs of its node."""
    (folder / "envoy.json").write_text(json.dumps(envoy_config(port=PORT, picker_port=PICKER_PORT)))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    arguments = picker_arguments(NAME, namespace, port=PICKER_PORT, health_port=9003, metrics_port=9090)
    folders = {"picker": picker_program().parent, "envoy": envoy_program().parent, "config": folder}
    mounts = [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in folders]
    commands = {
        "picker": [f"/picker/{picker_program().name}", *arguments],
        "envoy": ["/envoy/envoy", "-c", "/config/envoy.json", "-l", "error"],
    }
    containers = [
        {"name": name, "image": QUICKSTART_IMAGE, "command": command, "volumeMounts": mounts}
        for name, command in commands.items()
    ]
    rbac = "rbac.authorization.k8s.io"
    metadata: Object = {"name": GATEWAY, "namespace": namespace}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": ["inference.networking.k8s.io"],
            "resources": ["inferencepools"],
            "verbs": ["get", "list", "watch"],
        },
    ]
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": GATEWAY},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**metadata, "labels": {"app": GATEWAY}},
            "spec": {
                "serviceAccountName": GATEWAY,
                "terminationGracePeriodSeconds": 0,
                "containers": containers,
                "volumes": [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()],
            },
        },
    )
    cluster.kubectl("wait", "--for=condition=Ready", "pod", GATEWAY, "-n", namespace, "--timeout=60s")
    eventually(lambda: ask(cluster, namespace, ["Hi"], check=False), 60, lambda: logs(cluster, namespace))


def ask(cluster: Cluster, namespace: str, prompts: list[str], *, check: bool = True) -> list[tuple[str, int]]:
    """Return the policy version of each answer, and the number of cached tokens of its prompt."""
    where = ("exec", GATEWAY, "-n", namespace, "-c", "envoy", "--")
    done = cluster.kubectl(*where, "python3", "-c", ASK, *prompts, check=False)
    assert not check or done.returncode == 0, f"{done.stderr} {logs(cluster, namespace)}"
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def logs(cluster: Cluster, namespace: str) -> str:
    return cluster.kubectl("logs", GATEWAY, "-n", namespace, "--all-containers", "--tail=40", check=False).stdout
