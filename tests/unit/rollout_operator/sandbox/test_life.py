"""Random lives of a Sandbox: the operator with a cluster whose events come in any order.

The cluster below keeps what the API server would keep and refuses what it would refuse. The operator sees pods and
nodes late (stale), and its own writes at once, as its loop guarantees.
"""

import copy
from datetime import timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_api.sandbox import SandboxStatus
from rollout_operator.actions import Create, Delete, EnsureKey, Plan, ReadKey, Remember
from rollout_operator.cache import Cache
from rollout_operator.conditions import timestamp
from rollout_operator.sandbox import observe, plan
from rollout_operator.world import Memory, World
from tests.support.full import examples
from tests.unit.rollout_operator.sandbox.objects import (
    CONFIG,
    KEY,
    NOW,
    RUNNING,
    Json,
    disrupted,
    ended,
    node,
    rollout_job,
    sandbox,
    waiting,
)

ROUNDS = 8
"""More rounds than any life needs to settle: refused four times, then key, policy, pod, status, deletions."""
ENDINGS: list[tuple[Json, Json]] = [
    (ended(0, "Completed"), {"phase": "Succeeded"}),
    (ended(137, "OOMKilled"), {"phase": "Failed"}),
    (ended(1), {"phase": "Failed"}),
    (ended(137), {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}),
    (ended(143), {"phase": "Failed", "reason": "DeadlineExceeded"}),
    (ended(137, "ContainerStatusUnknown"), {"phase": "Failed"}),
]
TRIAL_FAILED = ended(3, message="mount: EPERM")
UNSCHEDULABLE: Json = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
STARTS: list[Json] = [
    UNSCHEDULABLE,
    waiting("ContainerCreating"),
    waiting("ErrImagePull", "not found"),
    waiting("ImagePullBackOff"),
    waiting("InvalidImageName"),
    ended(128, "StartError", "permission denied"),
]


