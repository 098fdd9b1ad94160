"""Failures of sandboxes: each rollout gets the outcome of its own cause, and other rollouts are not affected."""

from collections import Counter
from collections.abc import Callable, Collection
from itertools import chain

import pytest

from tests.support.cluster import Cluster, Job, Object, eventually
from tests.support.outages import Outages
from tests.support.pod_processes import kill, memory_peak, running
from tests.support.scripted import careful, finish, scripted_job, task, turn

NewJob = Callable[[Object], Job]
MEBIBYTE = 2**20
NO_IMAGE = "127.0.0.1:1/nothing:here"
WAITING = "sleep 4242"
"""A tool call that a test can find among the processes of a pod."""


def by_task(job: Job) -> dict[str, list[Object]]:
    """Return the results by task, after a check that each rollout is recorded once."""
    results = job.results()
    assert [result["index"] for result in results] == list(range(len(results)))
    assert len(results) == job.status["total"]
    found: dict[str, list[Object]] = {}
    for result in results:
        found.setdefault(result["task"], []).append(result)
    return found


def assert_unharmed(results: list[Object]) -> None:
    """Check that all have their reward at the first attempt."""
    for result in results:
        assert (result["outcome"], result["reward"], reasons(result)) == ("Completed", 1, []), result


def reasons(result: Object) -> list[str]:
    """Return why its attempts failed, in order."""
    return [attempt["reason"] for attempt in result.get("failedAttempts", [])]


def wait_for_waiting(job: Job, count: int, *, calls: int = 1, besides: Collection[str] = ()) -> list[Object]:
    """Wait until `count` of its sandbox pods, other than `besides`, each run this many tool calls WAITING. Returns the
    pods.
    """

    def waiting() -> list[Object] | None:
        pods = [pod for pod in job.pods("sandbox") if pod["metadata"]["name"] not in besides]
        found = [pod for pod in pods if running(job.cluster, pod, WAITING) == calls]
        return found if len(found) == count else None

    return eventually(waiting, 120, job.describe)


def assert_nothing_left(job: Job) -> None:
    """Check that no Sandbox or pod remains after the job's work."""
    eventually(lambda: not (job.sandboxes() or job.pods("sandbox")) or None, 90, job.describe)


@pytest.mark.full
def test_unavailable_sandbox_costs_only_its_own_group(new_job: NewJob) -> None:
    manifest = scripted_job(
        "cannot-start",
        [
            task("fine"),
            task("no-image", sandbox={"image": NO_IMAGE}),
            task("too-large", sandbox={"resources": {"memory": "100Ti"}}),
            task("bad-setup", setup=["echo no compiler here >&2; exit 3"]),
            task("no-grader", verifier={"image": NO_IMAGE, "commands": ["true"]}),
        ],
        {"careful": careful(0.2), "careful too": careful(0.2)},
        attempts={"limit": 1},
        completion={"maxInfraFailureFraction": 1},
    )
    # Enough for a sandbox that can start, also on a busy machine.
    manifest["spec"]["sandbox"]["startSeconds"] = 60
    job = new_job(manifest).apply()

    def waiting(kind: str) -> set[tuple[str, bool]]:
        return {
            (condition["reason"], word in condition["message"])
            for sandbox in job.sandboxes()
            for condition in sandbox.get("status", {}).get("conditions", [])
            for word in ["127.0.0.1:1" if kind == "ImagePulled" else "Insufficient memory"]
            if condition["type"] == kind and condition["status"] == "False"
        }

    eventually(lambda: ("ImagePullBackOff", True) in waiting("ImagePulled") or None, 60, job.describe)
    eventually(lambda: ("Unschedulable", True) in waiting("Scheduled") or None, 60, job.describe)
    job.wait("Succeeded")
    found = by_task(job)
    assert_unharmed(found["fine"])
    for name, reason in {
        "no-image": "ImagePullBackOff",
        "too-large": "Unschedulable",
        "bad-setup": "SetupFailed",
    }.items():
        assert {(r["outcome"], r.get("reward"), r["reason"]) for r in found[name]} == {("InfraFailed", None, reason)}
        assert [reasons(result) for result in found[name]] == [[reason]] * 2
    assert "no compiler here" in found["bad-setup"][0]["message"]
    ungraded = {(r["outcome"], r.get("reward"), r["reason"]) for r in found["no-grader"]}
    assert ungraded == {("VerifierFailed", None, "ImagePullBackOff")}
    told = {"SEALED": "10", "TOTAL": "10", "COMPLETED": "2", "LOST": "6", "UNGRADED": "2", "CANCELLED": ""}
    assert told.items() <= job.columns("-o", "wide").items()
    assert_nothing_left(job)


