import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.scheduling.completion_rules import (
    NewestPolicy,
    PolicyLag,
    StalePolicy,
    numbers,
    stale_message,
    versions_of,
)
from rollout_api.records import PolicySpan, ResponseRecord

versions = st.none() | st.integers(0, 50)


@given(versions, versions, versions)
def test_a_rollout_is_stale_exactly_beyond_the_lag_that_is_allowed(
    first: int | None, newest: int | None, lag: int | None
) -> None:
    known = first is not None and newest is not None and lag is not None
    assert (stale_message(first, newest, lag) is not None) == (known and newest > first + lag)  # type: ignore[operator]


def test_the_message_names_the_versions_and_the_field() -> None:
    message = stale_message(3, 9, 4)
    assert message is not None
    assert "policy 3" in message
    assert "newest is 9" in message
    assert "model.maxPolicyLag 4" in message


def test_unknown_and_non_numeric_versions_do_not_make_a_rollout_stale() -> None:
    spans = [PolicySpan(tokens=1, version=version) for version in (None, "step-7", "12", "13")]
    answer = ResponseRecord(turn=0, time=0, seconds=0, message={}, finish_reason="stop", policy_spans=spans)
    assert versions_of([answer]) == numbers(spans) == [12, 13]


@given(st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=6))
def test_the_newest_policy_is_the_largest_that_was_seen(replies: list[list[int]]) -> None:
    newest = NewestPolicy()
    for reply in replies:
        newest.see(reply)
    assert newest.version == max((version for reply in replies for version in reply), default=None)


def test_rollout_is_stale_by_its_own_first_token_and_the_newest_policy() -> None:
    newest = NewestPolicy()
    ours, others = PolicyLag(newest, 1), PolicyLag(newest)
    for version in ("3", "4"):
        ours.see([PolicySpan(tokens=1, version=version)])
        ours.refuse_if_stale()
    others.see([PolicySpan(tokens=1, version="9")])
    others.refuse_if_stale()
    with pytest.raises(StalePolicy, match="policy 3 and the newest is 9"):
        ours.refuse_if_stale()
