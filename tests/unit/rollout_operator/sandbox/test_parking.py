"""Parking: what is planned in each state; and random lives in which nothing may be lost because of it."""

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_api.cluster import PARKED_ANNOTATION, PARKING_ANNOTATION, POD_ANNOTATION, STORED_IN_PART
from rollout_api.on_cluster.sandbox_pod import Identity, executor_config
from rollout_api.sandbox import SandboxSpec, SandboxStatus, WorkspaceMode
from rollout_operator.actions import AskExecutors, Create, Delete, EnsureKey, Patch, Plan, Remember, Still
from rollout_operator.cache import Cache
from rollout_operator.conditions import timestamp
from rollout_operator.executor_contact import ExecutorReport
from rollout_operator.prune import prune
from rollout_operator.sandbox import observe, plan
from rollout_operator.sandbox.making import missing_policy
from rollout_operator.world import Memory, World, operator_peer
from tests.support.full import examples
from tests.unit.rollout_operator.sandbox.objects import CONFIG, KEY, NOW, RUNNING, Json, ended, node, policy, sandbox

PARKING: Json = {"uri": "s3://bucket/prefix", "secretRef": "storage"}
CONDITION_OF = {"Succeeded": "Complete", "Failed": "Failed"}
ROUNDS = 12
"""More rounds than any life needs to settle."""

IN_PART = f"{STORED_IN_PART}1 of 2 workspaces"


