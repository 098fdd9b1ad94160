"""Rollouts in pods continue from a turn of rollouts in other pods, also when their runner is killed."""

import json
from collections.abc import Callable

import pytest

from tests.support.cluster import Cluster, Job, Object, eventually
from tests.support.full import MODES_ONCE
from tests.support.runner_pods import kill_engine, live_runner
from tests.support.scripted import finish, scripted_job, turn

NewJob = Callable[[Object], Job]
TURNS = 4
COUNT = 4


def counting(mode: str) -> Object:
    """Return a job whose rollout adds a line in each turn. Its setup writes the time, so a second setup would be
    noticed.
    """
    steps = [turn(f"echo {step} >> log.txt; cat log.txt") for step in range(TURNS)]
    task = {"name": "count", "prompt": "Count.", "setup": ["date +%s.%N > when.txt"]}
    job = scripted_job(f"counting-{mode.lower()}", [task], {"only": [*steps, finish()]})
    job["spec"]["sandbox"] |= {"workspaces": {"mode": mode}, "snapshotEveryTurns": 2}
    return job


def branching(source: Job, mode: str, think: float) -> Object:
    """Return a job with branches of turn 2, whose snapshot is one turn older. Each branch takes three more turns."""
    uri = f"{source.manifest['spec']['output']['uri']}/{source.name}-{source.uid[:8]}"
    steps = [turn(f"echo b{step} >> log.txt; cat log.txt when.txt", think=think) for step in range(3)]
    copied: list[Object] = [{"content": "never asked for"}] * 3
    job = scripted_job(f"branching-{mode.lower()}", [{"name": "count@0.2"}], {"each": [*copied, *steps, finish()]})
    job["spec"]["tasks"] = {"branch": [{"job": uri, "index": 0, "turn": 2, "count": COUNT}]}
    job["spec"]["agent"]["maxTurns"] = 20
    del job["spec"]["groupSize"]
    job["spec"]["sandbox"] |= {"workspaces": {"mode": mode}}
    return job


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES_ONCE)
def test_branches_start_from_the_sources_state_and_continue_after_a_runner_restart(
    cluster: Cluster, new_job: NewJob, mode: str
) -> None:
    source = new_job(counting(mode)).apply()
    source.wait("Succeeded")
    job = new_job(branching(source, mode, think=2)).apply()
    eventually(lambda: len(job.keys("attempts")) > COUNT or None, 120, job.describe)
    kill_engine(cluster, live_runner(job))
    job.wait("Succeeded")
    results = job.results()
    assert [result["index"] for result in results] == list(range(COUNT))
    for result in results:
        assert (result["outcome"], result["attempt"], result["failedAttempts"]) == ("Completed", 0, []), result
        assert (result["turns"], result["sandbox"]["mode"]) == (4, mode)
        origin = result["branchedFrom"]
        assert (origin["turn"], origin["snapshotTurn"], origin["differences"]) == (2, 1, [])
    shown = {last_output(job, index) for index in range(COUNT)}
    assert len(shown) == 1, "the setup's own output is restored, not made again"
    assert shown.pop().startswith("0\n1\n2\nb0\nb1\nb2\n")


def last_output(job: Job, index: int) -> str:
    """Return the output of a rollout's last command."""
    key = next(result["trajectory"] for result in job.results() if result["index"] == index)
    steps = json.loads(job.read(key))["steps"]
    shown = [result["content"] for step in steps for result in step.get("observation", {}).get("results", [])]
    return str(shown[-2])
