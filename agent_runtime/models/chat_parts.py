"""Assemble a streamed answer into the equivalent complete one. Pure."""

from collections.abc import Mapping
from typing import Any

from agent_runtime.models.answers import reasoning_of
from agent_runtime.models.base import ModelError, end_of


def first_choice(event: Mapping[str, Any]) -> Any:
    """Return the event's part of the first answer; None without one. Some servers send several answers unasked."""
    return next((choice for choice in event.get("choices") or () if not choice.get("index")), None)


class AnswerParts:
    """Takes the events in order. A subclass reads the text and the logprobs of a choice."""

    expected = ""
    """Description of the events for error messages."""

    def __init__(self, source: str = "the model") -> None:
        """`source` names the server in error messages."""
        self.source = source
        self.model = ""
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.usage: Any = None
        self.prompt_ids: list[int] | None = None
        self.ids: list[int] = []
        self.logprobs: list[Any] = []

    def add(self, event: Any) -> str:
        """Add an event; return its piece of plain text. Raises ModelError (BadResponse)."""
        try:
            self.model = event.get("model") or self.model
            self.usage = event.get("usage") or self.usage
            self.prompt_ids = event.get("prompt_token_ids") or self.prompt_ids
            if (choice := first_choice(event)) is None:
                return ""
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            self.ids += choice.get("token_ids") or []
            self.finish_reason = end_of(choice) or self.finish_reason
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
            return self._read(choice, choice.get("logprobs") or {})
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise ModelError(
                "BadResponse", f"{self.source}: expected {self.expected}, got {str(event)[:200]}"
            ) from None

    def _read(self, choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> str:
        raise NotImplementedError


class ChatParts(AnswerParts):
    """Parts of a chat completion."""

    expected = "events of a streamed chat completion"

    def __init__(self, source: str = "the model") -> None:
        super().__init__(source)
        self.thought = ""
        """The latest event's piece of reasoning."""
        self._calls: dict[int, dict[str, Any]] = {}
        self._texts: dict[str, str] = {}
        """Text by field of the message: content, reasoning_content, …"""

    def _read(self, choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> str:
        self.logprobs += logprobs.get("content") or []
        delta = choice.get("delta") or {}
        self.thought = reasoning_of(delta)
        for call in delta.get("tool_calls") or []:
            self._add_call(call)
        for field, value in delta.items():
            if isinstance(value, str) and field != "role":
                self._texts[field] = self._texts.get(field, "") + value
        return str(delta.get("content") or "")

    def _add_call(self, part: Mapping[str, Any]) -> None:
        """Add a piece of a call. Only arguments come in pieces; some servers repeat the name."""
        call = self._calls.setdefault(
            int(part.get("index") or 0), {"id": None, "function": {"name": "", "arguments": ""}}
        )
        function = part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""

    def payload(self) -> dict[str, Any]:
        """Return the complete answer in its unstreamed format. Raises ModelError if its end is missing."""
        if self.finish_reason is None:
            raise ModelError("BadResponse", f"{self.source}: the streamed chat completion has no finish_reason")
        calls = [self._calls[index] for index in sorted(self._calls)]
        choice = {
            "message": {"role": "assistant", "content": "", **self._texts, "tool_calls": calls},
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": self.ids,
            "logprobs": {"content": self.logprobs},
        }
        return {"model": self.model, "choices": [choice], "usage": self.usage, "prompt_token_ids": self.prompt_ids}
