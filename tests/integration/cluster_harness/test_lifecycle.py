"""A second cluster beside the first one: two nodes, started, damaged, recovered, and removed completely."""

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hack.cluster.harness.processes import parse_stat
from tests.integration.cluster_harness.pods import PORT, base_archive, pod, reach, run_harness, run_pods
from tests.support.cluster import REPOSITORY, Cluster, Object, eventually

pytestmark = [pytest.mark.long, pytest.mark.full]

NAME = "lifecycle"


@pytest.fixture(scope="module", autouse=True)
def gone_afterwards() -> Iterator[None]:
    yield
    run_harness("down", "--name", NAME)


@pytest.fixture
def second() -> Cluster:
    """The second cluster, healthy, with two nodes and the image of the pods on both."""
    run_harness("up", "--name", NAME, "--nodes", "2")
    run_harness("load-image", "--name", NAME, base_archive())
    details = describe()
    return Cluster(Path(details["kubeconfig"]), {}, details["s3"]["bucket"], details)


def describe() -> Object:
    """Return the second cluster's status, healthy or not."""
    status = [str(REPOSITORY / "hack/cluster/status"), "--name", NAME, "--json"]
    found: Object = json.loads(subprocess.run(status, capture_output=True, timeout=60, check=False).stdout)
    return found


def is_healthy() -> bool:
    return bool(describe()["healthy"])


def processes_of(namespaces: set[str]) -> dict[int, int]:
    """Return the start times of all processes in these process id namespaces, except zombies."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, started = parse_stat((folder / "stat").read_text())
            if os.readlink(folder / "ns/pid") in namespaces and state != "Z":
                found[int(folder.name)] = started
    return found


def namespaces_of(nodes: Sequence[Object]) -> set[str]:
    """Return the process id namespaces of the nodes; each pod has a nested one."""
    return {os.readlink(f"/proc/{node['components']['containerd']}/ns/pid") for node in nodes}


def test_killed_start_is_cleaned_up_by_the_next_one() -> None:
    start = subprocess.Popen(
        [str(REPOSITORY / "hack/cluster/up"), "--name", NAME], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def half_started() -> set[str] | None:
        assert start.poll() is None, "it was over before it could be killed"
        nodes = describe().get("nodes", [])
        return namespaces_of(nodes) if nodes and nodes[0]["components"].get("containerd") else None

    half = eventually(half_started, 240)
    start.kill()
    start.wait()
    assert not is_healthy()
    left = processes_of(half)
    assert left, "what it had started runs on"
    run_harness("up", "--name", NAME)
    assert is_healthy()
    # By process: the kernel may give the name of a namespace that is gone to one of the new cluster.
    assert not left.items() & processes_of(half).items()


def test_pods_of_two_nodes_see_each_others_addresses_under_policies(second: Cluster) -> None:
    addresses = run_pods(
        second, pod("near", "default", nodeName=f"{NAME}-0"), pod("far", "default", nodeName=f"{NAME}-1")
    )
    far, near = f"{addresses['far']}:{PORT}", f"{addresses['near']}:{PORT}"
    # A NetworkPolicy matches callers by their address, so the address must be kept between nodes.
    assert reach(second, "default", "near", far) == {far: addresses["near"]}
    assert reach(second, "default", "far", near) == {near: addresses["far"]}
    assert reach(second, "default", "far", "kubernetes.default:443") == {"kubernetes.default:443": "open"}
    closed = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "closed", "namespace": "default"},
        "spec": {"podSelector": {"matchLabels": {"app": "far"}}, "policyTypes": ["Ingress"]},
    }
    second.apply(closed)
    eventually(lambda: reach(second, "default", "near", far) == {far: None} or None, 30)


def test_a_stopped_component_is_noticed_and_starts_again_with_all_it_had(second: Cluster) -> None:
    second.kubectl("create", "configmap", "kept")
    for component in ("apiserver", "etcd", "s3"):
        run_harness("component", "kill", component, "--name", NAME)
        assert not is_healthy(), component
        run_harness("component", "start", component, "--name", NAME)
        eventually(lambda: is_healthy() or None, 60)
    assert second.get("configmap", "kept", "default") is not None
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(second.details["s3"]["endpoint"], timeout=10)


def test_a_killed_node_takes_its_pods_with_it_and_another_can_be_added(second: Cluster) -> None:
    lost = namespaces_of(second.details["nodes"][1:])
    assert processes_of(lost)
    run_harness("node", "kill", "1", "--name", NAME)
    eventually(lambda: not processes_of(lost) or None, 10, lambda: str(processes_of(lost)))

    def is_missed() -> bool | None:
        node = second.get("node", f"{NAME}-1", "")
        assert node is not None
        return any(c["type"] == "Ready" and c["status"] == "Unknown" for c in node["status"]["conditions"]) or None

    eventually(is_missed, 120)
    run_harness("node", "add", "--name", NAME)
    assert is_healthy()


def test_cluster_whose_processes_were_killed_starts_again_and_stops_cleanly(second: Cluster) -> None:
    run_pods(second, pod("victim", "default"))
    for pid in processes_of(namespaces_of(second.details["nodes"])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not is_healthy()
    run_harness("up", "--name", NAME)
    assert is_healthy()

    details = describe()
    namespaces = namespaces_of(details["nodes"])
    run_harness("down", "--name", NAME)
    state = Path(details["kubeconfig"]).parent
    assert not state.exists()
    assert not processes_of(namespaces)
    assert str(state) not in Path("/proc/self/mountinfo").read_text()
    assert not list(Path("/sys/fs/cgroup").glob("**/agent-rollouts-lifecycle-*"))
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    assert details["podRange"] not in routes
    assert details["serviceRange"] not in routes
    assert is_healthy() is False
