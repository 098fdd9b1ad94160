"""A Sandbox's state is observed only from objects that belong to it."""

from datetime import timedelta

from rollout_api.sandbox import Security
from rollout_operator.actions import Ref, Remember
from rollout_operator.sandbox import observe
from rollout_operator.sandbox.observe import exec_failed, overlay_refused, trial_failed_on, trials_fail
from rollout_operator.world import Memory
from tests.unit.rollout_operator.sandbox.objects import KEY, NOW, RUNNING, node, pod, rollout_job, sandbox, world


def test_the_pod_of_an_earlier_sandbox_of_the_same_name_is_not_its_pod() -> None:
    old = pod(RUNNING)
    old["metadata"]["ownerReferences"][0]["uid"] = "uid-earlier"
    assert observe(world(old), sandbox()).pod is None
    assert observe(world(pod(RUNNING)), sandbox()).pod is not None


def test_template_and_key_are_from_the_owning_job() -> None:
    seen = observe(world(rollout_job(template={"metadata": {}}, security="Privileged")), sandbox(job="j"))
    assert seen.owner is not None
    assert (seen.owner.pod_template, seen.owner.security) == ({"metadata": {}}, Security.PRIVILEGED)
    assert (seen.key, seen.key_secret, seen.owner_uid) == (KEY, Ref("Secret", "lab", "j-runner"), "uid-j")


def test_a_job_of_the_same_name_made_later_does_not_own_it() -> None:
    later = rollout_job()
    later["metadata"]["uid"] = "uid-later"
    assert observe(world(later), sandbox(job="j")).is_deleted
    assert observe(world(), sandbox(job="j")).is_deleted


def test_a_job_that_is_being_deleted_gets_no_new_pods() -> None:
    going = rollout_job()
    going["metadata"]["deletionTimestamp"] = "2026-05-04T12:00:00Z"
    assert observe(world(going), sandbox(job="j")).is_deleted


def test_sandbox_created_by_hand_has_its_own_key() -> None:
    seen = observe(world(), sandbox())
    assert (seen.owner, seen.key_secret, seen.owner_uid) == (None, Ref("Secret", "lab", "s-sandbox"), "uid-s")


def test_facts_of_a_namespace_expire() -> None:
    memory = Memory()
    image = ("lab", "busybox:1")
    for fact in (trial_failed_on(*image), trials_fail(*image), exec_failed("lab"), overlay_refused("lab")):
        memory.learn(Remember(fact, "words", 60), NOW.timestamp())
    seen = observe(world(memory=memory), sandbox())
    assert (seen.trial_failed_on, seen.trial_failure, seen.exec_failure, seen.overlay_refusal) == ("words",) * 4
    later = observe(world(memory=memory, now=NOW + timedelta(minutes=2)), sandbox())
    assert (later.trial_failed_on, later.trial_failure, later.exec_failure, later.overlay_refusal) == (None,) * 4


def test_failures_of_another_namespace_or_image_do_not_count() -> None:
    memory = Memory()
    for fact in (trials_fail("other", "busybox:1"), trials_fail("lab", "broken:1"), exec_failed("other")):
        memory.learn(Remember(fact, "words", 60), NOW.timestamp())
    seen = observe(world(node("n1"), memory=memory), sandbox())
    assert (seen.trial_failure, seen.exec_failure) == (None, None)


def test_unreadable_status_of_another_version_is_replaced() -> None:
    strange = {**sandbox(), "status": {"phase": "Running"}}
    assert observe(world(), strange).status.conditions == []
