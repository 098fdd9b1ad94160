"""The job that a laptop runs, applied to a cluster: the same rewards, member by member, in both modes."""

from collections.abc import Callable

import pytest

from tests.support.cluster import QUICKSTART_IMAGE, Job, Object, quickstart_manifest
from tests.support.quickstart import REWARDS


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
def test_a_job_gives_the_rewards_on_a_cluster_that_it_gives_on_a_laptop(
    new_job: Callable[[Object], Job], mode: str
) -> None:
    manifest = quickstart_manifest()
    manifest["spec"]["sandbox"] |= {"image": QUICKSTART_IMAGE, "workspaces": {"mode": mode}}
    job = new_job(manifest).apply()
    job.wait("Succeeded", 300)
    results = job.results()
    assert [result["index"] for result in results] == list(range(24))
    rewards: dict[str, list[float]] = {}
    for result in results:
        assert result["outcome"] == "Completed", result
        rewards.setdefault(result["task"], []).append(result["reward"])
    assert rewards == REWARDS
    status = job.status
    assert (status["total"], status["sealed"], status["outcomes"]) == (24, 24, {"Completed": 24})
    assert status["meanReward"] == pytest.approx(sum(map(sum, REWARDS.values())) / 24)
    assert status["resultURI"].endswith(f"quickstart-{job.uid[:8]}")
