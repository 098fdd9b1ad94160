import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.environments.answers import ANSWER, AnswerForm

THINK = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
PARTS = ["<answer>", "</answer>", "<think>", "</think>", "Right", " ", "\n", "<ans", "é"]


@given(st.sampled_from([ANSWER, THINK]), st.lists(st.sampled_from(PARTS), max_size=14).map("".join))
def test_the_action_is_the_one_that_roll_extracts(pattern: str, text: str) -> None:
    found = re.search(pattern, text, re.DOTALL)
    assert AnswerForm.of(pattern).action(text) == (None if found is None else found.groups()[-1].strip())


def test_a_whole_answer_can_be_the_action() -> None:
    form = AnswerForm.of("^(.*)$")
    assert form.action(" Right\n") == "Right"
    assert form.action("  ") is None


@pytest.mark.parametrize("pattern", ["no group", "(.*?)", "<a>(.*?)", "<a>(.*)</a>", "(<a>)+(.*?)</a>", "<a>(.*?)[.]"])
def test_a_pattern_that_a_policy_could_make_slow_is_refused_before_the_run(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not an answer pattern"):
        AnswerForm.of(pattern)
