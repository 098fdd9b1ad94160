"""A Sandbox's life in single situations. `test_life.py` combines them in any order."""

from datetime import timedelta
from typing import Any

import pytest

from rollout_api.sandbox import SandboxStatus
from rollout_operator.actions import Create, Delete, Plan, Ref, Remember
from rollout_operator.sandbox import observe, plan
from rollout_operator.sandbox.making import REFUSAL_SECONDS
from rollout_operator.sandbox.observe import VARIANTS, pod_refused
from rollout_operator.world import Memory
from tests.unit.rollout_operator.sandbox.objects import (
    NOW,
    RUNNING,
    Json,
    ended,
    node,
    pod,
    policy,
    rollout_job,
    sandbox,
    waiting,
    world,
)

POD = Ref("Pod", "lab", "s")
IP: Json = {"podIP": "10.0.0.1"}


def look(asked: Json, *objects: Json, seconds: float = 0, memory: Memory | None = None) -> Plan:
    """Plan the Sandbox; the NetworkPolicy of a pod exists."""
    policies = [policy()] if any(each.get("kind") == "Pod" for each in objects) else []
    return plan(observe(world(*objects, *policies, now=NOW + timedelta(seconds=seconds), memory=memory), asked))


def after(asked: Json, *objects: Json, seconds: float = 0) -> Json:
    """Return the Sandbox after its planned status was written."""
    planned = look(asked, *objects, seconds=seconds)
    assert planned.status is not None
    return {**asked, "status": planned.status}


def conditions(asked: Json) -> dict[str, tuple[str, str, str]]:
    status = SandboxStatus.model_validate(asked["status"])
    return {found.type: (found.status, found.reason, found.message) for found in status.conditions}


def ready(**spec: Any) -> Json:
    return after(sandbox(**spec), node(), pod(RUNNING, **IP), seconds=1)


def finished(state: Json | None = None, **spec: Any) -> Json:
    return after(ready(**spec), node(), pod(state or ended(0, "Completed"), **IP), seconds=2)


def test_normal_start_of_a_sandbox_needs_one_pod_and_one_status_write() -> None:
    assert len(look(sandbox(), node()).actions) == 2  # its policy, too, which others share
    assert look(sandbox(), node(), pod()).status is None
    assert look(sandbox(), node(), pod(waiting("ContainerCreating"))).status is None
    done = ready(workspaces={"perSandbox": 8})
    assert done["status"]["mode"] == "Overlay"
    assert done["status"]["places"] == {"total": 8}
    status = SandboxStatus.model_validate(done["status"])
    assert (status.pod_name, status.pod_ip, status.node_name) == ("s", "10.0.0.1", "n1")
    assert {kind: held for kind, (held, _, _) in conditions(done).items()} == {
        "Scheduled": "True",
        "ImagePulled": "True",
        "Overlay": "True",
        "Ready": "True",
    }
    assert look(done, node(), pod(RUNNING, **IP), seconds=9) == Plan()


def test_plain_sandbox_reports_the_reason_and_the_limits_of_its_network() -> None:
    plain = pod(RUNNING, overlay=False, **IP)
    plain["metadata"]["annotations"] = {"rollout.dev/overlay": "NodesLackUserNamespaces: none of 1 nodes"}
    asked = sandbox(workspaces={"perSandbox": 8}, network={"setup": "Public"})
    done = after(asked, node(), plain)
    assert (done["status"]["mode"], done["status"]["places"]) == ("Plain", {"total": 1})
    held, reason, message = conditions(done)["Overlay"]
    assert (held, reason) == ("False", "NodesLackUserNamespaces")
    assert message == "none of 1 nodes. Network in Plain mode: destinations of one phase are open in all phases"
    assert look(asked, node(), plain).events[0].reason == "NodesLackUserNamespaces"


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("job", [None, "j"])
def test_deleted_network_policy_is_created_again_while_the_pod_exists(job: str | None, is_finished: bool) -> None:
    objects = [node(), rollout_job(), pod(RUNNING, **IP)]
    asked = after(sandbox(job=job), *objects, seconds=1)
    if is_finished:
        asked = after(asked, node(), rollout_job(), pod(ended(0, "Completed"), **IP), seconds=2)
    first = look(sandbox(job=job), node(), rollout_job()).actions[0]
    again = plan(observe(world(*objects, now=NOW + timedelta(seconds=9)), asked)).actions[0]
    assert isinstance(first, Create)
    assert first.ref.kind == "NetworkPolicy"
    assert again == first


