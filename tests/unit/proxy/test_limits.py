"""The limits of a session."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.proxy.limits import Limits, Spent, conversation_bytes, exhausted, tokens_left

COUNTS = st.one_of(st.none(), st.integers(1, 20))


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.integers(0, 25), st.integers(0, 25), st.integers(0, 25), st.floats(0, 25))
def test_session_ends_exactly_when_one_of_its_limits_is_reached(
    requests: int | None,
    turns: int | None,
    tokens: int | None,
    seconds: int | None,
    asked: int,
    answered: int,
    used: int,
    age: float,
) -> None:
    limits = Limits(requests=requests, turns=turns, tokens=tokens, seconds=seconds)
    over = exhausted(limits, Spent(asked, answered, used), age)
    reached = [
        limit is not None and spent >= limit
        for limit, spent in ((requests, asked), (turns, answered), (tokens, used), (seconds, age))
    ]
    assert (over is not None) == any(reached)
    assert over is None or str(over.reason) in over.message


def test_answer_may_use_the_remaining_tokens_and_at_least_one() -> None:
    assert tokens_left(Limits(), Spent(tokens=5)) is None
    assert tokens_left(Limits(tokens=8), Spent(tokens=5)) == 3
    assert tokens_left(Limits(tokens=5), Spent(tokens=9)) == 1


def test_a_conversation_is_counted_with_what_its_values_take_in_memory() -> None:
    assert conversation_bytes([{"role": "user", "content": "hello"}]) == 4 * 64 + len("rolecontent") + len("userhello")
    assert conversation_bytes([[]] * 1000) == 1001 * 64
