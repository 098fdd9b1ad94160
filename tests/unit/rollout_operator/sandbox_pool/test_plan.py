"""How many sandboxes a pool has, which are replaced, and that none with workspaces is deleted."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.cluster import POOL_SPEC_ANNOTATION, executor_token
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.sandbox_pool import SandboxPoolSpec, SandboxPoolStatus
from rollout_operator.actions import AskExecutors, Create, Delete, EnsureKey, Patch, Plan, Ref
from rollout_operator.executor_contact import ExecutorReport
from rollout_operator.sandbox_pool import plan
from rollout_operator.sandbox_pool.observe import Member, Observed
from rollout_operator.sandbox_pool.plan import digest

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
CONFIG = OperatorConfig.model_validate({"images": {"runtime": "r:1", "executor": "e:1"}, "lease": {"namespace": "ops"}})
KEY = "5a" * 32


def pool(**spec: Any) -> SandboxPoolSpec:
    return SandboxPoolSpec.model_validate({"sandbox": {"image": "debian", "perSandbox": 4}, **spec})


MADE_FROM = digest(pool(), "e:1")


def member(name: str, live: int | None = 0, **changes: Any) -> Member:
    """Return a ready sandbox; `live`: its workspaces, None if its executor was not asked yet."""
    report = None if live is None else ExecutorReport(NOW, live=live)
    one = Member(name, f"uid-{name}", MADE_FROM, NOW, True, False, False, "10.0.0.1", None, report)
    return replace(one, **changes)


def seen(members: Sequence[Member] = (), spec: SandboxPoolSpec | None = None, **changes: Any) -> Observed:
    start = Observed(
        ref=Ref("SandboxPool", "lab", "warm"),
        uid="uid-warm",
        generation=1,
        is_deleted=False,
        spec=spec or pool(),
        status=SandboxPoolStatus(),
        members=tuple(members),
        key=KEY,
        wanted=0,
        jobs=frozenset(),
        counts_written=False,
        keeps_request=False,
        config=CONFIG,
        now=NOW,
    )
    return replace(start, **changes)


def created(planned: Plan) -> list[dict[str, Any]]:
    return [action.body for action in planned.actions if isinstance(action, Create)]  # type: ignore[misc]


def drained(planned: Plan) -> list[str]:
    return [action.ref.name for action in planned.actions if isinstance(action, Patch)]


def deleted(planned: Plan) -> list[str]:
    return [action.ref.name for action in planned.actions if isinstance(action, Delete)]


def asked(planned: Plan) -> dict[str, Any]:
    return {
        request.name: request
        for action in planned.actions
        if isinstance(action, AskExecutors)
        for request in action.requests
    }


def test_the_key_comes_first() -> None:
    (action,) = plan(seen(key=None)).actions
    assert isinstance(action, EnsureKey)
    assert action.body["metadata"]["name"] == "warm-pool"
    assert action.remedy is None
    (action,) = plan(seen([member("a")], key=None)).actions
    assert isinstance(action, EnsureKey)
    assert "Delete the pool's Sandboxes" in (action.remedy or ""), "they know only the old key"


def test_missing_sandboxes_are_created_with_different_names_and_the_pools_spec() -> None:
    bodies = created(plan(seen(spec=pool(replicas=3))))
    assert len({body["metadata"]["name"] for body in bodies}) == 3
    for body in bodies:
        assert body["spec"]["workspaces"] == {"mode": "Overlay", "perSandbox": 4}
        assert body["metadata"]["annotations"][POOL_SPEC_ANNOTATION] == MADE_FROM
        assert body["metadata"]["ownerReferences"][0]["kind"] == "SandboxPool"


@pytest.mark.parametrize(("wanted", "sandboxes"), [(0, 1), (4, 1), (5, 2), (19, 5), (400, 6)])
def test_demand_decides_between_replicas_and_the_most(wanted: int, sandboxes: int) -> None:
    assert len(created(plan(seen(spec=pool(maxReplicas=6), wanted=wanted)))) == sandboxes
    assert len(created(plan(seen(wanted=wanted)))) == 1, "without maxReplicas their number is fixed"


def test_surplus_is_kept_for_its_time_and_then_drained_the_emptiest_first() -> None:
    spec = pool(maxReplicas=6, idleSeconds=60)
    members = [member("a", 3), member("b", 1), member("c", 2)]
    status = SandboxPoolStatus(desired_replicas=3)
    first = plan(seen(members, spec, status=status, wanted=6))
    assert not drained(first)
    assert first.status is not None
    assert first.status["desiredReplicas"] == 3
    later = SandboxPoolStatus.model_validate(first.status)
    assert not drained(plan(seen(members, spec, status=later, wanted=6, now=NOW + timedelta(seconds=59))))
    last = plan(seen(members, spec, status=later, wanted=6, now=NOW + timedelta(seconds=60)))
    assert drained(last) == ["b"]
    again = plan(seen(members, spec, status=later, wanted=9, now=NOW + timedelta(seconds=60)))
    assert not drained(again)
    assert again.status is not None
    assert "surplusSince" not in again.status


def test_a_draining_sandbox_is_deleted_only_when_its_executor_says_that_it_is_empty() -> None:
    def gone(**changes: Any) -> list[str]:
        return deleted(plan(seen([member("a"), member("b", is_draining=True, **changes)])))

    assert gone(report=ExecutorReport(NOW, draining=True)) == ["b"]
    assert not gone(report=ExecutorReport(NOW, draining=True, live=1))
    assert not gone(report=ExecutorReport(NOW, draining=True, rollouts=1)), "its checkpoint may be forked"
    assert not gone(report=ExecutorReport(NOW)), "it may take a workspace until it refuses them"
    assert not gone(report=ExecutorReport(NOW, draining=True, answered=False))
    assert not gone(report=None)
    assert gone(report=None, is_ready=False, address="") == ["b"], "it was never ready"
    assert not gone(report=None, is_ready=False), "its node may come back"


@pytest.mark.parametrize(
    ("changes", "is_replaced"),
    [
        ({}, False),
        ({"made_from": "earlier"}, True),
        ({"created": NOW - timedelta(hours=12)}, True),
        ({"report": ExecutorReport(NOW, uses=10_000)}, True),
        ({"report": ExecutorReport(NOW, uses=9_999)}, False),
        ({"report": ExecutorReport(NOW, disk_bytes=20 << 30)}, True),
        ({"report": ExecutorReport(NOW, disk_bytes=19 << 30)}, False),
    ],
)
def test_sandboxes_are_replaced_by_spec_age_uses_and_disk(changes: dict[str, Any], is_replaced: bool) -> None:
    planned = plan(seen([member("a", **changes)]))
    assert (drained(planned), len(created(planned))) == ((["a"], 1) if is_replaced else ([], 0))


def test_a_quarter_is_replaced_at_once() -> None:
    old = [member(f"m{number}", made_from="earlier") for number in range(8)]
    planned = plan(seen(old, pool(replicas=8)))
    assert (len(drained(planned)), len(created(planned))) == (2, 2)
    half = [replace(one, is_draining=number < 2) for number, one in enumerate(old)]
    assert not drained(plan(seen([*half, member("new1"), member("new2")], pool(replicas=8))))


def test_workspaces_of_jobs_that_have_ended_are_destroyed() -> None:
    report = ExecutorReport(NOW - timedelta(seconds=9), left_over=frozenset({"11111111-", "22222222-"}))
    (request,) = asked(plan(seen([member("a", report=report)], jobs=frozenset({"22222222-"})))).values()
    assert request.forget == {"11111111-"}
    assert request.token == executor_token(KEY, "a", "uid-a")
    assert KEY not in repr(request)
    assert request.token not in repr(request)


def test_executors_are_asked_at_intervals_and_at_once_when_they_must_drain() -> None:
    def when(**changes: Any) -> bool:
        return "a" in asked(plan(seen([member("a", **changes)])))

    assert when(report=None)
    assert not when(report=ExecutorReport(NOW - timedelta(seconds=4)))
    assert when(report=ExecutorReport(NOW - timedelta(seconds=5)))
    assert when(report=ExecutorReport(NOW), is_draining=True)
    assert not when(report=ExecutorReport(NOW, answered=False), is_draining=True), "it is not asked without a pause"
    assert not when(report=None, is_ready=False)


def test_sandboxes_that_cannot_start_are_not_created_in_a_loop() -> None:
    failed = member(
        "a", None, is_ready=False, has_ended=True, address="", problem=("ImagePullBackOff", "no such image")
    )
    planned = plan(seen([failed]))
    assert not created(planned)
    assert planned.status is not None
    (ready,) = planned.status["conditions"]
    assert (ready["reason"], ready["message"]) == ("ImagePullBackOff", "0 of 1 sandboxes are ready: no such image")
    lost = member("b", has_ended=True, is_ready=False, problem=("NodeLost", "its node is not ready"))
    assert len(created(plan(seen([lost])))) == 1, "one that has served is replaced at once"


def test_counts_are_written_at_intervals_and_everything_else_at_once() -> None:
    status = SandboxPoolStatus.model_validate(plan(seen([member("a", 1)])).status)
    busier = [member("a", 3)]
    assert plan(seen(busier, status=status)).status is not None
    assert plan(seen(busier, status=status, counts_written=True)).status is None
    assert plan(seen([member("a", 3, is_ready=False)], status=status, counts_written=True)).status is not None


def test_a_scaled_down_pool_is_emptied() -> None:
    planned = plan(seen([member("a", 2)], pool(replicas=0), status=SandboxPoolStatus(desired_replicas=1)))
    assert drained(planned) == ["a"]


class Lab:
    """A pool whose plans are carried out, and runners that use its executors as they are allowed to."""

    def __init__(self, spec: SandboxPoolSpec) -> None:
        self.spec, self.now, self.wanted = spec, NOW, 0
        self.members: dict[str, Member] = {}
        self.live: dict[str, int] = {}
        self.refuses: set[str] = set()
        self.status = SandboxPoolStatus()
        self.lost: list[str] = []

    def step(self) -> None:
        planned = plan(
            seen(list(self.members.values()), self.spec, status=self.status, wanted=self.wanted, now=self.now)
        )
        if planned.status is not None:
            self.status = SandboxPoolStatus.model_validate(planned.status)
        for body in created(planned):
            name = body["metadata"]["name"]
            assert name not in self.members
            made_from = body["metadata"]["annotations"][POOL_SPEC_ANNOTATION]
            self.members[name] = member(name, None, made_from=made_from, created=self.now, is_ready=False, address="")
        for name in drained(planned):
            self.members[name] = replace(self.members[name], is_draining=True)
        for request in asked(planned).values():
            if request.drain:
                self.refuses.add(request.name)
            report = ExecutorReport(
                self.now, live=self.live.get(request.name, 0), draining=request.name in self.refuses
            )
            self.members[request.name] = replace(self.members[request.name], report=report)
        for name in deleted(planned):
            self.lost += [name] * self.live.get(name, 0)
            del self.members[name]
        self.now += timedelta(seconds=3)

    def settle(self) -> None:
        for _ in range(60):
            for name in self.members:
                self.start(name)
            self.step()

    def start(self, name: str) -> None:
        self.members[name] = replace(self.members[name], is_ready=True, address="10.0.0.1")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_sandbox_with_workspaces_is_deleted_and_the_pool_reaches_its_size(data: st.DataObject) -> None:
    lab = Lab(pool(maxReplicas=5, idleSeconds=data.draw(st.sampled_from([0, 10]))))
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["claim", "free", "want", "scale", "change", "start", "end", "step", "step"])):
            case "claim" if names := [n for n, one in lab.members.items() if one.is_ready and n not in lab.refuses]:
                name = data.draw(st.sampled_from(sorted(names)))
                lab.live[name] = min(4, lab.live.get(name, 0) + 1)
            case "free" if names := sorted(name for name, count in lab.live.items() if count):
                lab.live[data.draw(st.sampled_from(names))] -= 1
            case "want":
                lab.wanted = data.draw(st.integers(0, 30))
            case "scale":
                lab.spec = lab.spec.model_copy(update={"replicas": data.draw(st.integers(0, 6))})
            case "change":
                image = data.draw(st.sampled_from(["debian", "fedora"]))
                lab.spec = lab.spec.model_copy(update={"sandbox": lab.spec.sandbox.model_copy(update={"image": image})})
            case "start" if lab.members:
                lab.start(data.draw(st.sampled_from(sorted(lab.members))))
            case "end" if lab.members:  # its node or pod is lost
                name = data.draw(st.sampled_from(sorted(lab.members)))
                lab.members.pop(name)
                lab.live.pop(name, None)
            case _:
                lab.step()
    assert not lab.lost
    lab.live.clear()
    lab.settle()
    most = max(lab.spec.replicas, 5)
    expected = min(most, max(lab.spec.replicas, -(-lab.wanted // 4)))
    assert not lab.lost
    assert len(lab.members) == expected
    assert all(one.made_from == digest(lab.spec, "e:1") and not one.is_draining for one in lab.members.values())
    assert lab.status.ready_replicas == lab.status.desired_replicas == expected
