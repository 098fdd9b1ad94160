from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.attempt.assignment import Budget
from rollout_api.records import StopReason

tokens = st.none() | st.integers(-10, 1000)
budgets = st.builds(Budget, st.integers(-3, 50), tokens, st.floats(-10, 1000))


@given(budgets, st.none() | st.integers(0, 100), tokens, st.none() | st.floats(0, 2000))
def test_budget_of_a_child_ends_no_later_than_its_parents(
    parent: Budget, turns: int | None, child_tokens: int | None, seconds: float | None
) -> None:
    child = parent.child(turns=turns, tokens=child_tokens, seconds=seconds)
    assert child.turns <= parent.turns
    assert child.seconds <= parent.seconds
    if parent.tokens is not None:
        assert child.tokens is not None
        assert child.tokens <= parent.tokens


@given(budgets, st.integers(0, 5), st.integers(0, 100), st.floats(0, 10))
def test_spending_never_increases_a_budget(budget: Budget, turns: int, spent: int, seconds: float) -> None:
    after = budget.after(turns=turns, tokens=spent, seconds=seconds)
    assert after.turns <= budget.turns
    assert after.seconds <= budget.seconds
    if budget.exhausted() is not None:
        assert after.exhausted() is not None


def test_exhausted_budget_is_named() -> None:
    assert Budget(0, 5, 5).exhausted() is StopReason.MAX_TURNS
    assert Budget(1, 0, 5).exhausted() is StopReason.TOKEN_BUDGET
    assert Budget(1, None, 0).exhausted() is StopReason.AGENT_TIMEOUT
    assert Budget(1, None, 1).exhausted() is None
