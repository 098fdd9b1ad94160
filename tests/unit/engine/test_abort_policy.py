from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.scheduling.completion_rules import FEWEST_ENDED, LOST, abort_reason
from rollout_api.records import Outcome


@given(st.lists(st.sampled_from(Outcome), max_size=60), st.floats(0, 1))
def test_job_is_aborted_exactly_when_too_large_a_share_is_lost(outcomes: list[Outcome], fraction: float) -> None:
    ended = [o for o in outcomes if o is not Outcome.CANCELLED]
    lost = sum(o in LOST for o in ended)
    expected = len(ended) >= FEWEST_ENDED and lost / len(ended) > fraction
    assert (abort_reason(Counter(outcomes), fraction) is not None) == expected


def test_one_bad_node_at_the_start_does_not_abort_the_job() -> None:
    assert abort_reason({Outcome.INFRA_FAILED: FEWEST_ENDED - 1}, 0.0) is None


def test_the_reason_names_the_numbers_and_the_field() -> None:
    reason = abort_reason({Outcome.INFRA_FAILED: 10, Outcome.COMPLETED: 10}, 0.2)
    assert reason is not None
    assert "10 of 20" in reason
    assert "completion.maxInfraFailureFraction 0.2" in reason
