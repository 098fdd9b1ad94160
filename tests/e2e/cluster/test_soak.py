"""Everything that can die does, again and again: the counts still add up, nothing leaks and nothing grows."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tests.support.cluster import OPERATOR_NAMESPACE, Cluster, Job, Object, eventually
from tests.support.runner_pods import kill_engine, resident_mebibytes
from tests.support.scripted import STEPS, careful, scripted_job, task

pytestmark = pytest.mark.alone

OPERATOR = "app.kubernetes.io/name=agent-rollouts"
GROUP = 4


@dataclass(frozen=True)
class Size:
    """How much is run for how long. `kills`: what dies, in random order, at even distances."""

    rollouts: int
    sandboxes: int
    seconds: float
    kills: Sequence[str]


# A runner pod's death costs the Job controller's back-off, 10 s doubling, so there are few of them.
FULL = Size(300, 20, 600, ["engine"] * 25 + ["sandbox"] * 25 + ["operator"] * 10 + ["runner"] * 4)
SHORT = Size(60, 5, 60, ["engine"] * 4 + ["sandbox"] * 4 + ["operator"] * 2 + ["runner"])


def test_counts_add_up_and_nothing_leaks_or_grows_while_everything_is_killed_again_and_again(
    cluster: Cluster, new_job: Callable[[Object], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    size = FULL if os.environ.get("ROLLOUT_FULL") else SHORT
    places = size.sandboxes * GROUP
    # So that the rollouts, one wave after the other, would take about as long as the kills.
    think = size.seconds * places / size.rollouts / (STEPS + 1)
    job = new_job(
        scripted_job(
            "soak",
            [task(f"task-{number}") for number in range(size.rollouts // GROUP)],
            {f"careful {number}": careful(think) for number in range(GROUP)},
            runners={"replicas": 2, "concurrency": places // 2},
            attempts={"limit": 100, "backoffSeconds": 0.2},
        )
    ).apply()
    eventually(lambda: job.keys("attempts") or None, 120, job.describe)

    chance = random.Random(0)
    kills = chance.sample(size.kills, len(size.kills))
    memory: dict[str, list[float]] = {"operator": [], "runner": []}
    started = time.monotonic()
    for number, victim in enumerate(kills):
        due = started + (number + chance.random()) * size.seconds / len(kills)
        time.sleep(max(0.0, due - time.monotonic()))
        for name, pods in {"operator": operators(cluster), "runner": live(job.pods("runner"))}.items():
            memory[name] += [found for pod in pods if (found := resident_mebibytes(cluster, pod))]
        kill(cluster, job, victim, chance)

    job.wait("Succeeded", 300 + size.seconds)
    results = job.results()
    assert [result["index"] for result in results] == list(range(size.rollouts))
    assert {(result["outcome"], result["reward"]) for result in results} == {("Completed", 1)}
    status = job.status
    assert (status["total"], status["sealed"]) == (size.rollouts, size.rollouts)
    assert status["outcomes"] == {"Completed": size.rollouts}
    assert status["meanReward"] == 1
    eventually(lambda: not (job.sandboxes() or job.pods("sandbox")) or None, 120, job.describe)

    attempts = Counter(len(result["failedAttempts"]) for result in results)
    lost = Counter(attempt["reason"] for result in results for attempt in result["failedAttempts"])
    with capsys.disabled():
        print(f"\nsoak: {size.rollouts} rollouts, {Counter(kills)}; failed attempts a rollout {attempts}, why {lost}")
        for name, found in memory.items():
            print(f"soak: memory of the {name}, MiB: {', '.join(f'{mebibytes:.0f}' for mebibytes in found)}")
    # Nothing but the kills themselves costs an attempt: an engine that starts finds gone what was killed meanwhile.
    assert lost.keys() <= {"PodDeleted", "Interrupted"}
    for name, found in memory.items():
        half = len(found) // 2
        assert max(found[half:]) <= 1.25 * max(found[:half]), f"the {name}'s memory grows: {found}"


def kill(cluster: Cluster, job: Job, victim: str, chance: random.Random) -> None:
    """One death: of a runner's engine (SIGKILL), or of a pod that goes at once."""
    if victim == "engine":
        if pods := live(job.pods("runner")):
            kill_engine(cluster, chance.choice(pods))
        return
    pods = {
        "runner": lambda: live(job.pods("runner")),
        "sandbox": lambda: live(job.pods("sandbox")),
        "operator": lambda: operators(cluster),
    }[victim]()
    if pods:
        pod = chance.choice(pods)["metadata"]
        cluster.kubectl(
            "delete", "pod", pod["name"], "-n", pod["namespace"], "--grace-period=0", "--force", "--wait=false"
        )


def operators(cluster: Cluster) -> list[Object]:
    """Pods of the operator."""
    return live(cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR))


def live(pods: Sequence[Object]) -> list[Object]:
    """Those that run and are not going."""
    return [
        pod for pod in pods if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
