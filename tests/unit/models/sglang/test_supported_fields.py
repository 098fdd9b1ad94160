"""Fields of a request that SGLang's token routes support, and how they are passed on."""

from typing import Any

import pytest

from agent_runtime.models.sglang.supported_fields import sampling_params, without_effect


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("temprature", 1), ("tool_choice", "required"), ("prompt_logprobs", 1), ("structured_outputs", {})],
)
def test_field_that_would_have_no_effect_is_found(field: str, value: Any) -> None:
    for prompt in (False, True):
        assert without_effect({field: value}, prompt=prompt) == [field]


def test_fields_of_the_chat_template_have_no_effect_on_a_bare_prompt() -> None:
    fields = {
        "chat_template_kwargs": {},
        "reasoning_effort": "low",
        "tool_choice": "none",
        "parallel_tool_calls": False,
    }
    assert without_effect(fields, prompt=False) == []
    assert without_effect(fields, prompt=True) == list(fields)


def test_sampling_of_a_chat_request_gets_sglangs_names() -> None:
    chat = {
        "model": "policy",
        "messages": [],
        "temperature": 0.5,
        "seed": 3,
        "stop": ["a"],
        "max_tokens": 9,
        "top_k": None,
    }
    assert sampling_params(chat) == {"temperature": 0.5, "sampling_seed": 3, "stop": ["a"]}


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}, {"json_schema": '{"type": "null"}'}),
        ({"type": "json_object"}, {"json_schema": '{"type": "object"}'}),
        ({"type": "text"}, {}),
    ],
)
def test_response_format_becomes_a_grammar(form: dict[str, Any], grammar: dict[str, str]) -> None:
    assert sampling_params({"response_format": form}) == grammar
