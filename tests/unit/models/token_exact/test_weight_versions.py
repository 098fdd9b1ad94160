"""The server's report about the weights of its tokens gives the version of each token, without guesses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.token_exact.weight_versions import UNLABELLED, completed, extended, reported_spans
from rollout_api.records import PolicySpan

parts = st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["7", "8", UNLABELLED])), max_size=5)


def said(told: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return the spans in vLLM's format."""
    ranges, place = [], 0
    for tokens, version in told:
        ranges.append({"version": version, "start": place, "end": place + tokens})
        place += tokens
    return ranges


def versions(spans: list[PolicySpan]) -> list[str | None]:
    return [span.version for span in spans for _ in range(span.tokens)]


@given(parts)
def test_every_token_has_the_servers_version(told: list[tuple[int, str]]) -> None:
    expected = [version for tokens, version in told for _ in range(tokens)]
    if set(expected) <= {UNLABELLED}:
        expected = []
    assert versions(reported_spans(said(told), sum(tokens for tokens, _ in told))) == expected


@given(parts, parts, st.integers(0, 9))
def test_tokens_of_a_broken_stream_without_a_version_have_none(
    first: list[tuple[int, str]], second: list[tuple[int, str]], lost: int
) -> None:
    known, more = (reported_spans(said(told), sum(tokens for tokens, _ in told)) for told in (first, second))
    before = sum(span.tokens for span in known) + lost
    whole = versions(extended(known, before, more))
    if known or more:
        assert whole == [*versions(known), *[None] * lost, *versions(more)]
    else:
        assert whole == [], "a server that says nothing of versions leaves every token as it was sampled"


@given(st.lists(st.tuples(st.sampled_from(["7", None]), st.sampled_from(["7", "8", "loading-8", "asleep-8", None]))))
def test_unknown_versions_are_completed_by_reported_numbers_alone(tokens: list[tuple[str | None, str | None]]) -> None:
    known, reported = ([PolicySpan(tokens=1, version=pair[index]) for pair in tokens] for index in (0, 1))
    expected = [said if mine is None and said in ("7", "8") else mine for mine, said in tokens]
    assert versions(completed(known, reported)) == expected
    assert completed(known, []) == known


@pytest.mark.parametrize(
    "wrong",
    [
        [{"version": "7", "start": 0, "end": 3}],
        [{"version": "7", "start": 1, "end": 4}],
        [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 3, "end": 4}],
        [{"version": 7, "start": 0, "end": 4}],
        [{"start": 0, "end": 4}],
        {"version": "7"},
        "7",
    ],
)
def test_ranges_that_do_not_fit_the_answer_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected ranges"):
        reported_spans(wrong, 4)