class Cluster:
    """One Sandbox with its pod and its Jobs. What is stored, and which pod has the files, is known here only."""

    def __init__(self, mode: str, when_idle: bool) -> None:
        self.now, self.memory, self.keys = NOW, Memory(), {"uid-s": KEY}
        self.reports: dict[str, ExecutorReport] = {}
        parking = {**PARKING, "whenIdle": when_idle}
        self.sandbox = sandbox(parking=parking, workspaces={"mode": mode}, whenFinished="Retain")
        self.pod: Json | None = None
        self.jobs: dict[str, Json] = {}
        self.nodes = {name: node(name) for name in ("n1", "n2")}
        self.stored = False
        """Whether the store has the files as they are."""
        self.part_stored = False
        """Whether the store has some of them, and that is the best there is if the pod ends."""
        self.stored_as = ""
        """Number of the last parking that was stored."""
        self.files_in: str | None = None
        """Uid of the pod that has the files."""
        self.accident = False
        """Whether the pod was lost while it was not parked, which may end any Sandbox."""
        self.asked: Still | None = None
        """What the executor was asked, and has not answered."""
        self.made = 0
        self.events: list[str] = []

    # What the operator sees and does.

    def look(self) -> Plan:
        cache = Cache()
        objects = [self.sandbox, policy(), *([self.pod] if self.pod else []), *self.nodes.values(), *self.jobs.values()]
        objects += [job["pod"] for job in self.jobs.values() if "pod" in job]
        for each in objects:
            kind = each.get("kind", "Node")
            cache.put(kind, prune(kind, copy.deepcopy(each)))
        world = World(cache, CONFIG, self.now, self.memory, self.keys, executors=self.reports)
        return plan(observe(world, self.sandbox))

    def act(self, rounds: int = 1) -> Plan:
        planned = Plan()
        for _ in range(rounds):
            planned = self.look()
            for action in planned.actions:
                self.carry_out(action)
            if planned.status is not None:
                self.sandbox["status"] = SandboxStatus.model_validate(planned.status).wire()
            self.events += [event.reason for event in planned.events]
        return planned

    def carry_out(self, action: Any) -> None:
        match action:
            case Remember():
                self.memory.learn(action, self.now.timestamp())
            case EnsureKey():
                self.keys["uid-s"] = KEY
            case AskExecutors((request,)):
                self.asked = request.still
            case Create(body) if body["kind"] in ("Pod", "Job"):
                self.create(copy.deepcopy(dict(body)))
            case Patch(_, change):
                assert change["metadata"] == {"uid": "uid-s", "resourceVersion": "1"}
                self.set_running(change["spec"]["running"])
            case Delete(ref, uid, grace):
                self.delete(ref.kind, ref.name, uid, at_once=grace == 0)

    def create(self, body: Json) -> None:
        name = body["metadata"]["name"]
        if (self.pod if body["kind"] == "Pod" else self.jobs.get(name)) is not None:
            return
        self.made += 1
        body["metadata"] |= {"uid": f"uid-{self.made}", "creationTimestamp": timestamp(self.now)}
        body["status"] = {"phase": "Pending"}
        if body["kind"] == "Pod":
            assert not self.files_in or self.is_parked(), "a pod is created while another one has the files"
            self.pod = body
            if not self.is_parked():
                self.files_in = body["metadata"]["uid"]
        else:
            is_restore = body["spec"]["template"]["spec"]["containers"][0]["command"][3] == "restore"
            assert not is_restore or not self.files_in, "files are restored over the files that were stored"
            self.jobs[name] = body

    def delete(self, kind: str, name: str, uid: str, *, at_once: bool) -> None:
        if kind == "Job" and name in self.jobs and self.jobs[name]["metadata"]["uid"] == uid:
            del self.jobs[name]
        elif kind == "Pod" and self.pod is not None and self.pod["metadata"]["uid"] == uid:
            has_ended = any(each["type"] == "Finished" for each in self.conditions())
            assert self.is_parked() or has_ended, "a pod was deleted before its files were stored"
            assert self.stored or self.part_stored or has_ended, "Parked is True, and nothing is stored"
            if at_once:
                self.lose_pod()
            else:
                self.pod["metadata"]["deletionTimestamp"] = timestamp(self.now)
        elif kind == "Sandbox":
            raise AssertionError("it is deleted")

    # What happens in the cluster.

    def lose_pod(self) -> None:
        assert self.pod is not None
        if self.files_in == self.pod["metadata"]["uid"]:
            self.files_in = None
        self.pod = None

    def starts(self, name: str = "n1") -> None:
        assert self.pod is not None
        self.pod["spec"]["nodeName"] = name
        container = {"name": "sandbox", "state": RUNNING}
        address = f"10.0.0.{self.made}"
        self.pod["status"] = {"phase": "Running", "podIP": address, "containerStatuses": [container]}

    def ends(self, name: str, how: str, words: str = "2 of 2 workspaces", *, is_read: bool = True) -> None:
        """End a Job. It succeeds only if it can: a store needs the pod with the files, a restore what is stored. Its words
        cannot be read if its pod was deleted at once.
        """
        job, uid = self.jobs[name], self.pod["metadata"]["uid"] if self.pod else None
        is_for_pod = self.is_running() and job["metadata"]["annotations"][POD_ANNOTATION] == uid
        what = job["spec"]["template"]["spec"]["containers"][0]["command"][3]
        if how == "Succeeded" and not is_for_pod:
            how = "Failed"
        number = job["spec"]["template"]["spec"]["containers"][0]["command"][4]
        assert number == job["metadata"]["annotations"][PARKING_ANNOTATION]
        if how == "Succeeded" and what == "store":
            assert self.files_in == uid, "files of a pod without them are stored"
            assert int(number) > int(self.stored_as or 0) or number == self.stored_as
            if number != self.stored_as:  # else an earlier try of this parking has written what is stored
                self.part_stored = words.startswith(STORED_IN_PART)
                self.stored, self.stored_as = not self.part_stored, number
            words = IN_PART if self.part_stored else "2 of 2 workspaces" if words == IN_PART else words
        if how == "Succeeded" and what == "restore":
            assert self.stored or self.part_stored
            assert number == self.stored_as
            # A complete copy of what is stored. Work in it makes it the only one.
            self.files_in = uid
        job["status"] = {"conditions": [{"type": CONDITION_OF[how], "status": "True"}]}
        state = ended(0 if how == "Succeeded" else 1, message=words if is_read else "")
        job["pod"] = self._pod_of(name, state, how)

    def begins(self, name: str) -> None:
        """Have a pod of a Job run."""
        self.jobs[name]["pod"] = self._pod_of(name, RUNNING)

    def waits(self, name: str, reason: str, message: str) -> None:
        """Have a pod of a Job not run."""
        self.jobs[name]["pod"] = self._pod_of(name, {"waiting": {"reason": reason, "message": message}})

    def _pod_of(self, name: str, state: Json, phase: str = "Running") -> Json:
        owner = {"kind": "Job", "name": name, "uid": self.jobs[name]["metadata"]["uid"], "controller": True}
        metadata = {
            "name": f"{name}-x",
            "namespace": "lab",
            "uid": f"{name}-x",
            "ownerReferences": [owner],
            "creationTimestamp": timestamp(self.now),
        }
        status = {"phase": phase, "containerStatuses": [{"name": "parking", "state": state}]}
        return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n1"}, "status": status}

    def answers(self, *, answered: bool = True) -> None:
        """Its executor answers what it was asked; not a question whether it is idle."""
        if (still := self.asked) is not None and not still.idle_seconds:
            self.reports["uid-s"] = ExecutorReport(
                self.now, is_still=still.is_still, parking=still.parking, answered=answered
            )
            self.asked = None

    def has_been_idle(self, seconds: float, *, answered: bool = True) -> None:
        """Its executor was asked to become still after 900 idle seconds, and reports that."""
        is_still = seconds >= 900
        idle = 0 if is_still else seconds
        number = self.sandbox["status"].get("parking", 0) + 1
        self.reports["uid-s"] = ExecutorReport(
            self.now, idle_seconds=idle, is_still=is_still, parking=number, answered=answered
        )

    # What a person sees.

    def set_running(self, running: bool) -> None:
        self.sandbox["spec"]["running"] = running

    def conditions(self) -> list[Json]:
        return list(self.sandbox.get("status", {}).get("conditions", []))

    def condition(self, kind: str) -> tuple[str, str]:
        """Return status and reason."""
        found = next((each for each in self.conditions() if each["type"] == kind), {"status": "", "reason": ""})
        return found["status"], found["reason"]

    def message(self, kind: str) -> str:
        return next(str(each["message"]) for each in self.conditions() if each["type"] == kind)

    def is_parked(self) -> bool:
        return self.condition("Parked")[0] == "True"

    def is_running(self) -> bool:
        return self.pod is not None and "running" in str(self.pod["status"].get("containerStatuses"))


