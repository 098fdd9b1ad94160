"""The chat template: ChatML with tools and tool results. A closed turn ends with `<|im_end|>` and a newline, of which the
model samples only the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.vllm_server.tokenizer import TURN_END, TURN_START

GENERATION_PROMPT = f"{TURN_START}assistant\n"
TOOLS_INTRODUCTION = "\n\n# Tools\n\nYou may call these functions:\n<tools>\n"
TOOLS_FORM = '\n</tools>\n\nCall one so:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'


class TemplateError(ValueError):
    """The messages cannot be rendered; `message` is for the client."""


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    generation_prompt: bool = True,
    continue_final: bool = False,
) -> str:
    """Return the prompt. Raises TemplateError."""
    parts: list[str] = []
    rest = list(messages)
    if tools:
        system = ""
        if rest and rest[0].get("role") == "system":
            system = content_text(rest.pop(0).get("content"))
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(turn("system", f"{system}{TOOLS_INTRODUCTION}{listed}{TOOLS_FORM}"))
    for message in rest:
        role = message.get("role")
        if not isinstance(role, str):
            raise TemplateError(f"messages: each needs a role, got {message!r:.100}")
        parts.append(turn(role, body(message)))
    text = "".join(parts)
    if continue_final:
        return text.removesuffix(f"{TURN_END}\n")
    return text + GENERATION_PROMPT if generation_prompt else text


def turn(role: str, text: str) -> str:
    """Return one closed turn."""
    return f"{TURN_START}{role}\n{text}{TURN_END}\n"


def body(message: Mapping[str, Any]) -> str:
    """Return the text between a turn's role and its end."""
    text = content_text(message.get("content"))
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise TemplateError(f"tool_calls: arguments of {function.get('name')!r} are not JSON") from None
        text = tool_call_text(text, function.get("name"), arguments)
    return text


def tool_call_text(text: str, name: Any, arguments: Any) -> str:
    """Return a text with one more tool call after it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{text}{chr(10) if text else ''}<tool_call>\n{call}\n</tool_call>"


def content_text(content: Any) -> str:
    """Return the text of a message's content, which may be text or parts. Raises TemplateError for content that a text
    model does not take.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError(f"content: expected text or a list of parts, got {content!r:.100}")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
            texts.append(str(part.get("text", "")))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise TemplateError(str(kind))
    return "\n".join(texts)
