"""The job that a laptop runs, applied to a cluster: the same results, member by member, in both modes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from agent_runtime.recording.store import Store
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object, assert_rewards, quickstart_manifest
from tests.support.fingerprint import fingerprint
from tests.support.full import MODES_ONCE
from tests.support.quickstart import REWARDS

pytestmark = pytest.mark.long

TAMPERS = 12
"""Member that overwrites `python3`. The exit code of its `cp` depends on the file system."""


def prints(store: Store) -> dict[int, Any]:
    """Return the fingerprint of the job's run."""
    found = asyncio.run(fingerprint(store, "quickstart"))
    del found[TAMPERS]["records"]
    return found


@pytest.fixture(scope="module")
def on_laptop(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return the fingerprint of a run on this machine."""
    folder = tmp_path_factory.mktemp("laptop")
    # Its keys sorted, as an API server gives it back: they are what the scripted model says.
    (folder / "job.yaml").write_text(yaml.safe_dump(quickstart_manifest()))
    run = cluster.rolloutctl("run", str(folder / "job.yaml"), "--output", str(folder / "out"))
    assert run.returncode == 0, run.stdout + run.stderr
    return prints(Store.open(str(folder / "out"), {}))


@pytest.mark.parametrize("mode", MODES_ONCE)
def test_job_on_a_cluster_matches_the_laptop_turn_by_turn(
    new_job: Callable[[Object], Job], on_laptop: dict[int, Any], mode: str
) -> None:
    manifest = quickstart_manifest()
    manifest["spec"]["sandbox"] |= {"image": QUICKSTART_IMAGE, "workspaces": {"mode": mode}}
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    assert_rewards(job)
    status = job.status
    assert (status["total"], status["sealed"], status["outcomes"]) == (24, 24, {"Completed": 24})
    assert status["meanReward"] == pytest.approx(sum(map(sum, REWARDS.values())) / 24)
    assert status["resultURI"].endswith(f"quickstart-{job.uid[:8]}")

    output = Store.open(manifest["spec"]["output"]["uri"], job.cluster.environ, patience_seconds=30)
    assert prints(output) == on_laptop
