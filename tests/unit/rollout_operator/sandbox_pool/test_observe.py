"""What a pool's plan is based on: whose demand counts, and whose workspaces may stay."""

from typing import Any

import pytest

from rollout_operator.actions import Remember
from rollout_operator.conditions import timestamp
from rollout_operator.sandbox_pool import observe
from rollout_operator.sandbox_pool.observe import Observed, request_fact, use_fact
from rollout_operator.world import Memory
from tests.unit.rollout_operator.sandbox.objects import NAMESPACE, NOW, world

POOL: dict[str, Any] = {
    "kind": "SandboxPool",
    "metadata": {"name": "warm", "namespace": NAMESPACE, "uid": "uid-warm"},
    "spec": {"sandbox": {"image": "debian"}},
}


def owned(kind: str, name: str, owner: dict[str, Any], namespace: str = NAMESPACE, **body: Any) -> dict[str, Any]:
    reference = {
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "ownerReferences": [reference]}
    return {"kind": kind, "metadata": metadata, "spec": {}, "status": {}, **body}


def job(uid: str, *ended: str, wanted: int = 0, runner: str | None = None) -> list[dict[str, Any]]:
    """Return a RolloutJob with its runners' Job, pod and report."""
    conditions = [{"type": kind, "status": "True", "reason": "Because"} for kind in ended]
    body: dict[str, Any] = {
        "kind": "RolloutJob",
        "metadata": {"name": uid, "namespace": NAMESPACE, "uid": uid},
        "spec": {},
        "status": {"conditions": conditions},
    }
    batch = owned("Job", f"{uid}-runner", body, spec={})
    shard = owned("RolloutShard", f"{uid}-0", body, status={"index": 0, "pools": {"warm": wanted, "other": 9}})
    pods = [owned("Pod", f"{uid}-pod", batch, status={"phase": runner})] if runner else []
    return [body, batch, shard, *pods]


def seen(*objects: dict[str, Any]) -> Observed:
    return observe(world(*objects), POOL)


def test_the_demand_of_running_jobs_counts() -> None:
    found = seen(*job("aaaaaaaa-1", wanted=3), *job("bbbbbbbb-1", wanted=4))
    assert (found.wanted, found.jobs) == (7, frozenset({"aaaaaaaa-", "bbbbbbbb-"}))


@pytest.mark.parametrize("ended", ["Succeeded", "Failed", "Suspended"])
def test_a_job_that_has_ended_wants_nothing_once_its_runners_are_gone(ended: str) -> None:
    assert (seen(*job("aaaaaaaa-1", ended, wanted=3)).wanted, seen(*job("aaaaaaaa-1", ended)).jobs) == (0, frozenset())
    assert seen(*job("aaaaaaaa-1", ended, wanted=3, runner="Failed")).wanted == 0
    draining = seen(*job("aaaaaaaa-1", ended, wanted=3, runner="Running"))
    assert (draining.wanted, draining.jobs) == (3, frozenset({"aaaaaaaa-"}))


def test_invalid_specs_are_told() -> None:
    broken = {**POOL, "spec": {"sandbox": {"image": "debian"}, "recycle": {"ageSeconds": 90_000}}}
    found = observe(world(), broken)
    assert isinstance(found.spec, list)
    assert found.spec[0].startswith("spec.recycle.ageSeconds: 90000 is not below")


def test_what_the_plan_remembers_of_memory_is_observed() -> None:
    sandbox = owned("Sandbox", "warm-1", POOL)
    sandbox["metadata"]["creationTimestamp"] = timestamp(NOW)
    before = seen(sandbox)
    assert (before.keeps_request, before.members[0].is_counted) == (False, False)
    memory = Memory()
    for fact in (request_fact("uid-warm"), use_fact("uid-warm-1")):
        memory.learn(Remember(fact, "", 60), NOW.timestamp())
    after = observe(world(sandbox, memory=memory), POOL)
    assert (after.keeps_request, after.members[0].is_counted) == (True, True)


def test_full_quota_is_the_problem_of_a_sandbox_that_it_keeps_from_starting() -> None:
    refused = {"type": "Reconciled", "status": "False", "reason": "Forbidden", "message": "exceeded quota: q"}
    sandbox = owned("Sandbox", "warm-1", POOL, status={"conditions": [refused]})
    sandbox["metadata"]["creationTimestamp"] = timestamp(NOW)
    assert seen(sandbox).members[0].problem == ("Forbidden", "exceeded quota: q")
