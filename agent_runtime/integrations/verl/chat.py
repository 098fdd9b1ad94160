"""verl's own tokenization of a conversation: its continuous-token builder for prompts, its tool parser for answers."""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from verl.experimental.agent_loop.tool_parser import ToolParser  # type: ignore[import-not-found]
from verl.tools.schemas import OpenAIFunctionToolSchema  # type: ignore[import-not-found]

from agent_runtime.daemon_thread import in_daemon_thread
from agent_runtime.models.answers import decoded_object
from agent_runtime.models.base import TokenPrefix
from rollout_api.records import Message


class VerlChat:
    """A `model.Chat`. `builder` is verl's continuous-token builder of the model, `parser` the name of a verl tool parser."""

    def __init__(self, tokenizer: Any, builder: Any, parser: str) -> None:
        self._tokenizer, self._builder = tokenizer, builder
        self._parser = ToolParser.get_tool_parser(parser, tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        self.stop_token_ids: list[int] = list(self._parser.stop_token_ids)

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefix: TokenPrefix | None
    ) -> list[int]:
        return await asyncio.to_thread(self._prompt, messages, tools, prefix)

    async def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        ended = bool(ids) and ids[-1] == self._tokenizer.eos_token_id
        said = list(ids[:-1] if ended else ids)
        if not tools:
            return _before_stop(await asyncio.to_thread(self._text, said), stops), []
        # In a daemon thread, because parsers block, and take hours for some answers, such as repeated beginnings of a
        # call.
        parse = functools.partial(self._parser.extract_tool_calls, said, _schemas(tools))
        text, calls = await in_daemon_thread("verl tool parser", lambda: asyncio.run(parse()))
        if not calls:
            text = await asyncio.to_thread(self._text, said)
        return _before_stop(text, stops), [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            | ({} if call.tool_call_id is None else {"id": call.tool_call_id})
            for call in calls
        ]

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefix: TokenPrefix | None
    ) -> list[int]:
        conversation = [_for_template(message) for message in messages]
        definitions = [dict(tool) for tool in tools] or None
        if prefix is not None:
            try:
                merged = self._builder.merge_context_tokens(
                    conversation[: prefix.messages], conversation, self._closed(prefix.ids), tools=definitions
                )
                return list(merged.token_ids)
            except (ValueError, TemplateError):
                # The template cannot render only the new part, so render the whole conversation, which begins a new
                # branch.
                pass
        return list(self._builder.build_initial_tokens(conversation, tools=definitions))

    def _closed(self, ids: Sequence[int]) -> list[int]:
        """Add the end to an answer that was cut off at its limit, because verl's builders require it."""
        return list(ids) if ids[-1] in self._special else [*ids, self._tokenizer.eos_token_id]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _for_template(message: Message) -> Message:
    """Convert the arguments of tool calls to objects, which chat templates need."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return dict(message) | {
        "tool_calls": [
            dict(call)
            | {"function": dict(call["function"]) | {"arguments": decoded_object(call["function"]["arguments"]) or {}}}
            for call in calls
        ]
    }


def _schemas(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Convert tool definitions to verl's format, from which some parsers read the types of arguments.

    It supports only parameters of plain types. Other tools are left out, and their arguments stay text.
    """
    schemas = []
    for tool in tools:
        try:
            schemas.append(OpenAIFunctionToolSchema.model_validate(json.loads(json.dumps(tool))))
        except ValidationError:
            continue
    return schemas


def _before_stop(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
