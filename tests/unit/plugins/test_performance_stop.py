from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.plugins.builtin import stop_reason

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 0.79, 0.8, 1.0]), max_size=12)


@given(REWARDS)
def test_group_ends_between_three_and_ten_successes(rewards: list[float]) -> None:
    stops = stop_reason(rewards, 0.8, 3, 10) is not None
    in_a_row = len(rewards) >= 3 and min(rewards[-3:]) >= 0.8
    assert stops == (in_a_row or len(rewards) >= 10)


def test_reason_names_the_rule_that_stopped_the_group() -> None:
    assert stop_reason([0, 1, 1, 1], 0.8, 3, 10) == "the last 3 rewards reach 0.8"
    assert stop_reason([0] * 10, 0.8, 3, 10) == "10 members are graded, which is maxEpisodes"