def test_missing_image_is_reported_once_after_repeated_pulls() -> None:
    first = look(sandbox(), node(), pod(waiting("ErrImagePull", "not found")))
    assert first.events[0].reason == "ImagePullBackOff"
    told = after(sandbox(), node(), pod(waiting("ErrImagePull", "not found")))
    assert conditions(told) == {
        "ImagePulled": ("False", "ImagePullBackOff", "not found"),
        "Ready": ("False", "ImagePullBackOff", ""),
    }
    again = look(told, node(), pod(waiting("ImagePullBackOff", "Back-off pulling image: ErrImagePull: not found")))
    assert (again.status, again.events) == (None, ())
    assert again.requeue_seconds == 600


def test_pod_that_no_scheduler_looks_at_gets_a_condition() -> None:
    unseen = pod(node_name="")
    first = look(sandbox(), node(), unseen, seconds=1)
    assert (first.status, first.requeue_seconds) == (None, 60)
    told = after(sandbox(), node(), unseen, seconds=61)
    held, reason, message = conditions(told)["Scheduled"]
    assert (held, reason, "schedulerName" in message) == ("False", "Pending", True)
    assert look(told, node(), unseen, seconds=62).status is None


def test_sandbox_at_its_start_deadline_ends_with_what_it_waited_for() -> None:
    asked, stuck = sandbox(startSeconds=60), pod(waiting("ImagePullBackOff", "not found"))
    assert look(asked, node(), stuck, seconds=59).requeue_seconds == 1
    done = after(asked, node(), stuck, seconds=60)
    held, reason, message = conditions(done)["Finished"]
    assert (held, reason) == ("True", "StartDeadlineExceeded")
    assert (
        message == "the Sandbox was not ready 60 s after its creation (spec.startSeconds): ImagePullBackOff: not found"
    )
    assert conditions(done)["ImagePulled"][0] == "False"


def refused_in_every_way(seconds: float) -> Memory:
    memory = Memory()
    for variant in VARIANTS:
        fact = Remember(pod_refused("uid-s", variant), "violates PodSecurity", REFUSAL_SECONDS)
        memory.learn(fact, (NOW + timedelta(seconds=seconds)).timestamp())
    return memory


@pytest.mark.parametrize("mode", ["Auto", "Overlay", "Plain"])
def test_new_sandbox_is_admitted_when_its_namespace_is_labelled_in_time(mode: str) -> None:
    asked, memory = sandbox(workspaces={"mode": mode}), refused_in_every_way(1)
    waits = look(asked, node(), seconds=1, memory=memory)
    told = {**asked, "status": waits.status}
    held, reason, message = conditions(told)["Ready"]
    assert (held, reason, "violates PodSecurity" in message) == ("False", "PodRefused", True)
    assert [(event.reason, "violates PodSecurity" in event.message) for event in waits.events] == [("PodRefused", True)]

    again = look(told, node(), seconds=2, memory=memory)
    assert (again.actions, again.status, again.events) == ((), None, ())
    assert waits.requeue_seconds is not None
    asks = look(told, node(), seconds=1 + waits.requeue_seconds, memory=memory)
    assert isinstance(asks.actions[-1], Create)
    assert (asks.actions[-1].body["spec"].get("hostUsers") is False) == (mode != "Plain")


def test_sandbox_refused_in_every_mode_for_a_minute_is_invalid() -> None:
    waits = look(sandbox(), node(), seconds=50, memory=refused_in_every_way(50))
    assert waits.requeue_seconds == 10
    told = {**sandbox(), "status": waits.status}
    done = look(told, node(), seconds=60, memory=refused_in_every_way(50))
    held, reason, message = conditions({**told, "status": done.status})["Finished"]
    assert (held, reason, "violates PodSecurity" in message) == ("True", "Invalid", True)


def test_start_deadline_reports_the_refusal_of_admission() -> None:
    asked = sandbox(startSeconds=30)
    told = {**asked, "status": look(asked, node(), seconds=29, memory=refused_in_every_way(29)).status}
    held, reason, message = conditions(after(told, node(), seconds=30))["Finished"]
    assert (held, reason, "violates PodSecurity" in message) == ("True", "StartDeadlineExceeded", True)


def test_start_deadline_applies_to_a_pod_that_cannot_be_created() -> None:
    where = world(node(), now=NOW + timedelta(seconds=601))
    told = plan(observe(type(where)(**{**where.__dict__, "last_error": "exceeded quota: pods"}), sandbox()))
    assert "exceeded quota: pods" in str(told.status)


