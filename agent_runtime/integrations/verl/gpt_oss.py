"""Tool results as text for gpt-oss models, which use OpenAI's harmony format (verl PR #4548, same name and text)."""

from collections.abc import Mapping, Sequence
from typing import Any


def build_gpt_oss_tool_response_text(messages: Sequence[Mapping[str, Any]], tool_call_names: Sequence[str]) -> str:
    """Return the tool messages one after another, each as the answer of the function of that name, and the start of the
    next turn.

    There must be a name for each message. Raises ValueError if there are too few.
    """
    if len(tool_call_names) < len(messages):
        raise ValueError(
            f"tool_call_names has {len(tool_call_names)} names for {len(messages)} tool messages; give one for each"
        )
    responses = (
        f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{message['content']}<|end|>"
        for message, name in zip(messages, tool_call_names, strict=False)
    )
    return "".join(responses) + "<|start|>assistant"