def serving(mode: str = "Overlay", *, when_idle: bool = False) -> Cluster:
    cluster = Cluster(mode, when_idle)
    cluster.act(2)
    cluster.starts()
    cluster.act()
    assert cluster.condition("Ready") == ("True", "Running")
    return cluster


def parked() -> Cluster:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    cluster.ends("s-park", "Succeeded", "1 workspaces, 10 bytes")
    cluster.act(2)
    cluster.lose_pod()
    cluster.act()
    return cluster


def test_parking_stores_first_and_then_gives_the_pod_back() -> None:
    cluster = serving()
    cluster.set_running(False)
    assert cluster.act().actions == (), "the status is written first"
    assert cluster.condition("Ready") == ("False", "Parking")
    cluster.act()
    (job,) = cluster.jobs.values()
    container = job["spec"]["template"]["spec"]["containers"][0]
    address, seconds = cluster.pod["status"]["podIP"], "900"  # type: ignore[index]
    assert container["command"][3:] == ["store", "1", "lab", "s", "uid-s", address, seconds, PARKING["uri"]]
    assert container["envFrom"] == [{"secretRef": {"name": "storage"}}]
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    cluster.begins("s-park")
    cluster.set_running(True)
    assert cluster.act() == Plan(), "it is stored first"
    cluster.set_running(False)
    cluster.ends("s-park", "Succeeded", "1 workspaces, 10 bytes")
    assert cluster.act().actions == ()
    assert (cluster.condition("Parked"), cluster.condition("Ready")) == (("True", "Stored"), ("False", "Parked"))
    assert {"type": "Parked", "message": "1 workspaces, 10 bytes"}.items() <= cluster.conditions()[1].items()
    cluster.act()
    assert cluster.jobs == {}
    cluster.lose_pod()
    assert cluster.act() == Plan()
    assert cluster.events[-2:] == ["Parking", "Parked"]


def test_files_come_back_into_a_new_pod_of_the_same_mode() -> None:
    cluster = parked()
    cluster.set_running(True)
    cluster.act(2)
    assert cluster.condition("Ready") == ("False", "Restoring")
    pod = cluster.pod
    assert pod is not None
    assert pod["spec"]["hostUsers"] is False
    assert pod["metadata"]["annotations"][PARKED_ANNOTATION]
    assert cluster.act() == Plan(requeue_seconds=60)
    cluster.starts("n2")
    cluster.act()
    cluster.ends("s-unpark", "Succeeded")
    cluster.act()
    assert (cluster.condition("Parked"), cluster.condition("Ready")) == (("False", "Restored"), ("True", "Running"))
    assert cluster.sandbox["status"]["nodeName"] == "n2"
    cluster.act()
    assert (cluster.jobs, cluster.events[-1]) == ({}, "Restored")