@pytest.mark.parametrize(
    ("state", "reason"),
    [(ended(0, "Completed"), "Idle"), (ended(137, "OOMKilled"), "OOMKilled"), (ended(1), "Crashed")],
)
def test_end_is_written_before_the_pod_is_deleted(state: Json, reason: str) -> None:
    gone = pod(state, **IP)
    first = look(ready(), node(), gone, seconds=2)
    assert first.actions == ()
    done = after(ready(), node(), gone, seconds=2)
    assert conditions(done)["Finished"][:2] == ("True", reason)
    assert conditions(done)["Ready"][:2] == ("False", reason)
    assert look(done, node(), gone, seconds=2) == Plan((Delete(POD, "uid-pod-s"),), requeue_seconds=60)
    assert look(done, node(), seconds=61).actions == ()
    assert look(done, node(), seconds=62).actions == (Delete(Ref("Sandbox", "lab", "s"), "uid-s"),)


def test_pod_in_deletion_is_not_deleted_again() -> None:
    going = pod(ended(0), **IP)
    going["metadata"]["deletionTimestamp"] = "2026-05-04T12:00:00Z"
    assert look(finished(), node(), going, seconds=2).actions == ()


def test_retain_keeps_the_sandbox_and_not_its_pod() -> None:
    done = finished(whenFinished="Retain")
    assert look(done, node(), pod(ended(0), **IP), seconds=10**6).actions == (Delete(POD, "uid-pod-s"),)
    assert look(done, node(), seconds=10**6) == Plan()


def test_ready_sandboxs_pod_is_never_created_again() -> None:
    asked = ready()
    assert look(asked, node(), seconds=2).actions == ()  # the cache may not have the pod yet
    done = after(asked, node(), seconds=10)
    assert conditions(done)["Finished"][:2] == ("True", "PodDeleted")


def test_a_pod_that_vanished_with_its_node_is_lost_and_not_deleted() -> None:
    done = after(ready(), node("other"), node("n1", ready=False), seconds=10)
    assert conditions(done)["Finished"][1] == "NodeLost"
    done = after(ready(), node("other"), seconds=10)
    assert conditions(done)["Finished"][1] == "NodeLost"


def test_other_pod_of_the_same_name_is_not_adopted() -> None:
    done = after(ready(), node(), pod(RUNNING, podIP="10.0.0.2"), seconds=10)
    held, reason, message = conditions(done)["Finished"]
    assert (held, reason) == ("True", "PodDeleted")
    assert "10.0.0.1" in message
    assert "10.0.0.2" in message


def test_silent_node_loses_its_sandboxes_after_half_a_minute() -> None:
    silent, other = node("n1", ready=False), node("n2")
    waits = look(ready(), silent, other, pod(RUNNING, **IP), seconds=10)
    assert (waits.status, waits.requeue_seconds) == (None, 20)
    done = after(ready(), silent, other, pod(RUNNING, **IP), seconds=30)
    assert conditions(done)["Finished"][1] == "NodeLost"


def test_silence_of_all_nodes_loses_no_sandbox() -> None:
    assert look(ready(), node("n1", ready=False), pod(RUNNING, **IP), seconds=600) == Plan()


def test_a_failed_trial_gives_a_plain_pod_and_the_reason() -> None:
    failed = pod(ended(3, message="mount: EPERM"))
    first = look(sandbox(), node(), failed)
    assert {type(action) for action in first.actions} == {Remember}
    assert first.events[0].reason == "OverlayTrialFailed"
    told = after(sandbox(), node(), failed)
    assert conditions(told)["Overlay"] == ("False", "TrialFailed", "Overlay failed on node n1: mount: EPERM")
    second = look(told, node(), failed)
    assert second.actions == (Delete(POD, "uid-pod-s", grace_seconds=0),)
    third = look(told, node())
    create = third.actions[-1]
    assert isinstance(create, Create)
    assert "hostUsers" not in create.body["spec"]
    plain = pod(RUNNING, overlay=False, **IP)
    plain["metadata"]["annotations"] = create.body["metadata"]["annotations"]
    done = after(told, node(), plain, seconds=5)
    assert conditions(done)["Ready"][0] == "True"
    assert conditions(done)["Overlay"][:2] == ("False", "TrialFailed")
    assert done["status"]["mode"] == "Plain"


def test_trial_that_fails_after_the_pod_was_running_is_not_a_loss() -> None:
    told = after(ready(), node(), pod(ended(3, message="mount: EPERM"), **IP), seconds=2)
    assert conditions(told)["Ready"][:2] == ("False", "TrialFailed")
    assert SandboxStatus.model_validate(told["status"]).pod_ip is None


def test_failed_trial_of_an_explicit_overlay_is_reported() -> None:
    done = after(sandbox(workspaces={"mode": "Overlay"}), node(), pod(ended(3, message="mount: EPERM")))
    held, reason, message = conditions(done)["Finished"]
    assert (held, reason) == ("True", "Crashed")
    assert message.endswith("mount: EPERM; set spec.workspaces.mode to Auto or Plain")


