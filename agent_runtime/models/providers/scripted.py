"""A model with fixed answers, from the manifest. For quickstarts, tests and benchmarks."""

import asyncio
import json
from collections.abc import Collection

from agent_runtime.models.base import ModelConfigError, ModelReply, ModelRequest
from rollout_api.model import Scripted, ScriptedTurn
from rollout_api.records import Message, Usage

CHARACTERS_PER_TOKEN = 4  # of English text, about; so that token budgets mean something here too


class ScriptedModel:
    """A `Model`. Its answer depends on task, member and turn alone, so a call that is made again gets it again."""

    name = "scripted"
    token_capture = "TextOnly"

    def __init__(self, script: Scripted) -> None:
        self._members = {task.task: task.members for task in script.tasks}

    async def complete(self, request: ModelRequest) -> ModelReply:
        """The turn of the script. Raises ModelConfigError for a task without a script."""
        if (message := no_script(self._members, request.task)) is not None:
            raise ModelConfigError("NoScript", message)
        members = self._members[request.task]
        turns = members[request.member % len(members)].turns
        turn = turns[min(request.turn, len(turns) - 1)]
        await asyncio.sleep(turn.delay_seconds)
        return _reply(request, turn)

    async def check(self) -> None:
        """Always there."""

    async def close(self) -> None:
        """Nothing to close."""


def no_script(scripted: Collection[str], task: str) -> str | None:
    """The problem with a task of that name where the script has turns for `scripted` alone; None if it is one of them."""
    return (
        None
        if task in scripted
        else f"model.scripted has no script for task {task!r}; it has {', '.join(sorted(scripted))}"
    )


def _reply(request: ModelRequest, turn: ScriptedTurn) -> ModelReply:
    message: Message = {"role": "assistant", "content": turn.content or None}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call-{request.turn}-{position}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
                },
            }
            for position, call in enumerate(turn.tool_calls)
        ]
    return ModelReply(
        message=message,
        finish_reason="tool_calls" if turn.tool_calls else "stop",
        model=ScriptedModel.name,
        usage=Usage(
            prompt_tokens=sum(_tokens(message) for message in request.messages),
            completion_tokens=_tokens(message),
        ),
    )


def _tokens(message: Message) -> int:
    calls = message.get("tool_calls") or []
    characters = len(message.get("content") or "") + sum(len(call["function"]["arguments"]) for call in calls)
    return 1 + characters // CHARACTERS_PER_TOKEN
