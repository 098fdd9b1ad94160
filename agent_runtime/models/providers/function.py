"""A model that is a Python function: `async f(messages, max_tokens, temperature, **kw)`."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime.extensions import contained
from agent_runtime.models.base import (
    ContentFiltered,
    ContextExceeded,
    ModelConfigError,
    ModelError,
    ModelReply,
    ModelRequest,
)
from agent_runtime.models.providers.openai_endpoint import parse_completion

ModelFunction = Callable[..., Awaitable[str | dict[str, Any] | ModelReply]]

_PARTS = frozenset({"content", "tool_calls", "reasoning_content", "reasoning", "refusal"})
"""A message has one of these. A whole response has none: it would be taken for an empty answer of the policy."""


class FunctionModel:
    """A `Model`. Sampling fields that the manifest omits are not passed, so that the function's own defaults apply.

    Besides messages, max_tokens and temperature, these can be passed: tools, top_p, stop, seed, session, task, member,
    turn and the fields of `sampling.extra`. A function without `**kw` gets those that it declares.
    """

    token_capture = "TextOnly"

    def __init__(self, function: ModelFunction, name: str) -> None:
        if not inspect.iscoroutinefunction(function):
            raise ModelConfigError("NotAsync", f"model.function {name}: expected an async function, got {function!r}")
        self.name = name
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._takes = None if takes_all else {parameter.name for parameter in parameters}

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Call the function, which returns text, a message in OpenAI's format, or a ModelReply. See `Model.complete`."""
        try:
            with contained():
                returned = await self._function(**self._arguments(request))
        except (ModelError, ContextExceeded, ContentFiltered):
            raise
        except Exception as error:
            raise ModelError("FunctionFailed", f"{self.name} raised {type(error).__name__}: {error}") from error
        if isinstance(returned, ModelReply):
            return returned
        message = {"role": "assistant", "content": returned} if isinstance(returned, str) else returned
        if not isinstance(message, dict) or not _PARTS & message.keys():
            raise ModelError(
                "BadResponse", f"{self.name} returned {returned!r:.200}; expected text, a message dict or a ModelReply"
            )
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return parse_completion({"choices": [{"message": dict(message), "finish_reason": reason}], "model": self.name})

    async def check(self) -> None:
        """Do nothing: the function cannot be checked without calling it."""

    async def close(self) -> None:
        """Do nothing."""

    def _arguments(self, request: ModelRequest) -> dict[str, Any]:
        sampling = request.sampling
        offered = {
            "messages": list(request.messages),
            "max_tokens": request.answer_limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": sampling.stop or None,
            "tools": list(request.tools) or None,
            "seed": request.seed,
            "session": request.session,
            "task": request.task,
            "member": request.member,
            "turn": request.turn,
            **sampling.extra,
        }
        return {
            name: value
            for name, value in offered.items()
            if value is not None and (self._takes is None or name in self._takes)
        }