def test_tool_call_over_its_memory_ends_its_rollout_before_the_pods_limit(new_job: NewJob) -> None:
    eat = "for i in 1 2 3 4 5; do python3 -c 'import time; x = b\"x\" * (60 << 20); time.sleep(60)' & done; wait"
    manifest = scripted_job(
        "hungry", [task("eats")], {"careful": careful(1), "eats": [turn(eat, think=2), finish()], "also": careful(1)}
    )
    manifest["spec"]["sandbox"]["resources"] = {"memory": "128Mi"}
    job = new_job(manifest).apply()
    (pod,) = eventually(lambda: job.pods("sandbox") or None, 120, job.describe)
    peaks = []

    def all_sealed() -> bool | None:
        if found := memory_peak(job.cluster, pod):
            peaks.append(found)
        return job.sealed() == 3 or None

    eventually(all_sealed, 120, job.describe)
    peak, limit = peaks[-1]
    # At the container's limit, cgroup v2 would kill all its processes, including those of other members.
    assert 128 * MEBIBYTE < peak < limit
    job.wait("Succeeded")
    first, hungry, third = by_task(job)["eats"]
    assert_unharmed([first, third])
    assert (hungry["outcome"], hungry["stopReason"], reasons(hungry)) == ("Completed", "ResourceLimit", [])
    assert "Memory" in hungry["message"]
    assert {result["sandbox"]["sandbox"] for result in (first, hungry, third)} == {pod["metadata"]["name"]}


def test_rollout_whose_tool_call_kills_its_container_twice_counts_against_the_policy(
    new_job: NewJob, outages: Outages
) -> None:
    """cgroup v2 kills the whole group if a process allocates memory faster than the executor measures it."""
    manifest = scripted_job(
        "group-kill", [task("kills")], {"kills": [turn(f"{WAITING}; true"), finish()], "careful": careful(1)}
    )
    manifest["spec"]["sandbox"]["workspaces"] = {"mode": "Plain"}
    job = new_job(manifest).apply()
    killed: list[str] = []
    for _ in range(2):
        (pod,) = wait_for_waiting(job, 1, besides=killed)
        outages.kill(pod)
        killed.append(pod["metadata"]["name"])
    job.wait("Succeeded")
    killer, neighbour = by_task(job)["kills"]
    assert_unharmed([neighbour])
    assert (killer["outcome"], killer["stopReason"], killer["reward"]) == ("Completed", "ResourceLimit", 0)
    assert reasons(killer) == ["Crashed"], "the second loss is the verdict"
    assert_nothing_left(job)


@pytest.mark.parametrize("attack", ["kill -9 -1", pytest.param("kill -STOP -1; sleep 60", marks=pytest.mark.full)])
def test_policy_that_kills_the_workspaces_server_gets_a_verdict(new_job: NewJob, attack: str) -> None:
    members = {
        "attacks": [turn("echo started > steps"), turn(attack), finish()],
        # The executor is PID 1 of its namespace, which gets no signals from inside.
        "tries": [*careful(0)[:3], turn("kill 1; kill -INT 1; kill -9 1; sleep 1; echo 3 >> steps"), *careful(0)[4:]],
    }
    manifest = scripted_job("attack", [task("attacks")], members)
    manifest["spec"]["sandbox"]["workspaces"] = {"mode": "Plain"}
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    attacker, other = by_task(job)["attacks"]
    assert (attacker["outcome"], attacker["stopReason"], attacker["reward"]) == ("Completed", "ResourceLimit", 0)
    assert reasons(attacker) == []
    assert_unharmed([other])


def test_pods_deleted_or_evicted_mid_turn_cost_only_an_attempt(cluster: Cluster, new_job: NewJob) -> None:
    tasks = [task("one"), task("two"), task("three")]
    waits = [*careful(0)[:3], turn(f"{WAITING}; echo 3 >> steps"), *careful(0)[4:]]
    job = new_job(scripted_job("lost-pods", tasks, {"waits": waits, "waits too": waits})).apply()
    deleted, evicted, _ = wait_for_waiting(job, 3, calls=2)
    cluster.kubectl("delete", "pod", deleted["metadata"]["name"], "-n", job.namespace, "--wait=false")
    assert cluster.evict(evicted["metadata"]["name"], job.namespace)
    lost = [pod["metadata"]["name"] for pod in (deleted, evicted)]
    for pod in wait_for_waiting(job, 3, calls=2, besides=lost):
        assert kill(cluster, pod, WAITING) == 2  # its shell goes on with the turn
    job.wait("Succeeded")
    results = list(chain.from_iterable(by_task(job).values()))
    assert {(result["outcome"], result["reward"]) for result in results} == {("Completed", 1)}
    assert Counter(tuple(reasons(result)) for result in results) == {("PodDeleted",): 2, ("Evicted",): 2, (): 2}
    assert_nothing_left(job)