def learned(*nodes: str, cluster: int = 3) -> Memory:
    """Return what memory holds after Overlay trials failed on these nodes, one after the other."""
    memory = Memory()
    others = [node(f"n{index}") for index in range(1, cluster + 1)]
    for name in nodes:
        failed = pod(ended(3, message="mount: EPERM"), node_name=name)
        for action in look(sandbox(), *others, failed, memory=memory).actions:
            assert isinstance(action, Remember)
            memory.learn(action, NOW.timestamp())
    return memory


@pytest.mark.parametrize(
    ("failed", "cluster", "mode"), [(("n1", "n1"), 3, "Overlay"), (("n1", "n2"), 3, "Plain"), (("n1",), 1, "Plain")]
)
def test_one_bad_node_of_several_does_not_take_overlay_from_a_job(
    failed: tuple[str, ...], cluster: int, mode: str
) -> None:
    where = world(node(), memory=learned(*failed, cluster=cluster))
    made = plan(observe(where, sandbox())).actions[-1]
    assert isinstance(made, Create)
    assert ("hostUsers" in made.body["spec"]) == (mode == "Overlay")


@pytest.mark.parametrize("state", [None, waiting("ContainerCreating")])
def test_pod_is_made_again_plain_when_its_node_offers_no_user_namespaces(state: Json | None) -> None:
    nodes, stuck = (node("n1", user_namespaces=False), node("n2")), pod(state)
    first = look(sandbox(), *nodes, stuck)
    assert first.actions == (), "what one node lacks is no reason against Overlay on others"
    told = after(sandbox(), *nodes, stuck)
    words = "node n1 offers no user namespaces for its default runtime"
    assert conditions(told)["Overlay"] == ("False", "NodesLackUserNamespaces", words)
    assert look(told, *nodes, stuck).actions == (Delete(POD, "uid-pod-s", grace_seconds=0),)
    create = look(told, *nodes).actions[-1]
    assert isinstance(create, Create)
    assert "hostUsers" not in create.body["spec"]
    assert create.body["metadata"]["annotations"]["rollout.dev/overlay"] == f"NodesLackUserNamespaces: {words}"


def test_running_overlay_pod_is_kept_when_its_node_is_labelled_later() -> None:
    labelled = node(labels={"userns.rollout.dev/default": "broken"})
    assert look(ready(), labelled, pod(RUNNING, **IP), seconds=9) == Plan()


def test_explicit_overlay_ends_as_evicted_without_user_namespaces() -> None:
    done = after(sandbox(workspaces={"mode": "Overlay"}), node(user_namespaces=False), node("n2"), pod())
    held, reason, message = conditions(done)["Finished"]
    assert (held, reason) == ("True", "Evicted")
    assert message.startswith("node n1 offers no user namespaces")


def test_a_volume_that_cannot_be_executed_gives_a_pod_with_a_copy() -> None:
    memory = Memory()
    denied = pod(ended(128, "StartError", "permission denied"))
    denied["spec"]["volumes"] = [{"name": "rollout-executor", "image": {}}]
    first = look(sandbox(), node(), denied, memory=memory)
    remember, delete = first.actions
    assert isinstance(remember, Remember)
    assert delete == Delete(POD, "uid-pod-s", grace_seconds=0)
    memory.learn(remember, NOW.timestamp())
    create = look(sandbox(), node(), memory=memory).actions[-1]
    assert isinstance(create, Create)
    assert create.body["spec"]["initContainers"][0]["name"] == "executor"
    assert create.body["spec"]["hostUsers"] is False


def test_an_invalid_sandbox_is_finished_before_anything_is_made() -> None:
    asked = sandbox(podTemplate={"spec": {"hostNetwork": True}})
    planned = look(asked, node())
    assert planned.actions == ()
    held, reason, message = conditions(after(asked, node()))["Finished"]
    assert (held, reason) == ("True", "Invalid")
    assert message.startswith("spec.podTemplate.spec.hostNetwork: refused: ")


def test_invalid_sandbox_created_by_hand_is_kept_with_its_reason() -> None:
    asked = after(sandbox(podTemplate={"spec": {"hostNetwork": True}}), node())
    assert look(asked, node(), seconds=86_400) == Plan()


def test_deleted_objects_are_left_to_garbage_collection() -> None:
    asked = sandbox()
    asked["metadata"]["deletionTimestamp"] = "2026-05-04T12:00:00Z"
    assert look(asked, node()) == Plan()
    assert look(sandbox(job="gone"), node(), rollout_job("other")) == Plan()