class Cluster:
    """One Sandbox, its pod, two nodes, the refusals of the API server, and an operator."""

    def __init__(self, mode: str, by_hand: bool, keep: bool, refuses: set[str], able: tuple[bool, bool]) -> None:
        self.now = NOW
        self.mode, self.refuses = mode, refuses
        self.memory, self.keys = Memory(), dict[str, str]()
        owner, finished = None if by_hand else "j", "Retain" if keep else "Delete"
        self.sandbox: Json | None = sandbox(
            job=owner, workspaces={"mode": mode, "perSandbox": 4}, whenFinished=finished
        )
        self.pod: Json | None = None
        self.nodes = {name: node(name, user_namespaces=can) for name, can in zip(("n1", "n2"), able, strict=True)}
        self.policies: list[Json] = []
        self.pods_made = 0
        self.failed_trials = 0
        self.addresses_told: set[str] = set()
        self.needless_creates = 0
        self.cache = Cache()
        self.catch_up()

    # What the operator sees.

    def catch_up(self) -> None:
        """Deliver all pending watch events."""
        self.cache = Cache()
        self.cache.put("RolloutJob", rollout_job())
        for kind, objects in (
            ("Sandbox", [self.sandbox]),
            ("Pod", [self.pod]),
            ("Node", self.nodes.values()),
            ("NetworkPolicy", self.policies),
        ):
            for each in objects:
                if each is not None:
                    self.cache.put(kind, copy.deepcopy(each))

    def look(self) -> Plan:
        seen = self.cache.get("Sandbox", "lab", "s")
        if seen is None:
            return Plan()
        return plan(observe(World(self.cache, CONFIG, self.now, self.memory, self.keys), seen))

    def carry_out(self, planned: Plan) -> None:
        """Do what the loop does: actions in order, up to the first that learns something, then the status."""
        for action in planned.actions:
            match action:
                case Remember():
                    self.memory.learn(action, self.now.timestamp())
                case ReadKey() | EnsureKey():
                    self.keys["uid-j" if isinstance(action, ReadKey) else "uid-s"] = KEY
                    return
                case Create():
                    if not self.create(action):
                        return
                case Delete(ref, uid):
                    self.delete(ref.kind, uid)
        if planned.status is not None and self.sandbox is not None:
            self.write(SandboxStatus.model_validate(planned.status))

    def write(self, status: SandboxStatus) -> None:
        assert self.sandbox is not None
        self.sandbox["status"] = status.wire()
        self.cache.put("Sandbox", copy.deepcopy(self.sandbox))
        if status.pod_ip and any(c.type == "Ready" and c.status == "True" for c in status.conditions):
            self.addresses_told.add(status.pod_ip)

    def create(self, action: Create) -> bool:
        body = copy.deepcopy(dict(action.body))
        if body["kind"] == "NetworkPolicy":
            if body["metadata"]["name"] not in [policy["metadata"]["name"] for policy in self.policies]:
                self.policies.append(body)
                self.cache.put("NetworkPolicy", body)
            return True
        if refusal := self.refusal_of(body["spec"]):
            assert action.if_refused is not None
            learned = Remember(action.if_refused.fact, refusal, action.if_refused.seconds)
            self.memory.learn(learned, self.now.timestamp())
            return False
        self.needless_creates += self.holds("Finished") or self.holds("Ready")
        if self.pod is None:
            self.pods_made += 1
            body["metadata"] |= {"uid": f"uid-pod-{self.pods_made}", "creationTimestamp": timestamp(self.now)}
            body["status"] = {"phase": "Pending"}
            self.pod = body
            self.cache.put("Pod", copy.deepcopy(body))
        return True

    def refusal_of(self, spec: Json) -> str | None:
        if "everything" in self.refuses:
            return "a policy refuses it"
        if "Overlay" in self.refuses and spec.get("hostUsers") is False:
            return "violates PodSecurity"
        if "image volumes" in self.refuses and any("image" in volume for volume in spec["volumes"]):
            return "must specify a volume type"
        return None

    def delete(self, kind: str, uid: str) -> None:
        if kind == "Sandbox":
            self.sandbox = None
            self.cache.remove("Sandbox", "lab", "s")
        elif self.pod is not None and self.pod["metadata"]["uid"] == uid:
            if "terminated" in str(self.pod["status"].get("containerStatuses")) or "nodeName" not in self.pod["spec"]:
                self.pod = None
                self.cache.remove("Pod", "lab", "s")
            else:
                self.pod["metadata"]["deletionTimestamp"] = timestamp(self.now)
                self.cache.put("Pod", copy.deepcopy(self.pod))

    def holds(self, kind: str) -> bool:
        conditions = (self.sandbox or {}).get("status", {}).get("conditions", [])
        return any(found["type"] == kind and found["status"] == "True" for found in conditions)

    def kubelet_catches_up(self) -> None:
        """Remove a deleted pod."""
        if self.pod is not None and "deletionTimestamp" in self.pod["metadata"]:
            self.pod = None
            self.catch_up()

    def comes_to_rest(self) -> None:
        """Check that plans end without further events: with a pod to wait for, a Ready Sandbox, or nothing to do."""
        self.catch_up()
        for _ in range(ROUNDS):
            planned = self.look()
            if not planned.actions and planned.status is None:
                break
            self.carry_out(planned)
            self.kubelet_catches_up()
        else:
            raise AssertionError(f"still busy after {ROUNDS} rounds: {planned}")
        self.kubelet_catches_up()
        assert not (self.holds("Finished") and self.pod), "the pod of what has ended stays"
        assert self.policies or self.sandbox is None or self.pod is None, "the pod can reach the cluster"

    def has_pod(self) -> bool:
        return self.pod is not None

    def has_begun(self) -> bool:
        """Whether its container runs or ran."""
        return any(
            "waiting" not in found["state"] for found in (self.pod or {}).get("status", {}).get("containerStatuses", [])
        )

    def state(self, state: Json, **status: Any) -> None:
        assert self.pod is not None
        self.pod["status"] |= {"containerStatuses": [{"name": "sandbox", "state": state}], **status}


