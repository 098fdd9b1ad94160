"""The job that a laptop runs, applied to a cluster: the same rewards, member by member, in both modes."""

from collections.abc import Callable

import pytest

from tests.support.cluster import QUICKSTART_IMAGE, Job, Object, assert_rewards, quickstart_manifest
from tests.support.quickstart import REWARDS


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
def test_a_job_gives_the_rewards_on_a_cluster_that_it_gives_on_a_laptop(
    new_job: Callable[[Object], Job], mode: str
) -> None:
    manifest = quickstart_manifest()
    manifest["spec"]["sandbox"] |= {"image": QUICKSTART_IMAGE, "workspaces": {"mode": mode}}
    job = new_job(manifest).apply()
    job.wait("Succeeded", 300)
    assert_rewards(job)
    status = job.status
    assert (status["total"], status["sealed"], status["outcomes"]) == (24, 24, {"Completed": 24})
    assert status["meanReward"] == pytest.approx(sum(map(sum, REWARDS.values())) / 24)
    assert status["resultURI"].endswith(f"quickstart-{job.uid[:8]}")
