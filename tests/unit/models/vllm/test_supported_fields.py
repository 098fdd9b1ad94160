"""A field that would have no effect is refused by its name, and everything that has one goes through."""

from typing import Any

import pytest

from agent_runtime.models.base import RequestRefused
from agent_runtime.models.vllm.supported_fields import check_fields
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
def test_what_would_change_nothing_is_refused_by_name(field: str, value: Any) -> None:
    for prompt in (False, True):
        with pytest.raises(RequestRefused, match=field):
            check_fields({field: value}, prompt=prompt)


def test_fields_of_chats_and_of_bare_prompts_are_distinguished() -> None:
    for field in ("tool_choice", "reasoning_effort", "chat_template_kwargs", "parallel_tool_calls"):
        check_fields({field: "x"}, prompt=False)
        with pytest.raises(RequestRefused, match=field):
            check_fields({field: "x"}, prompt=True)


def test_values_that_ask_for_nothing_are_taken() -> None:
    check_fields({"n": 1, "verbosity": "medium", "logit_bias": None, "top_logprobs": 0}, prompt=False)


def test_nothing_that_the_proxy_passes_on_is_refused_but_what_vllm_passes_over() -> None:
    without_effect = {"verbosity", "length_penalty", "skip_special_tokens", "spaces_between_special_tokens"}
    for passed, prompt in (
        (openai_chat.FIELDS.passed, False),
        (openai_completions.FIELDS.passed - {"chat_template_kwargs"}, True),
    ):
        for field in passed - without_effect:
            check_fields({field: [1]}, prompt=prompt)
