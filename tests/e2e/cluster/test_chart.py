"""The chart on a real cluster: its definitions, and a second release beside the one that all tests use."""

import json

from tests.support.cluster import Cluster, eventually
from tests.support.release import Release

CRDS = ("rolloutjobs.rollout.dev", "rolloutshards.rollout.dev", "sandboxes.rollout.dev", "modelservers.rollout.dev")


def test_restricted_operator_of_one_namespace_installs_upgrades_and_uninstalls(release: Release) -> None:
    assert f"in {release.namespace}" in release.upgrade()
    first = release.wait_leader()
    logs = release.cluster.kubectl("logs", first, "-n", release.namespace).stdout
    assert "cache is complete" in logs
    assert "forbidden" not in logs.lower()

    release.upgrade("workers=3")
    second = release.wait_leader()
    assert second != first, "a changed configuration must reach the operator"

    release.helm("uninstall", "second", "--wait", "--timeout", "1m")
    eventually(lambda: not release.left() or None, 60, lambda: str(release.left()))
    assert all(release.cluster.kubectl("get", "crd", name).returncode == 0 for name in CRDS)


def test_another_replica_takes_over_from_a_deleted_one(release: Release) -> None:
    release.upgrade("replicas=2", "podDisruptionBudget.enabled=true")
    first = release.wait_leader()
    release.cluster.kubectl("delete", "pod", first, "-n", release.namespace, "--wait=false")
    assert release.wait_leader() != first
    budget = json.loads(release.cluster.kubectl("get", "pdb", "second", "-n", release.namespace, "-o", "json").stdout)
    assert budget["status"]["expectedPods"] == 2


def test_installed_definitions_outlive_the_release(cluster: Cluster) -> None:
    for name in CRDS:
        definition = json.loads(cluster.kubectl("get", "crd", name, "-o", "json").stdout)
        annotations = definition["metadata"]["annotations"]
        assert annotations["helm.sh/resource-policy"] == "keep"
        assert annotations["meta.helm.sh/release-name"] == "agent-rollouts"
        assert "finalizers" not in definition["metadata"]
