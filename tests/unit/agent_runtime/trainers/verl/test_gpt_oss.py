"""The text of tool results for gpt-oss. tests/integration/verl compares it with verl's own."""

import pytest

from agent_runtime.integrations.verl.gpt_oss import build_gpt_oss_tool_response_text


def test_each_result_names_its_function_and_the_assistant_is_next() -> None:
    text = build_gpt_oss_tool_response_text([{"content": "4"}, {"content": "5"}], ["add", "sum"])

    assert text == (
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|>"
        "<|start|>functions.sum to=assistant<|channel|>commentary<|message|>5<|end|>"
        "<|start|>assistant"
    )


def test_a_result_without_the_name_of_its_function_is_refused() -> None:
    with pytest.raises(ValueError, match="1 names for 2"):
        build_gpt_oss_tool_response_text([{"content": "4"}, {"content": "5"}], ["add"])
