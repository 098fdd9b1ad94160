"""Tool calls in what a model wrote, as vLLM's parser `hermes` reads them: <tool_call>{"name": ...}</tool_call>.

vLLM 0.26, vllm/tool_parsers/hermes_tool_parser.py: Hermes2ProToolParser.
"""

from __future__ import annotations

import json
import re
from typing import Any

START, END = "<tool_call>", "</tool_call>"
CALLS = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
ARGUMENTS = re.compile(r'"arguments"\s*:\s*(?=\S)')


def parse(text: str) -> tuple[str | None, list[dict[str, str]]]:
    """Return the content and the calls ({name, arguments as JSON text}). If a call is not JSON, all calls stay in the
    content.
    """
    if START not in text:
        return text, []
    try:
        found = [json.loads(closed or rest) for closed, rest in CALLS.findall(text)]
        calls = [
            {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in found
        ]
    except (ValueError, KeyError, TypeError):
        return text, []
    return text[: text.find(START)] or None, calls


class ToolCallStream:
    """Deltas of a text that arrives piece by piece: plain text at once, a call's name when it is complete, its
    arguments as they come. Text that may become a call is held back.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._buffer = ""
        self._inside = False
        self._arguments_at: int | None = None
        self._sent = 0

    def feed(self, text: str, *, final: bool = False) -> list[dict[str, Any]]:
        """Return the `delta` objects that this text completes, without roles and ids."""
        self._buffer += text
        deltas: list[dict[str, Any]] = []
        while True:
            step = self._in_call() if self._inside else self._outside(final)
            if step is None:
                return deltas
            deltas += step

    def _outside(self, final: bool) -> list[dict[str, Any]] | None:
        start = self._buffer.find(START)
        if start >= 0:
            before, self._buffer = self._buffer[:start], self._buffer[start + len(START) :]
            self._inside, self._arguments_at, self._sent = True, None, 0
            # Between calls there is only white space, and behind one vLLM streams no more text.
            return [{"content": before}] if before and not self.calls else []
        keep = 0 if final else held_back(self._buffer)
        ready = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(ready) :]
        return [{"content": ready}] if ready and not self.calls else None

    def _in_call(self) -> list[dict[str, Any]] | None:
        deltas: list[dict[str, Any]] = []
        end = self._buffer.find(END)
        text = self._buffer if end < 0 else self._buffer[:end]
        if self._arguments_at is None:
            name, arguments = NAME.match(text), ARGUMENTS.search(text)
            if name and arguments:
                self._arguments_at = arguments.end()
                self.calls += 1
                deltas.append(self._delta(name=name.group(1)))
        if self._arguments_at is not None:
            length = arguments_length(text[self._arguments_at :])
            piece = text[self._arguments_at + self._sent : self._arguments_at + length]
            self._sent += len(piece)
            if piece:
                deltas.append(self._delta(arguments=piece))
        if end < 0:
            return deltas or None
        self._buffer, self._inside = self._buffer[end + len(END) :], False
        return deltas

    def _delta(self, *, name: str | None = None, arguments: str = "") -> dict[str, Any]:
        function = {"name": name, "arguments": arguments} if name is not None else {"arguments": arguments}
        return {"tool_calls": [{"index": self.calls - 1, "function": function}]}


def held_back(text: str) -> int:
    """Return how many characters at a text's end may be the beginning of a call."""
    for length in range(min(len(text), len(START) - 1), 0, -1):
        if START.startswith(text[-length:]):
            return length
    return 0


def arguments_length(text: str) -> int:
    """Return how much of a text belongs to the JSON value at its beginning; all of it while the value is incomplete."""
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except ValueError:
        return len(text)
