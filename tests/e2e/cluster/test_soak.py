"""Repeated failures of everything that can fail: the counts still add up, nothing leaks, and memory does not grow."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from agent_runtime.runner.supervisor import Exit
from tests.support.accidents import FREEZE, ONLY_HERE, OPERATORS, Accidents, at_even_distances, in_random_order
from tests.support.cluster import OPERATOR, OPERATOR_NAMESPACE, Cluster, Job, Object, eventually
from tests.support.memory_watch import MemoryWatch
from tests.support.operators import operator_pods, scale
from tests.support.runner_pods import is_live
from tests.support.scripted import careful, scripted_job, task

pytestmark = [pytest.mark.alone, pytest.mark.full]

GROUP = 4
LOOK, DEATH = "look", "sandbox deleted"
LOOKS = 12
"""Readings of the memory of each operator and runner in the steady phase."""
MOST_GROWTH = 0.05
"""Largest allowed growth of the memory in the steady phase."""


Log = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is run, and for how long."""

    rollouts: int
    sandboxes: int
    think: float
    """Seconds before each turn, so that the work lasts while accidents happen and memory is read. Up to half of the
    work is lost. The death of an engine costs each of its rollouts half a turn and the start of the next engine, that
    of a sandbox half of each of its rollouts, and that of a runner pod the back-off of the Job controller (10 s,
    doubling).
    """
    seconds: float
    """Seconds with accidents of all kinds, at even intervals."""
    accidents: Mapping[str, int]
    away_seconds: tuple[float, float]
    """Shortest and longest outage of the API server, the storage and the operators."""
    settling_seconds: float
    """Seconds between the accidents and the readings, because an engine that has just started still grows."""
    steady_seconds: float
    """Seconds of the steady phase that follows: operators and runners keep running, only sandboxes die, and memory is
    read.
    """
    steady_deaths: int

    @property
    def places(self) -> int:
        """Number of concurrent rollouts."""
        return self.sandboxes * GROUP

    def job(self) -> Object:
        """Return the job, with two runners."""
        return scripted_job(
            "soak",
            [task(f"task-{number}") for number in range(self.rollouts // GROUP)],
            {f"careful {number}": careful(self.think) for number in range(GROUP)},
            runners={"replicas": 2, "concurrency": self.places // 2},
            attempts={"limit": 100, "backoffSeconds": 0.2},
        )


SIZE = Size(
    rollouts=300,
    sandboxes=20,
    think=20,
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
    settling_seconds=60,
    steady_seconds=120,
    steady_deaths=6,
)


@pytest.fixture(autouse=True)
def operators(cluster: Cluster) -> Iterator[None]:
    """Run two operators, so that the leader can be killed, and one after the test."""
    cluster.kubectl("scale", OPERATOR, "-n", OPERATOR_NAMESPACE, f"--replicas={OPERATORS}")
    yield
    scale(cluster, 1)


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Log:
    """Prints a line at once, with the seconds since the first one. An accident is logged when it is over."""
    started: list[float] = []

    def write(words: str) -> None:
        started.append(time.monotonic())
        with capsys.disabled():
            print(f"{'' if started[1:] else chr(10)}soak {started[-1] - started[0]:6.1f} s: {words}", flush=True)

    return write


def test_repeated_failures_leak_nothing(
    cluster: Cluster, new_job: Callable[[Object], Job], request: pytest.FixtureRequest, log: Log
) -> None:
    size = SIZE
    outages = request.getfixturevalue("outages") if cluster.details else None
    counts = {kind: count for kind, count in size.accidents.items() if outages or kind not in ONLY_HERE}
    job = new_job(size.job()).apply()
    eventually(lambda: job.keys("attempts") or None, 120, job.describe)
    chance = random.Random(0)
    accidents = Accidents(cluster, job, outages, size.away_seconds, chance)

    log(f"{size.rollouts} rollouts, {size.places} at once; in {size.seconds:.0f} s: {counts}")
    for kind in at_their_times(at_even_distances(in_random_order(counts, chance), size.seconds, chance)):
        sealed = job.sealed()
        assert sealed < size.rollouts, "the job was over before the last accident; let its members think longer"
        log(f"{sealed:3} sealed; {kind}: {accidents.happen(kind)}")

    log(f"from now on operators and runners live; after {size.settling_seconds:.0f} s memory is watched")
    eventually(lambda: len(live(operator_pods(cluster))) == OPERATORS or None, 120, job.describe)
    eventually(lambda: live(job.pods("runner")) or None, 120, job.describe)
    # The replacement of a draining runner has not started yet; the draining one may have completed meanwhile.
    eventually(lambda: states(job) - {"Completed"} == {"Running"} or None, 120, job.describe)
    grown_up = {pod["metadata"]["uid"] for pod in (*live(operator_pods(cluster)), *live(job.pods("runner")))}
    time.sleep(size.settling_seconds)
    watches = {"operator": MemoryWatch(cluster), "runner": MemoryWatch(cluster)}
    sealed_before = job.sealed()
    looks = [(number * size.steady_seconds / (LOOKS - 1), LOOK) for number in range(LOOKS)]
    deaths = at_even_distances([DEATH] * size.steady_deaths, size.steady_seconds, chance)
    for kind in at_their_times(sorted(looks + deaths)):
        if (sealed := job.sealed()) == size.rollouts:
            break
        if kind == DEATH:
            log(f"{sealed:3} sealed; {kind}: {accidents.happen(kind)}")
        else:
            for name, pods in {"operator": operator_pods(cluster), "runner": job.pods("runner")}.items():
                watches[name].look([pod for pod in live(pods) if pod["metadata"]["uid"] in grown_up])
    sealed_meanwhile = job.sealed() - sealed_before
    log(f"{sealed_before + sealed_meanwhile:3} sealed, {sealed_meanwhile} of them while memory was watched")
    for name, watch in watches.items():
        for pod, samples in watch.seen.items():
            log(f"memory of the {name} {pod}: {samples}")

    job.wait("Succeeded", 120 + size.seconds)
    log("the job has succeeded")
    assert_counts_add_up(job, size.rollouts, log)
    accidents.clean_up()
    eventually(lambda: not (job.sandboxes() or job.pods("sandbox")) or None, 120, job.describe)
    assert not live(job.pods("runner"))
    assert sealed_meanwhile, "no rollout ended while memory was watched"
    for name, watch in watches.items():
        assert_flat(name, watch)
    log("PASSED: each rollout is there once, no pod is left, memory is flat")


def at_their_times(timeline: Iterable[tuple[float, str]]) -> Iterator[str]:
    """Yield each name when its seconds since the start are over; late ones at once."""
    started = time.monotonic()
    for due, kind in timeline:
        time.sleep(max(0.0, started + due - time.monotonic()))
        yield kind


def assert_counts_add_up(job: Job, total: int, log: Log) -> None:
    """Check that each rollout is recorded once and solved, that the status agrees, and that only accidents cost
    attempts.
    """
    results = job.results()
    attempts = Counter(len(result["failedAttempts"]) for result in results)
    lost = Counter(attempt["reason"] for result in results for attempt in result["failedAttempts"])
    log(f"{len(results)} results; failed attempts a rollout {dict(attempts)}, why {dict(lost)}")
    ends = Counter(exit_code(pod) for pod in job.pods("runner"))
    log(f"exit codes of the runner pods that are still there: {dict(ends)}")
    assert [result["index"] for result in results] == list(range(total))
    assert {(result["outcome"], result["reward"]) for result in results} == {("Completed", 1)}
    status = job.status
    assert (status["total"], status["sealed"]) == (total, total)
    assert status["outcomes"] == {"Completed": total}
    assert status["meanReward"] == 1
    # A restarted engine finds its killed sandboxes gone: the reason is Interrupted then.
    assert lost.keys() <= {"PodDeleted", "Evicted", "Interrupted"}
    assert ends[Exit.SUPERSEDED], "of a frozen runner and the one that took over, none was fenced off"


def assert_flat(name: str, watch: MemoryWatch) -> None:
    """Check that the processes of each pod that ran long enough are the same ones, and have not grown."""
    watched = {pod: samples for pod, samples in watch.seen.items() if len(samples.sizes) >= LOOKS / 2}
    assert watched, f"no {name} was there for long enough to see whether its memory grows; let members think longer"
    for pod, samples in watched.items():
        assert len(samples.processes) == 1, f"a process of {pod} died though nobody killed it"
        assert samples.growth < MOST_GROWTH, f"the memory of the {name} {pod} grows: {samples}"


def states(job: Job) -> set[str]:
    """Return the states that its runners report."""
    return {report["state"] for report in job.reports}


def live(pods: Sequence[Object]) -> list[Object]:
    """Return the pods that run and are not being deleted."""
    return [pod for pod in pods if is_live(pod)]


def exit_code(pod: Object) -> int | None:
    """Return the exit code of a runner (agent_runtime/runner/supervisor.py); None while it runs."""
    states = [status["state"] for status in pod["status"].get("containerStatuses", [])]
    return next((state["terminated"]["exitCode"] for state in states if "terminated" in state), None)
