from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.scheduling.completion_rules import plan_group
from rollout_api.records import Outcome

sizes = st.integers(1, 8)


@st.composite
def states(draw: st.DrawFn) -> tuple[int, dict[int, Outcome]]:
    size = draw(sizes)
    members = draw(st.sets(st.integers(0, size - 1)))
    return size, {member: draw(st.sampled_from(Outcome)) for member in members}


@given(states(), st.integers(1, 8), st.booleans())
def test_no_member_that_is_needed_or_already_ended_is_ever_cancelled(
    state: tuple[int, dict[int, Outcome]], needed: int, cancel: bool
) -> None:
    plan = plan_group(*state, min_completed=needed, cancel_stragglers=cancel)
    completed = sum(outcome is Outcome.COMPLETED for outcome in state[1].values())
    assert not set(plan.cancel) & set(state[1])
    if plan.cancel:
        assert cancel
        assert completed >= needed
    if cancel and completed >= needed:
        assert set(plan.cancel) | set(state[1]) == set(range(state[0]))


@given(states(), st.integers(1, 8), st.booleans())
def test_a_group_is_finished_exactly_when_every_member_has_an_outcome(
    state: tuple[int, dict[int, Outcome]], needed: int, cancel: bool
) -> None:
    assert plan_group(*state, min_completed=needed, cancel_stragglers=cancel).finished == (len(state[1]) == state[0])


def test_a_lost_member_does_not_count_towards_k_of_g() -> None:
    state = (4, {0: Outcome.COMPLETED, 1: Outcome.INFRA_FAILED, 2: Outcome.VERIFIER_FAILED})
    assert plan_group(*state, min_completed=2, cancel_stragglers=True).cancel == ()


@given(states(), st.integers(1, 8), st.booleans())
def test_stopping_a_group_cancels_every_member_that_has_not_ended(
    state: tuple[int, dict[int, Outcome]], needed: int, cancel: bool
) -> None:
    plan = plan_group(*state, min_completed=needed, cancel_stragglers=cancel, stopped=True)
    assert set(plan.cancel) == set(range(state[0])) - set(state[1])
