"""A streamed chat completion without tool calls, put together to the one that would have come in one piece. Pure."""

from typing import Any

from agent_runtime.models.base import ModelError


class ChatParts:
    """Takes the events in, in order."""

    def __init__(self) -> None:
        self._model = ""
        self._texts: dict[str, str] = {}
        """By field of the message: content, reasoning_content, …"""
        self._finish_reason: str | None = None
        self._stop_reason: Any = None
        self._usage: Any = None
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[Any] = []

    def add(self, event: Any) -> str:
        """The event's piece of plain text. Raises ModelError (BadResponse)."""
        try:
            self._model = event.get("model") or self._model
            self._usage = event.get("usage") or self._usage
            self._prompt_ids = event.get("prompt_token_ids") or self._prompt_ids
            if not event.get("choices"):
                return ""
            choice = event["choices"][0]
            self._prompt_ids = choice.get("prompt_token_ids") or self._prompt_ids
            self._ids += choice.get("token_ids") or []
            self._logprobs += (choice.get("logprobs") or {}).get("content") or []
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self._stop_reason = choice.get("stop_reason") or self._stop_reason
            delta = choice.get("delta") or {}
            for field, value in delta.items():
                if isinstance(value, str) and field != "role":
                    self._texts[field] = self._texts.get(field, "") + value
            return str(delta.get("content") or "")
        except (AttributeError, IndexError, KeyError, TypeError):
            raise ModelError(
                "BadResponse", f"expected events of a streamed chat completion, got {str(event)[:200]}"
            ) from None

    def payload(self) -> dict[str, Any]:
        """The whole, in the form of an answer that was not streamed. Raises ModelError when its end is missing."""
        if self._finish_reason is None:
            raise ModelError("BadResponse", "the streamed chat completion has no finish_reason")
        choice = {
            "message": {"role": "assistant", "content": "", **self._texts},
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
            "token_ids": self._ids,
            "logprobs": {"content": self._logprobs},
        }
        return {
            "model": self._model,
            "choices": [choice],
            "usage": self._usage,
            "prompt_token_ids": self._prompt_ids,
        }
