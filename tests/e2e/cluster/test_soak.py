"""Everything that can fail does, again and again: the counts still add up, nothing leaks and nothing grows."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests.support.accidents import FREEZE, ONLY_HERE, OPERATORS, Accidents, at_even_distances, in_random_order
from tests.support.cluster import OPERATOR_NAMESPACE, Cluster, Job, Object, eventually
from tests.support.memory_watch import MemoryWatch
from tests.support.operators import DEPLOYMENT, operator_pods, scale
from tests.support.runner_pods import is_live
from tests.support.scripted import STEPS, careful, scripted_job, task

pytestmark = pytest.mark.alone

GROUP = 4
LOOKS = 12
"""At the memory of each operator and runner, in the steady part."""


@dataclass(frozen=True)
class Size:
    """How much is run for how long."""

    rollouts: int
    sandboxes: int
    think: float
    """Seconds before each turn: the work has to last for `seconds`, one rollout more, and `steady_seconds`. Half of what is
    done meanwhile is lost: an engine's death costs each of its rollouts half a turn and the start of the next engine, a
    sandbox's death half of each of its rollouts, a runner pod's the back-off of the Job controller (10 s, doubling)."""
    seconds: float
    """Of accidents of all kinds, at even distances."""
    accidents: Mapping[str, int]
    away_seconds: tuple[float, float]
    """The shortest and the longest time that the API server, the storage and the operators are away."""
    steady_seconds: float
    """After them: operator and runners live, only sandboxes still die, and memory is watched."""
    steady_deaths: int


FULL = Size(
    rollouts=300,
    sandboxes=20,
    think=18,
    seconds=600,
    accidents={
        "engine killed": 20,
        "runner deleted": 2,
        "runner evicted": 1,
        FREEZE: 2,
        "sandbox deleted": 14,
        "sandbox evicted": 8,
        "operator deleted": 6,
        "leader killed": 4,
        "no operator": 3,
        "API server away": 4,
        "storage away": 4,
    },
    away_seconds=(5, 20),
    steady_seconds=120,
    steady_deaths=6,
)
SHORT = Size(
    rollouts=60,
    sandboxes=5,
    think=2,
    seconds=60,
    accidents={
        "engine killed": 2,
        "runner deleted": 1,
        FREEZE: 1,
        "sandbox deleted": 2,
        "sandbox evicted": 1,
        "operator deleted": 1,
        "leader killed": 1,
        "no operator": 1,
        "API server away": 1,
        "storage away": 1,
    },
    away_seconds=(2, 4),
    steady_seconds=20,
    steady_deaths=1,
)


@pytest.fixture(autouse=True)
def operators(cluster: Cluster) -> Iterator[None]:
    """Two of them, so that one leads and can be killed; one after the test."""
    cluster.kubectl("scale", DEPLOYMENT, "-n", OPERATOR_NAMESPACE, f"--replicas={OPERATORS}")
    yield
    scale(cluster, 1)


def test_counts_add_up_and_nothing_leaks_or_grows_while_everything_fails_again_and_again(
    cluster: Cluster,
    new_job: Callable[[Object], Job],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = FULL if os.environ.get("ROLLOUT_FULL") else SHORT
    places = size.sandboxes * GROUP
    job = new_job(
        scripted_job(
            "soak",
            [task(f"task-{number}") for number in range(size.rollouts // GROUP)],
            {f"careful {number}": careful(size.think) for number in range(GROUP)},
            runners={"replicas": 2, "concurrency": places // 2},
            attempts={"limit": 100, "backoffSeconds": 0.2},
        )
    ).apply()
    eventually(lambda: job.keys("attempts") or None, 120, job.describe)
    started = time.monotonic()

    def log(words: str, when: float | None = None) -> None:
        with capsys.disabled():
            print(f"soak {(when or time.monotonic()) - started:6.1f} s: {words}", flush=True)

    def has_work_left() -> int:
        sealed = job.sealed()
        assert sealed < size.rollouts, "the job was over before the last accident; let its members think longer"
        return sealed

    def happen(kind: str) -> None:
        sealed, when = has_work_left(), time.monotonic()
        log(f"{sealed:3} sealed; {kind}: {accidents.happen(kind)}", when)

    chance = random.Random(0)
    outages = request.getfixturevalue("outages") if cluster.details else None
    accidents = Accidents(cluster, job, outages, size.away_seconds, chance)
    counts = {kind: count for kind, count in size.accidents.items() if outages or kind not in ONLY_HERE}
    log(f"{size.rollouts} rollouts, {places} at once; in {size.seconds:.0f} s: {counts}")
    for due, kind in at_even_distances(in_random_order(counts, chance), size.seconds, chance):
        time.sleep(max(0.0, started + due - time.monotonic()))
        happen(kind)

    # By then, each place of an engine has had a rollout from its begin to its end: the engine has all that it needs.
    settling = size.think * (STEPS + 1)
    log(f"{has_work_left():3} sealed; from now on only sandboxes die, and after {settling:.0f} s memory is watched")
    steady = time.monotonic() + settling
    eventually(lambda: len(live(operator_pods(cluster))) == OPERATORS or None, 120, job.describe)
    time.sleep(max(0.0, steady - time.monotonic()))
    steady, sealed = time.monotonic(), has_work_left()
    watch = MemoryWatch(cluster)
    looks = [(number * size.steady_seconds / (LOOKS - 1), "look") for number in range(LOOKS)]
    deaths = at_even_distances(["sandbox deleted"] * size.steady_deaths, size.steady_seconds, chance)
    for due, kind in sorted(looks + deaths):
        time.sleep(max(0.0, steady + due - time.monotonic()))
        if kind == "look":
            watch.look(time.monotonic(), [*live(operator_pods(cluster)), *live(job.pods("runner"))])
        else:
            happen(kind)
    steadily_sealed = has_work_left() - sealed
    for pod, samples in watch.seen.items():
        log(f"memory of {pod}: {samples}")
    log(f"{sealed + steadily_sealed:3} sealed, {steadily_sealed} of them meanwhile; nothing dies from now on")

    job.wait("Succeeded", 60 + size.seconds)
    log("the job has succeeded")
    results = job.results()
    attempts = Counter(len(result["failedAttempts"]) for result in results)
    lost = Counter(attempt["reason"] for result in results for attempt in result["failedAttempts"])
    log(f"{len(results)} results; failed attempts a rollout {dict(attempts)}, why {dict(lost)}")
    ends = Counter(exit_code(pod) for pod in job.pods("runner"))
    log(f"exit codes of the runner pods that can still be asked: {dict(ends)}")

    assert [result["index"] for result in results] == list(range(size.rollouts))
    assert {(result["outcome"], result["reward"]) for result in results} == {("Completed", 1)}
    status = job.status
    assert (status["total"], status["sealed"]) == (size.rollouts, size.rollouts)
    assert status["outcomes"] == {"Completed": size.rollouts}
    assert status["meanReward"] == 1
    # Nothing but the accidents themselves costs an attempt: an engine that starts finds gone what was killed meanwhile.
    assert lost.keys() <= {"PodDeleted", "Evicted", "Interrupted"}
    accidents.clean_up()
    eventually(lambda: not (job.sandboxes() or job.pods("sandbox")) or None, 120, job.describe)
    assert not live(job.pods("runner"))
    assert steadily_sealed
    for pod, samples in watch.seen.items():
        assert len(samples.processes) == 1, f"a process of {pod} died though nobody killed it"
        assert samples.growth < 0.05, f"the memory of {pod} grows: {samples}"
    log("PASSED: each rollout is there once, no pod is left, memory is flat")


def live(pods: Sequence[Object]) -> list[Object]:
    """Those that run and are not going."""
    return [pod for pod in pods if is_live(pod)]


def exit_code(pod: Object) -> int | None:
    """How a runner ended (agent_runtime/runner/exits.py); None while it runs."""
    states = [status["state"] for status in pod["status"].get("containerStatuses", [])]
    return next((state["terminated"]["exitCode"] for state in states if "terminated" in state), None)
