"""Members of a group stay together for any number of workers, and no row is lost."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.integrations.verl.samples import groups_of, mean_info, same_keys, shares_of

ROWS = st.lists(
    st.fixed_dictionaries({"uid": st.sampled_from("abcdef")}, optional={"__do_sample__": st.booleans()}), max_size=30
)


@given(ROWS, st.integers(1, 5))
def test_every_row_goes_to_one_worker_together_with_its_whole_group(rows: list[dict[str, Any]], workers: int) -> None:
    groups = groups_of(rows)
    shares = shares_of(groups, workers)

    assert sorted(row for share in shares for row in share) == list(range(len(rows)))
    for group in groups:
        assert sum(set(group.rows) <= set(share) for share in shares) == 1
        assert len({(rows[row]["uid"], rows[row].get("__do_sample__", True)) for row in group.rows}) == 1
    assert len({rows[group.rows[0]]["uid"] + str(group.greedy) for group in groups}) == len(groups)


def test_lost_member_gets_the_mean_of_the_reward_functions_values() -> None:
    assert mean_info([{"acc": 1.0, "pred": "a"}, {"acc": 0.0, "pred": "b"}]) == {"acc": 0.5, "pred": "a"}


def test_rows_with_different_reward_function_keys_fit_into_one_batch() -> None:
    first, second = same_keys([{"pred": "a"}, {"acc": 1.0, "pred": "b"}])

    assert list(first) == list(second) == ["acc", "pred"]
    assert (second, first["pred"]) == ({"acc": 1.0, "pred": "b"}, "a")
    assert math.isnan(first["acc"])