def test_failed_store_keeps_the_pod_and_says_why() -> None:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    cluster.ends("s-park", "Failed", "NoSuchBucket")
    cluster.act(3)
    assert (cluster.condition("Parked"), cluster.jobs) == (("False", "StoreFailed"), {})
    assert next(each for each in cluster.conditions() if each["type"] == "Ready")["message"] == "NoSuchBucket"
    cluster.set_running(True)
    cluster.act()
    assert cluster.asked == Still(1, is_still=False)
    cluster.answers(answered=False)
    assert cluster.act() == Plan(requeue_seconds=30)
    cluster.now += timedelta(seconds=30)
    cluster.act()
    cluster.answers()
    cluster.act(2)
    assert (cluster.condition("Ready"), cluster.jobs, cluster.pod is not None) == (("True", "Running"), {}, True)


def test_executor_is_still_before_the_job_begins_which_can_be_undone_until_then() -> None:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    assert (cluster.asked, list(cluster.jobs)) == (Still(1), ["s-park"])
    cluster.answers(answered=False)
    cluster.act()
    assert cluster.asked != Still(1)
    cluster.now += timedelta(seconds=30)
    cluster.act(2)
    assert cluster.asked == Still(1)
    cluster.answers()
    cluster.act()
    assert cluster.asked != Still(1)
    assert cluster.condition("Ready") == ("False", "ParkingWaits")
    assert cluster.message("Ready").startswith("the Job s-park has not begun: it has no pod")
    cluster.waits("s-park", "ContainerCreating", "")
    cluster.act()
    assert cluster.condition("Ready") == ("False", "Parking")
    cluster.waits("s-park", "CreateContainerConfigError", 'secret "storag" not found')
    cluster.act()
    assert cluster.message("Ready").endswith(': CreateContainerConfigError: secret "storag" not found')
    assert cluster.events[-1] == "ParkingWaits"
    cluster.set_running(True)
    cluster.act(2)
    assert (cluster.asked, cluster.jobs) == (Still(1, is_still=False), {})
    cluster.answers()
    cluster.act()
    assert (cluster.condition("Ready"), cluster.events[-1]) == (("True", "Running"), "Restored")
    assert "without having been parked" in cluster.message("Parked")
    cluster.set_running(False)
    cluster.act(2)
    assert (cluster.condition("Ready")[1], cluster.asked) == ("Parking", Still(2)), (
        "the last answer is of another parking"
    )


def test_pod_that_ends_before_the_job_begins_ends_its_sandbox() -> None:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    cluster.waits("s-park", "ContainerCreating", "")
    assert cluster.pod is not None
    cluster.pod["status"] |= {"phase": "Failed", "containerStatuses": [{"name": "sandbox", "state": ended(137)}]}
    cluster.act(2)
    assert cluster.condition("Finished")[0] == "True"


def test_key_of_a_parked_sandbox_is_written_again_before_a_job_needs_it() -> None:
    cluster = parked()
    cluster.set_running(True)
    cluster.act(2)
    cluster.starts()
    key, job = cluster.look().actions
    assert isinstance(key, EnsureKey)
    assert isinstance(job, Create)


def stored_in_part() -> Cluster:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    cluster.ends("s-park", "Succeeded", IN_PART)
    cluster.act(2)
    assert cluster.condition("Parked") == ("False", "StoredInPart")
    assert (cluster.condition("Ready"), cluster.jobs) == (("False", "StoreFailed"), {})
    assert "deletionTimestamp" not in cluster.pod["metadata"]  # type: ignore[index]
    return cluster


def test_part_is_known_also_if_the_words_of_the_job_cannot_be_read() -> None:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    cluster.ends("s-park", "Succeeded", IN_PART, is_read=False)
    cluster.act(2)
    assert cluster.condition("Ready") == ("False", "Parking")
    cluster.ends("s-park", "Succeeded")
    cluster.act(2)
    assert cluster.condition("Parked") == ("False", "StoredInPart")
    assert "deletionTimestamp" not in cluster.pod["metadata"]  # type: ignore[index]


