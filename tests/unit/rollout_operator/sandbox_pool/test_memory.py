"""What new sandboxes of a pool request of memory, if the request follows measured use."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rollout_api.cluster import MEASURED_ANNOTATION
from rollout_api.measured_memory import KEPT_SECONDS, Measured
from rollout_api.sandbox_pool import PoolMemory, SandboxPoolSpec, SandboxPoolStatus
from rollout_operator.actions import Plan, Remember
from rollout_operator.executor_contact import ExecutorReport
from rollout_operator.sandbox_pool import plan
from rollout_operator.sandbox_pool.observe import Member
from rollout_operator.sandbox_pool.plan import digest
from tests.unit.rollout_operator.sandbox_pool.test_plan import NOW, created, drained, member, pool, seen

MI = 1 << 20


def measured_pool(**spec: Any) -> SandboxPoolSpec:
    resources = {"memory": "1Gi", "memoryRequest": "Measured"}
    return pool(sandbox={"image": "debian", "perSandbox": 4, "resources": resources}, **spec)


SPEC = measured_pool(maxReplicas=9)


def used(mean: int, seconds: float = 1000.0) -> Measured:
    return Measured(seconds=seconds, byte_seconds=mean * seconds, square_seconds=mean**2 * seconds)


def user(name: str, mean: int, seconds: float = 1000.0, **changes: Any) -> Member:
    """Return a sandbox of half an hour, whose workspaces have used so much."""
    report = ExecutorReport(NOW, measured=used(mean, seconds), **changes.pop("report", {}))
    fields = {"made_from": digest(SPEC, "e:1"), "created": NOW - timedelta(minutes=30), "report": report}
    return member(name, None, **{**fields, **changes})


def planned(
    members: Sequence[Member], spec: SandboxPoolSpec = SPEC, memory: PoolMemory | None = None, **how: Any
) -> Plan:
    return plan(seen(members, spec, status=SandboxPoolStatus(memory=memory), wanted=99, **how))


def requests(found: Plan) -> set[str]:
    return {body["spec"]["resources"]["memoryRequest"] for body in created(found)}


def facts(found: Plan) -> list[tuple[str, str]]:
    return [action.fact for action in found.actions if isinstance(action, Remember) and action.seconds >= 60]  # type: ignore[misc]


def memory_of(found: Plan) -> PoolMemory:
    assert found.status is not None
    return PoolMemory.model_validate(found.status["memory"])


def test_new_sandboxes_request_the_limit_until_something_is_known() -> None:
    found = planned([user("a", 80 * MI, seconds=100)])
    assert requests(found) == {"Measured"}
    assert MEASURED_ANNOTATION not in created(found)[0]["metadata"]["annotations"]
    assert memory_of(found) == PoolMemory()


def test_new_sandboxes_request_what_workspaces_have_used_and_old_ones_stay() -> None:
    members = [user("a", 60 * MI), user("b", 100 * MI)]
    found = planned(members)
    assert requests(found) == {"186Mi"}  # (80 + 2.33 × 20 / 2) × 1.8
    assert created(found)[0]["metadata"]["annotations"][MEASURED_ANNOTATION] == "Measured"
    assert memory_of(found) == PoolMemory(request="186Mi"), "only ended sandboxes are kept in the status"
    assert not drained(found)


def test_other_pools_do_not_measure() -> None:
    found = plan(seen([user("a", 60 * MI)], pool(), status=SandboxPoolStatus(memory=PoolMemory(request="1Mi"))))
    assert found.status is not None
    assert "memory" not in found.status


@pytest.mark.parametrize(
    ("before", "after"), [("137Mi", "137Mi"), ("155Mi", "155Mi"), ("130Mi", "144Mi"), ("2Gi", "144Mi")]
)
def test_request_changes_by_a_tenth_or_more(before: str, after: str) -> None:
    found = planned([user("a", 80 * MI)], memory=PoolMemory(request=before))
    assert memory_of(found).request == after
    assert facts(found) == ([] if before == after else [("pool-request-changed", "uid-warm")])


def test_request_changes_at_most_once_a_minute() -> None:
    found = planned([user("a", 80 * MI)], memory=PoolMemory(request="20Mi"), keeps_request=True)
    assert requests(found) == {"20Mi"}


def test_request_of_a_restarted_operator_waits_for_all_executors() -> None:
    kept = PoolMemory(**dict(used(20 * MI)), request="400Mi")
    assert requests(planned([user("a", 300 * MI), member("b", None)], memory=kept)) == {"400Mi"}
    silent = member("b", 0, report=ExecutorReport(NOW, answered=False))
    assert requests(planned([user("a", 20 * MI), silent], memory=kept)) == {"36Mi"}


@pytest.mark.parametrize(
    "end", [{"has_ended": True, "is_ready": False}, {"is_draining": True, "report": {"draining": True}}]
)
def test_use_of_an_ended_sandbox_is_kept_once(end: dict[str, Any]) -> None:
    gone = user("b", 100 * MI, **end)
    first = planned([user("a", 60 * MI), gone], memory=PoolMemory(**dict(used(40 * MI)), request="130Mi"))
    assert memory_of(first).seconds == 2000
    assert memory_of(first).byte_seconds == 140_000 * MI
    assert ("pool-use-counted", "uid-b") in facts(first)
    second = planned([user("a", 60 * MI), replace(gone, is_counted=True)], memory=memory_of(first))
    assert memory_of(second) == memory_of(first)
    assert planned([user("a", 60 * MI)], memory=memory_of(second)).status is not None


def test_a_sandbox_that_works_is_not_kept_in_the_status() -> None:
    busy = user("b", 100 * MI, is_draining=True, report={"draining": True, "live": 1})
    assert memory_of(planned([busy])).seconds == 0


def test_old_use_fades() -> None:
    old = PoolMemory(**dict(used(400 * MI, KEPT_SECONDS)), request="500Mi")
    gone = user("b", 80 * MI, KEPT_SECONDS, has_ended=True, created=NOW - timedelta(days=9))
    kept = memory_of(planned([gone], memory=old))
    assert kept.seconds == pytest.approx(KEPT_SECONDS)
    assert kept.byte_seconds == pytest.approx(KEPT_SECONDS * 240 * MI)


def test_forged_reports_count_for_no_more_than_their_sandbox() -> None:
    honest = [user(name, 80 * MI, 7000) for name in "abc"]
    forged = user("d", 1 << 20, 1e15)
    found = planned([*honest, forged])
    # Of 28,200 s, 7,200 are those of the forged report.
    assert requests(found) == {"180Mi"}
    impossible = user("d", 1 << 40)
    assert requests(planned([*honest, impossible])) == {"144Mi"}
    early = user("d", 1 << 20, 1e15, created=NOW + timedelta(minutes=5))
    assert requests(planned([*honest, early])) == {"144Mi"}
