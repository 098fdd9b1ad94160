"""The text of an answer: where it ends, and which part can be streamed. The ids of an answer include its closing token,
or the tokens of the stop string that ended it. Its text has neither (vLLM, vllm/v1/engine/detokenizer.py), unless
`include_stop_str_in_output` is set. Text that is, or may become, a tool call is not streamed.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop conditions that may end an answer before its end of turn."""

    strings: Sequence[str]
    tokens: frozenset[int]
    kept: bool
    """Whether the text includes what ended it."""
    has_pattern: bool = False
    """Whether text that matches a pattern may end it (SGLang). The text includes that."""

    @classmethod
    def of(cls, sampling: Mapping[str, Any]) -> "Stops":
        strings = sampling.get("stop") or []
        return cls(
            [strings] if isinstance(strings, str) else [text for text in strings if text],
            frozenset(sampling.get("stop_token_ids") or []),
            bool(sampling.get("include_stop_str_in_output")),
            bool(sampling.get("stop_regex")),
        )


def cut_at_stop(text: str, before: str, stops: Stops) -> tuple[str, str] | None:
    """Return the stop string that ended an answer, and the text up to it; None if no stop string ended it.

    `before` is the text without the last token. Stop strings in it are ignored, because vLLM did not stop there, for
    example because of `min_tokens`. If several stop strings end with the last token, the first in the request's order
    counts. A step may produce several tokens, some after the string; then its last occurrence counts.
    """
    known = len(before.rstrip("\ufffd"))  # an incomplete character cannot be decoded
    for stop in stops.strings:
        if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0:
            return stop, _cut(text, stop, at, stops)
    at, stop = max(((text.rfind(stop), stop) for stop in stops.strings), default=(-1, ""))
    return None if at < 0 else (stop, _cut(text, stop, at, stops))


def _cut(text: str, stop: str, at: int, stops: Stops) -> str:
    return text[: at + len(stop) if stops.kept else at]


def certain_length(text: str, strings: Sequence[str]) -> int:
    """Return how many first characters of a growing text are final: no stop string can begin in them."""
    whole = (at for stop in strings if (at := text.find(stop)) >= 0)
    begun = (len(text) - size for stop in strings for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return min([*whole, *begun], default=len(text))


TOOL_TEXT = re.compile(r"[<\[{]")
"""Beginnings of tool calls for all of vLLM's parsers: `<tool_call>`, `[TOOL_CALLS]`, `{"name": …`, and others."""
LONGEST_MARKER = 32
"""Characters after the first one of the marker that closes reasoning."""
GROWTH = 16
"""A partial answer is decoded again when it has grown by a sixteenth, so that the total cost is some 17 times its
length.
"""


def _certain_thought(thought: str) -> str:
    """Return unfinished reasoning without its end: its closing marker may have begun, and parsers strip the white space
    before it.
    """
    marker = max(thought.rfind(opening, max(0, len(thought) - LONGEST_MARKER - 1)) for opening in "<[")
    return (thought if marker < 0 else thought[:marker]).rstrip()


class TextStream:
    """Yields the pieces of an answer's reasoning and text. A yielded piece is never revoked."""

    def __init__(
        self,
        on_text: Callable[[str], None],
        *,
        tools: bool,
        stops: Sequence[str] = (),
        on_reasoning: Callable[[str], None] | None = None,
    ) -> None:
        self._on_text, self._tools, self._stops = on_text, tools, stops
        self._on_reasoning = on_reasoning or (lambda piece: None)
        self._sent = self._thought = ""

    @property
    def has_begun(self) -> bool:
        """Whether a piece was yielded."""
        return bool(self._sent or self._thought)

    def offer(self, content: str, thought: str = "") -> None:
        """Take what is decoded so far. The reasoning is complete once there is text."""
        self._think(thought if content else _certain_thought(thought.rstrip("\ufffd")))
        # An incomplete character is decoded to U+FFFD.
        certain = content.rstrip("\ufffd")
        if self._tools:
            found = TOOL_TEXT.search(certain)
            # Parsers strip the white space before a tool call.
            certain = certain[: found.start() if found else None].rstrip()
        certain = certain[: certain_length(certain, self._stops)]
        self._send(certain)

    def finish(self, content: str, thought: str = "") -> None:
        self._think(thought)
        self._send(content)

    def _think(self, thought: str) -> None:
        # Once text is sent, reasoning would come too late.
        if not self._sent and len(thought) > len(self._thought) and thought.startswith(self._thought):
            piece, self._thought = thought[len(self._thought) :], thought
            self._on_reasoning(piece)

    def _send(self, text: str) -> None:
        if len(text) > len(self._sent) and text.startswith(self._sent):
            piece, self._sent = text[len(self._sent) :], text
            self._on_text(piece)


class PartialAnswers:
    """Decodes a growing answer in the background, one call at a time, so that reading its tokens never waits."""

    def __init__(self, decode: Callable[[Sequence[int]], Awaitable[tuple[str, str]]], stream: TextStream) -> None:
        self._decode, self._stream = decode, stream
        self._ids: Sequence[int] = ()
        self._decoded = 0
        self._work: asyncio.Task[None] | None = None

    def grown(self, ids: Sequence[int]) -> None:
        self._ids = ids
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._catch_up())

    async def stop(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
            self._decoded = 0

    async def _catch_up(self) -> None:
        # Ignore errors: the text is streamed with a later piece, or with the whole answer.
        with contextlib.suppress(Exception):
            while len(self._ids) >= self._decoded + max(1, self._decoded // GROWTH):
                ids = list(self._ids)
                self._stream.offer(*await self._decode(ids))
                self._decoded = len(ids)
