"""The operator's processes on a real API server: what users see when a replica, or the API server, goes away."""

import signal
import time
from typing import Any

from tests.integration.operator_core.conftest import StartReplica
from tests.integration.operator_core.control_plane import ControlPlane, until


def sandbox(name: str, namespace: str) -> dict[str, Any]:
    """A Sandbox applied by hand."""
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "Sandbox",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"image": "localhost/none:1", "workspaces": {"mode": "Plain"}},
    }


def test_other_replica_takes_over_from_a_killed_one_and_nothing_is_created_twice(
    plane: ControlPlane, namespace: str, start: StartReplica
) -> None:
    first = start("first")
    first.until_it_leads()
    second = start("second")
    plane.apply(*(sandbox(f"before-{number}", namespace) for number in range(4)))
    until(lambda: len(plane.names("pods", namespace)) == 4, "four pods")
    assert not second.leads()

    first.process.send_signal(signal.SIGKILL)
    plane.apply(*(sandbox(f"after-{number}", namespace) for number in range(4)))
    second.until_it_leads()
    until(lambda: len(plane.names("pods", namespace)) == 8, "eight pods")

    by_first, by_second = plane.writes("first", namespace), plane.writes("second", namespace)
    assert set(by_first).isdisjoint(by_second)
    assert sorted(write for write in by_first + by_second if write.startswith("create pods")) == sorted(
        f"create pods/{when}-{number}" for when in ("before", "after") for number in range(4)
    )


def test_stopped_replica_releases_the_lease_without_a_gap(
    plane: ControlPlane, namespace: str, start: StartReplica
) -> None:
    first = start("first")
    first.until_it_leads()
    second = start("second")

    def holder() -> str:
        lease = plane.get("lease", "rollout-operator", namespace)
        assert lease is not None
        return str(lease["spec"].get("holderIdentity", ""))

    holder_at_first = holder()
    assert holder_at_first
    assert first.stop() == 0
    assert holder() != holder_at_first
    second.until_it_leads()


def test_a_frozen_leader_does_not_write_when_it_thaws(plane: ControlPlane, namespace: str, start: StartReplica) -> None:
    first = start("first")
    first.until_it_leads()
    second = start("second")
    first.process.send_signal(signal.SIGSTOP)
    second.until_it_leads()
    plane.apply(sandbox("one", namespace))
    until(lambda: plane.names("pods", namespace), "its pod")
    first.process.send_signal(signal.SIGCONT)
    until(lambda: first.metric("rollout_leader") == 0, "the first replica has noticed")
    plane.apply(sandbox("two", namespace))
    until(lambda: len(plane.names("pods", namespace)) == 2, "the second pod")
    assert plane.writes("first", namespace) == []
    assert not first.leads()


def test_outage_of_the_api_server_neither_ends_the_operator_nor_leaves_orphans(
    plane: ControlPlane, namespace: str, start: StartReplica
) -> None:
    replica = start("first")
    replica.until_it_leads()
    plane.apply(*(sandbox(f"s-{number}", namespace) for number in range(3)))
    until(lambda: len(plane.names("pods", namespace)) == 3, "three pods")

    plane.kill_api_server()
    until(lambda: not replica.leads(), "it stops writing when it cannot renew")
    assert replica.healthy()
    assert replica.process.poll() is None
    plane.start_api_server()
    # Deleted before the watches reconnect, and too late for them to resume.
    plane.kubectl("delete", "sandbox", "s-0", "s-1", "-n", namespace, "--wait=false")

    replica.until_it_leads()
    until(lambda: replica.metric('rollout_sandboxes{state="Starting"}') == 1, "it has noticed both deletions")
    plane.apply(sandbox("s-3", namespace))
    until(lambda: plane.get("pod", "s-3", namespace), "it works again")


def test_object_of_an_earlier_owner_is_not_adopted(plane: ControlPlane, namespace: str, start: StartReplica) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "earlier", "uid": "00000000-0000-0000-0000-000000000000"}
    plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "earlier", "namespace": namespace}})
    earlier = plane.get("configmap", "earlier", namespace)
    assert earlier is not None
    reference = owner | {"uid": earlier["metadata"]["uid"], "controller": True}
    metadata = {"name": "s", "namespace": namespace, "ownerReferences": [reference]}
    container = {"name": "c", "image": "localhost/none:1"}
    plane.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})

    replica = start("first")
    replica.until_it_leads()
    plane.apply(sandbox("s", namespace))
    until(
        lambda: "belongs to ConfigMap earlier" in plane.kubectl("get", "events", "-n", namespace, "-o", "json"),
        "an event that says what is in the way",
    )
    plane.kubectl("delete", "configmap", "earlier", "-n", namespace)
    until(lambda: _controller(plane.get("pod", "s", namespace)) == "Sandbox", "the Sandbox's own pod")


def test_unchanged_object_causes_no_write(plane: ControlPlane, namespace: str, start: StartReplica) -> None:
    replica = start("first")
    replica.until_it_leads()
    plane.apply(sandbox("s", namespace))
    until(lambda: plane.get("pod", "s", namespace), "its pod")
    until(lambda: replica.metric('rollout_workqueue_depth{name="Sandbox"}') == 0, "an empty queue")
    time.sleep(2)
    before = plane.writes("first", namespace)
    for number in range(5):
        plane.kubectl("label", "sandbox", "s", "-n", namespace, f"note={number}", "--overwrite")
    name = 'rollout_controller_reconcile_total{controller="Sandbox",result="requeue_after"}'
    seen = replica.metric(name)
    plane.kubectl("label", "sandbox", "s", "-n", namespace, "note=last", "--overwrite")
    until(lambda: replica.metric(name) > seen, "the change was looked at")
    assert plane.writes("first", namespace) == before


def _controller(obj: dict[str, Any] | None) -> str:
    owners = obj["metadata"].get("ownerReferences", []) if obj else []
    return next((owner["kind"] for owner in owners if owner.get("controller")), "")
