"""Servers of several pods each, by the real LeaderWorkerSet controller, with the weights in a volume that all share."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_api.cluster import ROLE_LABEL, RUNNER_ROLE
from tests.support.cluster import Cluster, Object, eventually
from tests.support.model_server import NAME, Server, quick_pods
from tests.support.outages import Outages

pytestmark = [pytest.mark.alone, pytest.mark.full]  # it adds LeaderWorkerSet to the cluster, for all

CACHE = "shared-weights"
COMPLETE = r"""
import json, sys, time, urllib.error, urllib.request
for url in sys.argv[1:]:
    body = json.dumps({"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    # A node hears of a Service's servers some seconds after they are ready.
    for left in reversed(range(60)):
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                print(json.dumps([response.headers["X-Policy-Version"], json.load(response)["usage"]["completion_tokens"]]))
            break
        except urllib.error.URLError as error:
            if not left or not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(1)
"""


@pytest.fixture
def several_nodes(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[None]:
    """LeaderWorkerSet, and a volume that pods of all nodes may write to."""
    if not cluster.details:
        pytest.skip("this test adds to the cluster itself, which only the harness (hack/cluster) lets it do")
    cluster.node_process("addon", "start", "leader-worker-set")
    weights = tmp_path / "weights"
    weights.mkdir()
    weights.chmod(0o777)  # for the pods' own user
    volume, size, modes = f"{namespace}-weights", {"storage": "1Gi"}, ["ReadWriteMany"]
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "hostPath": {"path": str(weights)},
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CACHE, "namespace": namespace},
            "spec": {
                "accessModes": modes,
                "resources": {"requests": size},
                "storageClassName": "",
                "volumeName": volume,
            },
        },
    )
    yield
    Server(cluster, namespace).delete()
    cluster.node_process("addon", "stop", "leader-worker-set")
    cluster.kubectl("delete", "pvc", CACHE, "-n", namespace, "--wait=false")
    cluster.kubectl("delete", "pv", volume, "--wait=false")


def pod_of(cluster: Cluster, namespace: str, name: str) -> Object:
    found = cluster.get("pod", name, namespace)
    assert found is not None, f"pod {name} is gone"
    return found


@pytest.mark.usefixtures("several_nodes")
def test_server_of_two_pods_serves_updates_and_recovers_behind_the_gate(
    cluster: Cluster, namespace: str, outages: Outages
) -> None:
    server = Server(cluster, namespace).apply(
        replicas=2,
        parallelism={"tensor": 2, "nodes": 2},
        cache={"claimName": CACHE},
        podTemplate={"spec": quick_pods()},
    )
    server.wait_ready(2)
    assert [entry["name"] for entry in server.ready] == [f"{NAME}-0", f"{NAME}-1"]
    assert server.condition("Downloaded")["reason"] == "Downloaded"
    flags = server.ask_engine(f"{NAME}-1", "/_standin/flags")
    told = dict(itertools.pairwise(flags))
    assert told["--node-rank"] == "0"
    assert told["--master-addr"] == f"{NAME}-1.{NAME}.{namespace}"

    server.ask_for(1)
    server.wait_policy(1)
    urls = [server.status["url"], *(entry["url"] for entry in server.ready)]
    said = server.run_in_pod("asks", {ROLE_LABEL: RUNNER_ROLE}, COMPLETE, *urls)
    assert [json.loads(line) for line in said.splitlines()] == [["1", 4]] * 3

    before = {entry["name"]: entry["uid"] for entry in server.ready}
    outages.kill(pod_of(cluster, namespace, f"{NAME}-0-1"))
    seen: list[Object] = []

    def is_back() -> dict[str, str] | None:
        entries = {entry["name"]: entry for entry in server.status["servers"]}
        seen.extend(entries.values())
        zero = entries.get(f"{NAME}-0", {})
        if not zero.get("ready") or zero["uid"] == before[f"{NAME}-0"]:
            return None
        return {name: entry["uid"] for name, entry in entries.items() if entry["ready"]}

    eventually(is_back, 180, server.describe)
    assert {entry["policyVersion"] for entry in seen if entry["ready"]} == {1}
    for entry in server.wait_ready(2).ready:
        assert server.ask_engine(entry["name"], "/_standin/state")["version"] == 1
    assert server.ready[1]["uid"] == before[f"{NAME}-1"], "the other server was not touched"

    # A node that is drained takes one server at a time, whichever of its pods is there.
    before = {entry["name"]: entry["uid"] for entry in server.ready}
    eventually(lambda: server.evict(f"{NAME}-0-1") or None, 60, server.describe)
    assert not server.evict(f"{NAME}-1-1")
    assert not server.evict(f"{NAME}-1")
    assert eventually(is_back, 240, server.describe)[f"{NAME}-1"] == before[f"{NAME}-1"]