def test_words_of_other_containers_and_failed_tries_do_not_count() -> None:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    cluster.ends("s-park", "Succeeded", IN_PART)
    statuses = cluster.jobs["s-park"]["pod"]["status"]["containerStatuses"]
    statuses += [
        {"name": "sidecar", "state": ended(0, message="all is well", lived=9)},
        {"name": "parking", "state": ended(1, message="a late try", lived=9)},
    ]
    cluster.act(2)
    assert cluster.condition("Parked") == ("False", "StoredInPart")


def test_sandbox_that_was_stored_in_part_keeps_its_pod_and_is_used_again() -> None:
    cluster = stored_in_part()
    cluster.set_running(True)
    cluster.act(2)
    cluster.answers()
    cluster.act(2)
    assert cluster.condition("Ready") == ("True", "Running")
    cluster.lose_pod()
    cluster.now += timedelta(seconds=10)
    cluster.act()
    assert cluster.condition("Finished") == ("True", "PodDeleted"), "what was stored is older than what was lost"


def test_sandbox_that_was_stored_in_part_is_parked_when_its_pod_ends() -> None:
    cluster = stored_in_part()
    cluster.pod["status"]["containerStatuses"][0]["state"] = ended(137)  # type: ignore[index]
    cluster.act(2)
    assert (cluster.condition("Parked"), cluster.condition("Ready")) == (("True", "Stored"), ("False", "Parked"))
    cluster.lose_pod()
    cluster.set_running(True)
    cluster.act(2)
    cluster.starts()
    cluster.act()
    cluster.ends("s-unpark", "Succeeded")
    cluster.act()
    assert cluster.condition("Ready") == ("True", "Running")


