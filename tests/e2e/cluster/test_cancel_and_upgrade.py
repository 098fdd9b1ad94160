"""Deleting a job cancels it at once. Installing, upgrading and uninstalling the operator does not disturb a job."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chart import CHART
from tests.support.cluster import Cluster, Job, Object, assert_undisturbed, eventually, slow_quickstart
from tests.support.release import InstalledRelease

KINDS = "rolloutjobs,sandboxes,jobs,pods,secrets,serviceaccounts,roles,rolebindings,networkpolicies"
GONE_WITHIN_SECONDS = 30
"""Documented time limit for the removal of a deleted job's objects."""


def all_of(job: Job) -> list[Object]:
    """Return every object of a job, including the job."""
    found = job.cluster.list(KINDS, job.namespace)
    return [thing for thing in found if thing["metadata"]["name"].startswith(job.name)]


def assert_readable(job: Job, sealed: int) -> None:
    """Check that the job's record is in storage, with at least this many sealed rollouts."""
    assert job.sealed() >= sealed
    assert job.read("job.json")


def test_deleted_job_is_removed_in_30_s_and_keeps_its_results(
    cluster: Cluster, new_namespace: Callable[..., str], new_job: Callable[..., Job]
) -> None:
    by_name, by_namespace = (
        new_job(slow_quickstart(3, runners={"concurrency": 4}), to=new_namespace()).apply() for _ in range(2)
    )
    for job in (by_name, by_namespace):
        job.wait_stored(1)
    sealed = {job: job.sealed() for job in (by_name, by_namespace)}
    kinds = {thing["kind"] for thing in all_of(by_name)}
    assert {"Sandbox", "Pod", "Job", "Secret", "Role", "RoleBinding", "ServiceAccount", "NetworkPolicy"} <= kinds
    ours = [thing for thing in all_of(by_name) if thing["kind"] not in ("Pod", "Job")]
    assert not [thing for thing in ours if thing["metadata"].get("finalizers")]

    by_name.delete("--wait=false")
    cluster.kubectl("delete", "namespace", by_namespace.namespace, "--wait=false")

    def left() -> list[Object]:
        return [*all_of(by_name), *all_of(by_namespace)]

    def gone() -> bool:
        return not left() and cluster.get("namespace", by_namespace.namespace, "") is None

    eventually(lambda: gone() or None, GONE_WITHIN_SECONDS, lambda: str(left()))
    for job in (by_name, by_namespace):
        assert_readable(job, sealed[job])


@pytest.mark.alone
def test_job_continues_while_the_chart_is_upgraded_uninstalled_and_reinstalled(
    cluster: Cluster, installed: InstalledRelease, new_job: Callable[[Object], Job], tmp_path: Path
) -> None:
    newer = tmp_path / "chart"
    shutil.copytree(CHART, newer)  # with the definitions themselves where the chart has a link to them
    definition = newer / "files/crds/rolloutjobs.yaml"
    definition.write_text(definition.read_text().replace("Rollouts of each task", "Siblings of each task"))

    def explained() -> str:
        return str(cluster.kubectl("explain", "rolloutjob.spec.groupSize").stdout)

    job = new_job(slow_quickstart(3, runners={"concurrency": 8})).apply()
    job.wait_stored(1)
    runners = [pod["metadata"]["uid"] for pod in job.pods("runner")]
    try:
        installed.install("--set", "workers=4", chart=newer)
        eventually(lambda: "Siblings of each task" in explained() or None, 30, explained)
        installed.uninstall()
        assert job.object["metadata"]["uid"] == job.uid
        assert not job.object["metadata"].get("deletionTimestamp")
        sealed = job.sealed()
        assert sealed < 24, "the job was over before the operator went; give it more to do"
        job.wait_stored(sealed + 1)
    finally:
        installed.install()
    eventually(lambda: "Rollouts of each task" in explained() or None, 30, explained)

    job.wait("Succeeded")
    assert_undisturbed(job)
    assert [pod["metadata"]["uid"] for pod in job.pods("runner")] == runners
