"""Reports for `kubectl get rolloutjob`: every sealed rollout once, whichever process sealed it, in a few bytes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.events import AttemptFailed, Event, JobStarted, RolloutSealed, RolloutStarted
from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.runner.report import INTERVALS_CHARACTERS, ShardTally, intervals, previous_report, report_interval
from rollout_api.records import Outcome, Result
from rollout_api.rollout_job import RunnerReport, RunnerState


def result(
    index: int, size: int, outcome: Outcome = Outcome.COMPLETED, reward: float | None = None, token_forks: int = 0
) -> Result:
    group, member = divmod(index, size)
    return Result(
        index=index,
        group=group,
        member=member,
        task=f"task-{group}",
        mode="Train",
        seed=0,
        outcome=outcome,
        reward=reward,
        token_forks=token_forks,
        attempt=0,
        ended=0.0,
    )


def started(total: int | None, *results: Result) -> JobStarted:
    return JobStarted(
        "job", "job-1", "s3://b/job-1", total, len(results), resumed=bool(results), results=tuple(results)
    )


def expanded(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@given(st.sets(st.integers(0, 500), max_size=300))
def test_intervals_name_exactly_the_sealed_rollouts(positions: set[int]) -> None:
    text = intervals(positions)
    assert text is not None
    assert expanded(text) == positions
    assert len(text.split(",")) == len([p for p in positions if p - 1 not in positions]) or not positions


@given(st.integers(0, 1 << 20), st.integers(1, 4000))
def test_intervals_never_outgrow_a_report(first: int, count: int) -> None:
    text = intervals(range(first, first + 2 * count, 2))
    assert text is None or (len(text) <= INTERVALS_CHARACTERS and len(expanded(text)) == count)
    if count <= INTERVALS_CHARACTERS // 9:
        assert text is not None, "left out only where it must be"


@given(st.integers(1, 16), st.integers(1, 8), st.integers(0, 40))
def test_each_shard_numbers_its_own_rollouts_without_gaps(count: int, size: int, groups: int) -> None:
    """Otherwise a whole shard could not be reported as one interval."""
    for index in range(count):
        shard = Shard(index, count)
        tally = ShardTally(shard, size)
        mine = [g * size + m for g in range(groups) if shard.has(g) for m in range(size)]
        assert [tally.position(i) for i in mine] == list(range(len(mine)))


@given(st.data())
def test_counts_add_up_with_earlier_and_repeated_seals(data: st.DataObject) -> None:
    size, groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    total = size * groups
    outcomes = data.draw(st.lists(st.sampled_from(list(Outcome)), min_size=total, max_size=total))
    results = [
        result(i, size, outcome, data.draw(st.floats(-1, 1)) if outcome is Outcome.COMPLETED else None, i)
        for i, outcome in enumerate(outcomes)
    ]
    earlier = data.draw(st.integers(0, total))
    later = data.draw(st.integers(earlier, total))
    events: list[Event] = [RolloutSealed(r) for r in results[:later]]
    random.Random(data.draw(st.integers())).shuffle(events)
    tally = ShardTally(Shard(), size)
    tally.observe(started(total, *results[:earlier]))
    for event in events:
        tally.observe(event)
    report = tally.report(RunnerState.RUNNING)
    sealed = results[:later]
    assert report.sealed == later == sum(report.outcomes.values())
    assert report.outcomes == {o: n for o in Outcome if (n := sum(r.outcome is o for r in sealed))}
    rewards = [r.reward for r in sealed if r.reward is not None]
    assert report.rewarded == len(rewards)
    assert report.token_forks == sum(range(later))
    assert report.reward_sum == pytest.approx(sum(rewards), abs=1e-9)
    assert expanded(report.sealed_indexes or "") == set(range(later))
    assert report.total == total
    assert RunnerReport.model_validate(report.wire()) == report, "an API server takes it"


def test_running_counts_attempts_under_way() -> None:
    tally = ShardTally(Shard(1, 2), 2)
    tally.observe(started(4))
    assert tally.groups_waiting == 2
    for index in (2, 3, 6):
        tally.observe(RolloutStarted(index, "task", index % 2, 0))
    tally.observe(RolloutStarted(2, "task", 0, 0))
    assert (tally.report(RunnerState.RUNNING).running, tally.groups_waiting) == (3, 0)
    tally.observe(AttemptFailed(3, 0, "NodeLost", "gone", retry=True))
    tally.observe(RolloutSealed(result(2, 2)))
    assert tally.report(RunnerState.DRAINING).running == 1


def test_a_stream_has_no_total_until_it_is_closed() -> None:
    tally = ShardTally(Shard(), 2)
    tally.observe(started(None))
    assert tally.report(RunnerState.RUNNING).total is None
    assert tally.groups_waiting == 0


def test_a_long_message_is_cut_and_not_refused() -> None:
    assert len(ShardTally(Shard(), 1).report(RunnerState.ABORTED, "x" * 10_000).message) == 4096


def test_reports_of_many_runners_are_spread_over_time() -> None:
    assert [report_interval(runners) for runners in (1, 10, 40, 256)] == [1.0, 1.0, 4.0, 25.6]


def test_runner_continues_the_report_of_its_predecessor() -> None:
    found = previous_report({"status": {"index": 2, "sealed": 5}})
    assert found is not None
    assert found.sealed == 5
    assert previous_report({}) is None


def test_report_says_why_rollouts_are_lost() -> None:
    tally = ShardTally(Shard(0, 1), 1)
    tally.observe(started(3))
    assert tally.trouble == ""
    tally.observe(AttemptFailed(0, 0, "SetupFailed", "no compiler", retry=True))
    assert tally.trouble == "an attempt was lost to infrastructure: SetupFailed: no compiler"
    tally.observe(RolloutSealed(result(0, 1, reward=1.0)))
    assert tally.trouble == "", "another one followed, and went well"
    lost = result(1, 1, Outcome.INFRA_FAILED).model_copy(update={"reason": "NodeLost", "message": "power"})
    tally.observe(RolloutSealed(lost))
    tally.observe(RolloutSealed(result(2, 1, reward=1.0)))
    assert tally.trouble == "1 rollout lost to infrastructure, the last one: NodeLost: power"