class Life(RuleBasedStateMachine):
    """Events of its life, in any order."""

    cluster: Cluster

    @initialize(
        mode=st.sampled_from(["Auto", "Auto", "Overlay", "Plain"]),
        by_hand=st.booleans(),
        keep=st.booleans(),
        refuses=st.sampled_from(
            [set(), set(), {"Overlay"}, {"image volumes"}, {"Overlay", "image volumes"}, {"everything"}]
        ),
        able=st.sampled_from([(True, True), (True, True), (True, False), (False, False)]),
        rounds=st.sampled_from([0, 3, 6, 6, 6]),
        serves=st.booleans(),
    )
    def begin(self, rounds: int, serves: bool, **cluster: Any) -> None:
        self.cluster = Cluster(**cluster)
        self.the_operator_looks(rounds)
        if serves and self.cluster.has_pod():
            self.the_pod_starts("n1", RUNNING, seen=True)

    def told_if(self, seen: bool) -> None:
        """Let the operator see what has happened, or not."""
        if seen:
            self.the_watches_catch_up()
            self.the_operator_looks(1)

    @rule(rounds=st.integers(1, 5))
    def the_operator_looks(self, rounds: int) -> None:
        for _ in range(rounds):
            self.cluster.carry_out(self.cluster.look())

    @rule()
    def the_watches_catch_up(self) -> None:
        self.cluster.catch_up()

    @precondition(lambda self: self.cluster.has_pod())
    @rule()
    def the_operator_restarts(self) -> None:
        self.cluster.memory, self.cluster.keys = Memory(), {}
        self.cluster.catch_up()

    @rule(seconds=st.sampled_from([1, 5, 10, 31, 120, 700]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.now += timedelta(seconds=seconds)

    @precondition(lambda self: self.cluster.has_pod() and not self.cluster.has_begun())
    @rule(name=st.sampled_from(["n1", "n2"]), state=st.sampled_from([RUNNING, RUNNING, *STARTS]), seen=st.booleans())
    def the_pod_starts(self, name: str, state: Json, seen: bool) -> None:
        pod = self.cluster.pod
        assert pod is not None
        if state == UNSCHEDULABLE:
            pod["status"]["conditions"] = [state]
        else:
            pod["spec"]["nodeName"] = name
            address = {"podIP": f"10.0.0.{self.cluster.pods_made}"} if state == RUNNING else {}
            self.cluster.state(state, **address)
        self.told_if(seen)

    @precondition(lambda self: self.cluster.has_begun())
    @rule(end=st.sampled_from(ENDINGS), seen=st.booleans())
    def the_pod_ends(self, end: tuple[Json, Json], seen: bool) -> None:
        state, status = end
        self.cluster.state(state, **status)
        self.told_if(seen)

    @precondition(lambda self: self.cluster.has_begun() and self.cluster.pod["spec"].get("hostUsers") is False)
    @rule(seen=st.booleans())
    def the_trial_fails(self, seen: bool) -> None:
        self.cluster.failed_trials += 1
        self.cluster.state(TRIAL_FAILED, phase="Failed")
        self.told_if(seen)

    @precondition(lambda self: self.cluster.has_begun())
    @rule(by=st.sampled_from(["", "EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager"]))
    def somebody_deletes_the_pod(self, by: str) -> None:
        pod = self.cluster.pod
        assert pod is not None
        pod["metadata"]["deletionTimestamp"] = timestamp(self.cluster.now)
        if by:
            pod["status"]["conditions"] = disrupted(by)

    @precondition(lambda self: self.cluster.holds("Ready"))
    @rule()
    def the_pod_vanishes_and_is_missed(self) -> None:
        self.cluster.pod = None
        self.time_passes(10)
        self.the_watches_catch_up()

    @precondition(lambda self: self.cluster.has_pod())
    @rule()
    def somebody_deletes_the_network_policy(self) -> None:
        self.cluster.policies.clear()

    @precondition(lambda self: self.cluster.has_pod() and "deletionTimestamp" in self.cluster.pod["metadata"])
    @rule()
    def the_pod_is_gone(self) -> None:
        self.cluster.pod = None

    @rule(name=st.sampled_from(["n1", "n2"]), ready=st.booleans())
    def a_node_changes(self, name: str, ready: bool) -> None:
        able = self.cluster.nodes[name]["status"]["runtimeHandlers"][0]["features"]["userNamespaces"]
        self.cluster.nodes[name] = node(name, user_namespaces=able, ready=ready, since=self.cluster.now)

    @rule()
    def nothing_else_happens(self) -> None:
        copy.deepcopy(self.cluster).comes_to_rest()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.comes_to_rest()

    # What may never be.

    @invariant()
    def nothing_is_made_for_what_has_ended_or_served(self) -> None:
        assert self.cluster.needless_creates == 0

    @invariant()
    def callers_are_told_of_one_pod_or_of_another_one_after_a_failed_trial(self) -> None:
        assert len(self.cluster.addresses_told) <= 1 + self.cluster.failed_trials

    @invariant()
    def a_sandbox_that_has_ended_says_that_it_is_not_ready(self) -> None:
        if self.cluster.sandbox is not None and "status" in self.cluster.sandbox:
            status = SandboxStatus.model_validate(self.cluster.sandbox["status"])
            held = {found.type: found.status == "True" for found in status.conditions}
            assert not held.get("Finished") or held["Ready"] is False


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(80), stateful_step_count=30)


def test_a_namespace_that_refuses_overlay_ends_in_a_plain_pod_that_serves() -> None:
    """Shows that the random lives above can reach a good end at all."""
    cluster = Cluster("Auto", by_hand=False, keep=False, refuses={"Overlay"}, able=(True, True))
    for _ in range(4):
        cluster.carry_out(cluster.look())
    assert cluster.pod is not None
    assert "hostUsers" not in cluster.pod["spec"]
    cluster.pod["spec"]["nodeName"] = "n1"
    cluster.state(RUNNING, phase="Running", podIP="10.0.0.1")
    cluster.comes_to_rest()
    assert cluster.addresses_told == {"10.0.0.1"}
    assert cluster.memory.recall(("overlay-refused", "lab"), cluster.now.timestamp()) == "violates PodSecurity"