def test_job_of_an_earlier_parking_decides_nothing() -> None:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    late = copy.deepcopy(cluster.jobs["s-park"])
    cluster.ends("s-park", "Failed")
    cluster.act(2)
    cluster.set_running(True)
    cluster.act(2)
    cluster.answers()
    cluster.act()
    assert cluster.condition("Ready") == ("True", "Running")
    cluster.set_running(False)
    cluster.act()
    late["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    cluster.jobs = {"s-park": late}
    cluster.act()
    assert (cluster.condition("Ready"), cluster.jobs) == (("False", "Parking"), {})
    cluster.act()
    assert cluster.jobs["s-park"]["metadata"]["annotations"][PARKING_ANNOTATION] == "2"


def test_pod_lost_while_files_come_back_is_replaced() -> None:
    cluster = parked()
    cluster.set_running(True)
    cluster.act(2)
    cluster.starts()
    cluster.act()
    cluster.nodes["n1"] = node("n1", ready=False, since=cluster.now - timedelta(seconds=31))
    assert cluster.act().actions == ()
    assert cluster.condition("Ready") == ("False", "NodeLost")
    deleted = [action for action in cluster.look().actions if isinstance(action, Delete)]
    assert {(each.ref.kind, each.grace_seconds) for each in deleted} == {("Job", None), ("Pod", 0)}
    kept = copy.deepcopy(cluster.pod)
    cluster.act(3)
    assert cluster.pod is None, "there is a pause"
    cluster.pod = kept  # a finalizer
    assert cluster.act().actions == ()
    cluster.pod = None
    cluster.now += timedelta(seconds=21)
    cluster.act()
    assert cluster.pod is not None
    assert cluster.condition("Finished") == ("", "")


def test_running_while_files_are_stored_still_gives_the_old_pod_back() -> None:
    cluster = serving()
    cluster.set_running(False)
    cluster.act(2)
    cluster.begins("s-park")
    cluster.set_running(True)
    cluster.ends("s-park", "Succeeded")
    cluster.act(4)
    assert cluster.pod is not None
    assert "deletionTimestamp" in cluster.pod["metadata"]
    cluster.lose_pod()
    cluster.act(2)
    assert cluster.pod is not None
    assert PARKED_ANNOTATION in cluster.pod["metadata"]["annotations"]


def test_park_again_while_files_come_back_deletes_the_pod() -> None:
    cluster = parked()
    cluster.set_running(True)
    cluster.act(2)
    cluster.starts()
    cluster.act()
    cluster.ends("s-unpark", "Succeeded")
    cluster.set_running(False)
    cluster.act(2)
    assert (cluster.condition("Ready"), cluster.jobs) == (("False", "Parked"), {})
    assert cluster.is_parked()


def test_idle_sandbox_is_parked_and_not_again_as_soon_as_it_is_back() -> None:
    cluster = serving(when_idle=True)
    (asked,) = cluster.look().actions
    assert isinstance(asked, AskExecutors)
    (request,) = asked.requests
    assert (request.address, request.still) == (cluster.pod["status"]["podIP"], Still(1, idle_seconds=900))  # type: ignore[index]
    cluster.now += timedelta(seconds=1)
    cluster.has_been_idle(100)
    assert cluster.look() == Plan(requeue_seconds=800)
    cluster.now += timedelta(seconds=800)
    assert cluster.look().actions == (asked,)
    cluster.has_been_idle(900, answered=False)
    assert cluster.look() == Plan(requeue_seconds=30)
    cluster.has_been_idle(900)
    cluster.act(2)
    assert (cluster.condition("Ready"), cluster.events[-2:]) == (("False", "Parking"), ["Idle", "Parking"])
    cluster.act()
    cluster.ends("s-park", "Succeeded")
    cluster.act(2)
    cluster.lose_pod()
    cluster.now += timedelta(seconds=1)
    cluster.set_running(True)
    cluster.act(2)
    cluster.starts()
    cluster.act()
    cluster.ends("s-unpark", "Succeeded")
    cluster.act(2)
    assert cluster.condition("Ready") == ("True", "Running")
    assert [type(action) for action in cluster.look().actions] == [AskExecutors], "the old report is of another pod"


def test_sandbox_that_is_parked_when_idle_does_not_end_itself_and_the_operator_may_ask_it() -> None:
    config, rules = [], []
    for when_idle in (False, True):
        cluster = Cluster("Overlay", when_idle)
        spec = SandboxSpec.model_validate(cluster.sandbox["spec"])
        who = Identity("s", "lab", "uid-s", KEY, {}, "")
        config.append(executor_config(who, spec, WorkspaceMode.OVERLAY, memory_bytes=None, disk_bytes=None))
        seen = observe(World(Cache(), CONFIG, NOW, Memory(), {}), cluster.sandbox)
        (policy_of_pod,) = missing_policy(seen, spec)
        rules.append(operator_peer(CONFIG) in policy_of_pod.body["spec"]["ingress"][0]["from"])
    assert [each["idleSeconds"] for each in config] == [900, 0]
    assert rules == [True, True]


class Lives(RuleBasedStateMachine):
    """A person, the cluster and the operator, in any order."""

    cluster: Cluster

    accidents: bool

    @initialize(
        begin=st.sampled_from([serving, parked, parked]),
        running=st.booleans(),
        rounds=st.integers(0, 3),
        accidents=st.sampled_from([False, False, False, True]),
        when_idle=st.booleans(),
    )
    def begin(self, begin: Callable[[], Cluster], running: bool, rounds: int, accidents: bool, when_idle: bool) -> None:
        self.cluster, self.accidents = begin(), accidents
        self.cluster.sandbox["spec"]["parking"]["whenIdle"] = when_idle
        self.a_person_sets_running(running, rounds)

    def may_lose_pod(self) -> bool:
        """Whether the cluster may end the pod now: of a Sandbox that is not parked, only in some lives."""
        return self.accidents or self.cluster.is_parked()

    @rule(rounds=st.integers(1, 4))
    def the_operator_looks(self, rounds: int) -> None:
        self.cluster.act(rounds)

    @rule()
    def the_operator_restarts(self) -> None:
        self.cluster.memory, self.cluster.keys = Memory(), {}

    @rule(running=st.booleans(), rounds=st.integers(0, 3))
    def a_person_sets_running(self, running: bool, rounds: int) -> None:
        self.cluster.set_running(running)
        self.cluster.act(rounds)

    @precondition(lambda self: self.cluster.condition("Ready")[0] == "True" and self.cluster.pod is not None)
    @rule()
    def a_person_works(self) -> None:
        """From now on only this pod has the files as they are."""
        pod = self.cluster.pod
        assert pod is not None
        assert self.accidents or self.cluster.files_in == pod["metadata"]["uid"], "Ready without its files"
        self.cluster.stored = self.cluster.part_stored = False

    @precondition(lambda self: self.cluster.is_running())
    @rule(seconds=st.sampled_from([0, 900]), answered=st.booleans())
    def its_executor_answers(self, seconds: int, answered: bool) -> None:
        if self.cluster.asked is not None and self.cluster.asked.idle_seconds:
            self.cluster.has_been_idle(seconds, answered=answered)
        else:
            self.cluster.answers(answered=answered)

    @precondition(lambda self: any("pod" not in job for job in self.cluster.jobs.values()))
    @rule(rounds=st.integers(0, 3))
    def a_job_begins(self, rounds: int) -> None:
        self.cluster.begins(next(name for name, job in self.cluster.jobs.items() if "pod" not in job))
        self.cluster.act(rounds)

    @precondition(lambda self: any(not job["status"].get("conditions") for job in self.cluster.jobs.values()))
    @rule(
        how=st.sampled_from(["Succeeded", "Succeeded", "Failed"]),
        words=st.sampled_from(["2 of 2 workspaces", "2 of 2 workspaces", IN_PART]),
        is_read=st.sampled_from([True, True, False]),
        rounds=st.integers(0, 3),
    )
    def a_job_ends(self, how: str, words: str, is_read: bool, rounds: int) -> None:
        name = next(name for name, job in self.cluster.jobs.items() if not job["status"].get("conditions"))
        self.cluster.ends(name, how, words, is_read=is_read)
        self.cluster.act(rounds)

    @precondition(lambda self: self.cluster.pod is not None and not self.cluster.is_running())
    @rule(name=st.sampled_from(["n1", "n2"]), rounds=st.integers(0, 2))
    def the_pod_starts(self, name: str, rounds: int) -> None:
        if "containerStatuses" not in self.cluster.pod["status"]:  # type: ignore[index]
            self.cluster.starts(name)
        self.cluster.act(rounds)

    @precondition(lambda self: self.cluster.is_running() and self.may_lose_pod())
    @rule()
    def the_pod_ends(self) -> None:
        pod = self.cluster.pod
        assert pod is not None
        self.cluster.files_in = None
        self.cluster.accident |= not self.cluster.is_parked()
        pod["status"] |= {"phase": "Failed", "containerStatuses": [{"name": "sandbox", "state": ended(137)}]}

    @precondition(lambda self: self.cluster.pod is not None and self.may_lose_pod())
    @rule()
    def the_pod_is_gone(self) -> None:
        self.cluster.lose_pod()
        self.cluster.accident |= not self.cluster.is_parked()

    @precondition(lambda self: self.may_lose_pod())
    @rule(name=st.sampled_from(["n1", "n2"]), ready=st.booleans())
    def a_node_changes(self, name: str, ready: bool) -> None:
        since = self.cluster.now - timedelta(seconds=60)
        self.cluster.nodes[name] = node(name, ready=ready, since=since)
        self.cluster.accident |= not ready and not self.cluster.is_parked()

    @rule(seconds=st.sampled_from([1, 25, 700]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.now += timedelta(seconds=seconds)

    @invariant()
    def files_are_in_the_pod_or_stored(self) -> None:
        if not hasattr(self, "cluster"):
            return
        pod = self.cluster.pod
        in_pod = pod is not None and self.cluster.files_in == pod["metadata"]["uid"]
        assert in_pod or self.cluster.stored or self.cluster.accident
        assert self.cluster.accident or self.cluster.condition("Finished")[0] != "True"

    def teardown(self) -> None:
        """With a healthy cluster, what the person wants comes true."""
        if not hasattr(self, "cluster") or self.cluster.condition("Finished")[0] == "True":
            return
        cluster = self.cluster
        cluster.nodes = {name: node(name) for name in ("n1", "n2")}
        for _ in range(ROUNDS):
            cluster.act(3)
            if cluster.pod is not None and "deletionTimestamp" in cluster.pod["metadata"]:
                cluster.lose_pod()
            if cluster.pod is not None and "containerStatuses" not in cluster.pod["status"]:
                cluster.starts()
            for name, job in list(cluster.jobs.items()):
                if not job["status"].get("conditions"):
                    cluster.ends(name, "Succeeded")
            cluster.answers()
            cluster.now += timedelta(seconds=25)
        if cluster.sandbox["spec"].get("running", True):
            assert cluster.condition("Ready") == ("True", "Running") or cluster.condition("Finished")[0] == "True"
            assert cluster.files_in or cluster.stored or cluster.accident
        elif cluster.condition("Ready") != ("False", "StoreFailed"):
            assert cluster.pod is None
            assert cluster.condition("Ready")[1] in ("Parked",) or cluster.condition("Finished")[0] == "True"


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(800), stateful_step_count=30)
