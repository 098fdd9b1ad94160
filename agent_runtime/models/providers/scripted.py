"""A model with fixed answers, from the manifest. For quickstarts, tests and benchmarks."""

import asyncio
import json
from collections.abc import Collection

from agent_runtime.models.base import ModelConfigError, ModelReply, ModelRequest
from rollout_api.model import Scripted, ScriptedTurn
from rollout_api.records import Message, Usage

CHARACTERS_PER_TOKEN = 4  # roughly as in English text, so that token budgets also work here


class ScriptedModel:
    """A `Model`. Its answer depends only on task, member and turn, so a repeated call gets the same answer."""

    name = "scripted"
    token_capture = "TextOnly"

    def __init__(self, script: Scripted) -> None:
        self._members = {task.task: task.members for task in script.tasks}

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the turn of the script. Raises ModelConfigError for a task without a script."""
        if (message := no_script(self._members, request.task)) is not None:
            raise ModelConfigError("NoScript", message)
        members = self._members[request.task]
        turns = members[request.member % len(members)].turns
        turn = turns[min(request.turn, len(turns) - 1)]
        await asyncio.sleep(turn.delay_seconds)
        return _reply(request, turn)

    async def check(self) -> None:
        """Do nothing: it is always available."""

    async def close(self) -> None:
        """Do nothing."""


def no_script(scripted: Collection[str], task: str) -> str | None:
    """Return the problem of a task without a script, given the tasks that are `scripted`; None if it has one."""
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
            prompt_tokens=sum(_tokens(message) for message in request.messages), completion_tokens=_tokens(message)
        ),
    )


def _tokens(message: Message) -> int:
    calls = message.get("tool_calls") or []
    characters = len(message.get("content") or "") + sum(len(call["function"]["arguments"]) for call in calls)
    return 1 + characters // CHARACTERS_PER_TOKEN
