"""Accelerators by dynamic resource allocation, with the driver that Kubernetes itself is tested with: claims are made,
allocated and prepared by the real scheduler and kubelet."""

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, Object, eventually
from tests.support.model_server import Server, quick_pods

pytestmark = [pytest.mark.alone, pytest.mark.full]  # there is one driver, with few devices

# hack/cluster/harness/components.py: DRA_DRIVER_NAME, DEVICES_OF_A_NODE.
DRIVER, DEVICES = "test-driver.cdi.k8s.io", 2
NAMES = EARLY, LATE = "early", "late"
CLASS, TEMPLATE, REQUEST = "rollout-test", "one-device", "accelerator"


@pytest.fixture
def devices(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Create a node with devices, a class of them, and a template of claims."""
    if not cluster.details:
        pytest.skip("this test adds a driver to the cluster itself, which only the harness (hack/cluster) lets it do")
    cluster.node_process("addon", "start", "devices")
    selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
    request = {"name": REQUEST, "exactly": {"deviceClassName": CLASS}}
    api = "resource.k8s.io/v1"
    cluster.apply(
        {"apiVersion": api, "kind": "DeviceClass", "metadata": {"name": CLASS}, "spec": {"selectors": [selector]}},
        {
            "apiVersion": api,
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": TEMPLATE, "namespace": namespace},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        },
    )
    yield
    for name in NAMES:
        # The driver's last work is to take the devices back.
        Server(cluster, namespace, name).delete()
    cluster.kubectl("delete", "deviceclass", CLASS)
    cluster.node_process("addon", "stop", "devices")


def claiming(cluster: Cluster, namespace: str, name: str, replicas: int) -> Server:
    """Return a ModelServer whose servers claim one device each."""
    pods = {"podTemplate": {"spec": quick_pods()}}
    return Server(cluster, namespace, name).apply(replicas=replicas, accelerator={"claimTemplate": TEMPLATE}, **pods)


def claim_of(server: Server, pod_name: str) -> Object:
    """Return the claim that was made for a pod."""
    pod = server.cluster.get("pod", pod_name, server.namespace)
    assert pod is not None
    [status] = pod["status"]["resourceClaimStatuses"]
    claim = server.cluster.get("resourceclaim", status["resourceClaimName"], server.namespace)
    assert claim is not None
    return claim


@pytest.mark.usefixtures("devices")
def test_each_server_has_its_own_device_and_a_further_one_waits(cluster: Cluster, namespace: str) -> None:
    server = claiming(cluster, namespace, EARLY, DEVICES).wait_ready(DEVICES)
    taken = set()
    for entry in server.ready:
        claim = claim_of(server, entry["name"])
        [result] = claim["status"]["allocation"]["devices"]["results"]
        assert (result["driver"], result["request"]) == (DRIVER, REQUEST)
        assert [user["name"] for user in claim["status"]["reservedFor"]] == [entry["name"]]
        taken.add(result["device"])
        # What the driver says by CDI about a claim's device, the engine sees and the gateway does not.
        variable = f"claim_{claim['metadata']['name']}_{REQUEST}=true".replace("-", "_")
        for container, sees in (("engine", True), ("gateway", False)):
            environ = cluster.kubectl("exec", entry["name"], "-n", namespace, "-c", container, "--", "env").stdout
            assert (variable in environ.splitlines()) is sees, environ
    assert len(taken) == DEVICES

    late = claiming(cluster, namespace, LATE, 1)
    full = "cannot allocate all claims"  # the scheduler's words
    eventually(lambda: full in late.condition("Ready").get("message", "") or None, 60, late.describe)
    ready = late.condition("Ready")
    assert ready["reason"] == "Unschedulable", ready
    assert ready["message"].startswith(f"0 of 1 servers are ready; {LATE}-0 waits: 0/"), ready

    uid = server.ready[0]["uid"]
    cluster.kubectl("scale", "modelserver", server.name, "-n", namespace, "--replicas=1")
    late.wait_ready(1)
    [result] = claim_of(late, f"{LATE}-0")["status"]["allocation"]["devices"]["results"]
    assert result["device"] in taken
    assert server.wait_ready(1).ready[0]["uid"] == uid
