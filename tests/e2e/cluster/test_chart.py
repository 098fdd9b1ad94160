"""The chart on a real cluster: its definitions, and a second release beside the one that all tests use."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.chart import CHART
from tests.support.cluster import Cluster, eventually
from tests.support.release import InstalledRelease, Release

CRDS = ("rolloutjobs.rollout.dev", "rolloutshards.rollout.dev", "sandboxes.rollout.dev", "modelservers.rollout.dev")


def test_an_operator_comes_up_restricted_with_rights_in_one_namespace_is_upgraded_and_goes(release: Release) -> None:
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


def test_another_replica_takes_over_from_one_that_is_deleted(release: Release) -> None:
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


@pytest.mark.alone
def test_definitions_are_upgraded_with_the_chart(cluster: Cluster, installed: InstalledRelease, tmp_path: Path) -> None:
    newer = tmp_path / "chart"
    shutil.copytree(CHART, newer)  # with the definitions themselves where the chart has a link to them
    definition = newer / "files/crds/rolloutjobs.yaml"

    def explained() -> str:
        return str(cluster.kubectl("explain", "rolloutjob.spec.groupSize").stdout)

    definition.write_text(definition.read_text().replace("Rollouts of each task", "Siblings of each task"))
    try:
        installed.install(chart=newer)
        eventually(lambda: "Siblings of each task" in explained() or None, 30, explained)
    finally:
        installed.install()
    eventually(lambda: "Rollouts of each task" in explained() or None, 30, explained)
