"""What ended an answer, and where its text ends. Pure.

The ids of an answer have all that was sampled: the token that closed it, or the stop string that ended it, in whichever
tokens. Its text has neither (vLLM, vllm/v1/engine/detokenizer.py), unless `include_stop_str_in_output` asks for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stops:
    """What may end an answer before its end of turn."""

    strings: Sequence[str]
    tokens: frozenset[int]
    kept: bool
    """The text has what ended it."""

    @classmethod
    def of(cls, sampling: Mapping[str, Any]) -> "Stops":
        """Of vLLM's sampling parameters."""
        strings = sampling.get("stop") or []
        return cls(
            [strings] if isinstance(strings, str) else [text for text in strings if text],
            frozenset(sampling.get("stop_token_ids") or []),
            bool(sampling.get("include_stop_str_in_output")),
        )


def cut_at_stop(text: str, before: str, stops: Stops) -> tuple[str, str] | None:
    """The stop string that ended an answer, and the text without what it cuts off; None where there is none.

    `before` is the text without the last token, in which such strings mean nothing: vLLM may have been told to pass them
    over, for `min_tokens` say. Of several that come with the last token it takes the first in the request's order. A step
    that makes several tokens may leave some behind the string; then its last place counts.
    """
    known = len(before.rstrip("\ufffd"))  # half a character is not known
    for stop in stops.strings:
        if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0:
            return stop, _cut(text, stop, at, stops)
    at, stop = max(((text.rfind(stop), stop) for stop in stops.strings), default=(-1, ""))
    return None if at < 0 else (stop, _cut(text, stop, at, stops))


def _cut(text: str, stop: str, at: int, stops: Stops) -> str:
    return text[: at + len(stop) if stops.kept else at]


def certain_length(text: str, strings: Sequence[str]) -> int:
    """Characters at the head of a text that no stop string cuts off, whatever follows."""
    whole = (at for stop in strings if (at := text.find(stop)) >= 0)
    begun = (len(text) - size for stop in strings for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return min([*whole, *begun], default=len(text))
