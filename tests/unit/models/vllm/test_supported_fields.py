"""A field without effect is refused by name, and every field with an effect is passed on."""

from typing import Any

import pytest

from agent_runtime.models.vllm.supported_fields import without_effect
from agent_runtime.proxy.protocols import openai_chat, openai_completions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("verbosity", "low"),
        ("skip_special_tokens", False),
        ("length_penalty", 0.5),
        ("prompt_logprobs", 1),
        ("temprature", 1),
        ("truncate_prompt_tokens", 100),
    ],
)
def test_field_without_effect_is_refused_by_name(field: str, value: Any) -> None:
    for prompt in (False, True):
        assert without_effect({field: value}, prompt=prompt) == [field]


def test_fields_of_chats_and_of_bare_prompts_are_distinguished() -> None:
    for field in ("tool_choice", "reasoning_effort", "chat_template_kwargs", "parallel_tool_calls"):
        assert not without_effect({field: "x"}, prompt=False)
        assert without_effect({field: "x"}, prompt=True) == [field]


def test_values_without_a_request_are_accepted() -> None:
    assert not without_effect({"n": 1, "verbosity": "medium", "logit_bias": None, "top_logprobs": 0}, prompt=False)


def test_passed_fields_are_accepted_except_those_that_vllm_ignores() -> None:
    passed_over = {"verbosity", "length_penalty", "skip_special_tokens", "spaces_between_special_tokens"}
    for passed, prompt in (
        (openai_chat.FIELDS.passed, False),
        (openai_completions.FIELDS.passed - {"chat_template_kwargs"}, True),
    ):
        for field in passed - passed_over:
            assert not without_effect({field: [1]}, prompt=prompt)
