"""Reward files: an invalid number must not reach a trainer."""

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.grading.reward_file import RewardFileError, parse_reward


def test_json_wins_over_text_and_may_be_a_number_or_named_numbers() -> None:
    assert parse_reward(b"0.25", b"1") == (0.25, {})
    assert parse_reward(None, b" 0.5\n") == (0.5, {})
    assert parse_reward(b'{"reward": 1, "speed": 350}', None) == (1, {"reward": 1, "speed": 350})
    assert parse_reward(b'{"accuracy": 0.5}', None) == (0.5, {"accuracy": 0.5})
    assert parse_reward(b'{"reward": true, "tidy": false}', None) == (1, {"reward": 1, "tidy": 0})


@pytest.mark.parametrize("parts", [[1 / 20] * 20, [0.1] * 10, [0.2, 0.4, 0.3, 0.1], [-0.1] * 10])
def test_sum_of_parts_that_is_off_by_rounding_is_the_end_of_the_range(parts: list[float]) -> None:
    total = sum(parts)
    assert abs(total) != 1
    assert parse_reward(json.dumps({"reward": total}).encode(), None)[0] == round(total)
    assert parse_reward(None, str(total).encode())[0] == round(total)


@pytest.mark.parametrize(
    "data",
    [
        *(b"NaN", b"Infinity", b"1e999", b"2", b"-1.5", b'"1"', b"null", b"[1]", b"{}", b"", b"1 2", b"\xff"),
        *(b'{"a": 1, "b": 0}', b'{"reward": NaN}', b'{"reward": 0, "reward": 1}', b'{"reward": 1, "x": Infinity}'),
        b'{"reward": 1, "x": 1.7e308}',
        *(b"1" * 5000, b"[" * 100_000),
    ],
)
def test_value_outside_the_range_is_refused(data: bytes) -> None:
    with pytest.raises(RewardFileError):
        parse_reward(data, b"1")


@pytest.mark.parametrize("prefix", [b"", b'{"reward": '], ids=["value", "named"])
def test_nested_value_is_refused_at_every_depth_near_the_recursion_limit(prefix: bytes) -> None:
    suffix = b"}" if prefix else b""
    for depth in range(500, sys.getrecursionlimit() + 10):
        with pytest.raises(RewardFileError):
            parse_reward(prefix + b"[" * depth + b"]" * depth + suffix, None)


@pytest.mark.parametrize("data", [b"nan", b"inf", b"1.5", b"", b"one", b"1_0", b"\xff", b"0.5 0.5"])
def test_text_other_than_a_number_in_range_is_refused(data: bytes) -> None:
    with pytest.raises(RewardFileError):
        parse_reward(None, data)


def test_missing_reward_file_names_both_places() -> None:
    with pytest.raises(RewardFileError, match=r"reward\.json nor .*reward\.txt"):
        parse_reward(None, None)


@given(st.one_of(st.binary(max_size=50), st.floats().map(lambda x: json.dumps(x).encode())), st.booleans())
def test_a_reward_is_always_finite_and_in_range(data: bytes, as_json: bool) -> None:
    try:
        reward, rewards = parse_reward(data if as_json else None, None if as_json else data)
    except RewardFileError:
        return
    assert -1 <= reward <= 1
    assert all(math.isfinite(value) for value in rewards.values())
