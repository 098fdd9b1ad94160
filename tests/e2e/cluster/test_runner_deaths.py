"""When a runner is killed, the next one continues in the same sandboxes. A runner that was only believed dead can do
nothing any more.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime.runner.drain import DRAIN_SECONDS
from agent_runtime.runner.supervisor import Exit
from tests.support.cluster import Cluster, Job, Object, eventually
from tests.support.full import FULL
from tests.support.pod_processes import running
from tests.support.resumed import segments_among
from tests.support.runner_pods import ending, kill_engine, live_runner, second_runner
from tests.support.scripted import STEPS, careful, scripted_job, task, turn

pytestmark = pytest.mark.long

NewJob = Callable[[Object], Job]


def assert_nothing_lost_or_doubled(job: Job, total: int) -> None:
    """Check that every rollout is recorded once, each of its steps was taken once, and no attempt was used up."""
    results = job.results()
    assert [result["index"] for result in results] == list(range(total))
    for result in results:
        assert (result["outcome"], result["reward"]) == ("Completed", 1), result
        assert (result["attempt"], result["failedAttempts"], result["turns"]) == (0, [], STEPS + 1), result
    status = job.status
    assert (status["total"], status["sealed"], status["outcomes"]) == (total, total, {"Completed": total})
    assert status["meanReward"] == 1


def wait_for_progress(job: Job) -> None:
    """Wait until another turn is recorded."""
    before = segments_among(job.keys(""))
    eventually(lambda: segments_among(job.keys("")) > before or None, 90, job.describe)


def test_runners_killed_in_the_middle_of_turns_lose_nothing_and_keep_their_sandboxes(
    cluster: Cluster, new_job: NewJob
) -> None:
    members = {f"careful {number}": careful(1) for number in range(4)}
    tasks = [task(f"task-{number}") for number in range(4 if FULL else 2)]
    deaths = (
        ["engine"] * 4 + ["pod"] + ["engine"] * 4 + ["pod"] + ["engine"] * 2 if FULL else ["engine", "pod", "engine"]
    )
    job = new_job(scripted_job("killed-runners", tasks, members, runners={"concurrency": 4})).apply()
    chance = random.Random(0)
    sandboxes: dict[str, Object] = {}
    for death in deaths:
        wait_for_progress(job)
        sandboxes |= {sandbox["metadata"]["name"]: sandbox for sandbox in job.sandboxes()}
        assert job.sealed() < 4 * len(tasks), "the job was over before the last kill; give its members more to do"
        time.sleep(chance.random())  # somewhere in a turn
        pod = live_runner(job)
        if death == "engine":
            kill_engine(cluster, pod)
        else:
            cluster.kubectl(
                "delete", "pod", pod["metadata"]["name"], "-n", job.namespace, "--grace-period=0", "--force"
            )
    job.wait("Succeeded")
    assert_nothing_lost_or_doubled(job, 4 * len(tasks))
    assert {result["sandbox"]["sandbox"] for result in job.results()} <= sandboxes.keys()
    assert len(sandboxes) <= len(tasks)


@pytest.mark.full
def test_evicted_runner_waits_25_s_for_a_turn_and_the_next_one_continues(cluster: Cluster, new_job: NewJob) -> None:
    long_call = "sleep 50"
    long = [*careful(0)[:3], turn(f"{long_call}; echo 3 >> steps"), *careful(0)[4:]]
    job = new_job(scripted_job("evicted-runner", [task("one")], {"long": long, "long too": long})).apply()
    (sandbox,) = eventually(lambda: job.pods("sandbox") or None, 120, job.describe)
    eventually(lambda: running(cluster, sandbox, long_call) == 2 or None, 120, job.describe)
    evicted = live_runner(job)
    asked = time.monotonic()
    with ending(cluster, evicted) as exit_codes:
        assert cluster.evict(evicted["metadata"]["name"], job.namespace)
    assert exit_codes == [Exit.DRAINED], "killed by its node, for it had not ended within its grace of 30 s"
    assert time.monotonic() - asked > DRAIN_SECONDS - 1, "it did not wait for the turn"
    assert running(cluster, sandbox, long_call) == 2, "a call goes on without its runner"
    job.wait("Succeeded")
    assert_nothing_lost_or_doubled(job, 2)
    assert {result["sandbox"]["sandbox"] for result in job.results()} == {sandbox["metadata"]["name"]}


@pytest.mark.full
def test_frozen_runner_can_neither_act_nor_write_after_a_takeover(cluster: Cluster, new_job: NewJob) -> None:
    members = {f"careful {number}": careful(2) for number in range(4)}
    job = new_job(scripted_job("frozen-runner", [task("one"), task("two")], members)).apply()
    wait_for_progress(job)
    wait_for_progress(job)
    frozen = live_runner(job)
    kill_engine(cluster, frozen, "STOP")
    second = second_runner(frozen, "frozen-runner-second")
    cluster.apply(second)
    name, namespace = second["metadata"]["name"], job.namespace

    def taken_over() -> bool | None:
        epochs = {tuple(key.split("/")[1:]) for key in job.keys("attempts") if key.endswith("epoch-2.json")}
        return len(epochs) == 8 or None

    eventually(taken_over, 120, job.describe)
    wait_for_progress(job)
    kill_engine(cluster, frozen, "CONT")

    def ended() -> Any:
        pod = cluster.get("pod", frozen["metadata"]["name"], namespace)
        assert pod is not None
        return pod["status"]["containerStatuses"][0]["state"].get("terminated")

    end = eventually(ended, 120, job.describe)
    assert (end["exitCode"], "another" in end["message"]) == (7, True), end
    job.wait("Succeeded")
    assert_nothing_lost_or_doubled(job, 8)
    cluster.kubectl("delete", "pod", name, "-n", namespace, "--wait=false")
