"""Where a conversation's stored token ids end in a new rendering of it. Pure.

A rendering spells earlier answers as the tokenizer would, and the model may have sampled another spelling of the same text.
So the stored ids stay at the head of the next prompt, and of the rendering only what follows them is taken. That is right
only where both say the same, which the caller checks by decoding the two parts that differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.recording.token_history import common_length

SHARED_TOKENS = 4
"""Equal tokens that are decoded with the parts that differ: one character may be made of up to four tokens."""


@dataclass(frozen=True, slots=True)
class Seam:
    """`stored[start:]` and `rendered[start:end]` have to say the same; then the prompt is `stored + rendered[end:]`."""

    start: int
    end: int


def find_seam(stored: Sequence[int], rendered: Sequence[int], end_of_turn: int) -> Seam | None:
    """The seam, or None where the rendering has no such place. `end_of_turn` is the token that closes an answer.

    An answer that was cut off has no such token; then the rendering's own one is the first of the new ids.
    """
    equal = common_length(stored, rendered)
    if equal == len(stored):
        return Seam(equal, equal)
    turns = list(stored[equal:]).count(end_of_turn)
    closed = stored[-1] == end_of_turn
    end = equal - 1
    try:
        for _ in range(turns if closed else turns + 1):
            end = rendered.index(end_of_turn, end + 1)
    except ValueError:
        return None
    return Seam(max(0, equal - SHARED_TOKENS), end + 1 if closed else end)


def say_the_same(stored: str, rendered: str, stops: Sequence[str] = (), end: str = "") -> bool:
    """Whether two texts are equal but for white space, and for stop strings at the end of answers.

    Those were sampled, and the answer's text does not have them. `end` is the text of the token that closes an answer.

    vLLM's tool parsers keep the line break before a tool call, to which the template adds its own, and dump the arguments
    anew, so an answer with tool calls seldom comes back with the white space that it was sampled with.
    """
    first, second = _squeezed(stored), _squeezed(rendered)
    closing = _squeezed(end)
    if first == second or not closing:
        return first == second
    first, second = first + closing, second + closing
    for stop in map(_squeezed, stops):
        first, second = first.replace(stop + closing, closing), second.replace(stop + closing, closing)
    return first == second


def _squeezed(text: str) -> str:
    return "".join(text.split())


def end_of_turn(rendered: Sequence[int], other: Sequence[int]) -> int | None:
    """The token that closes an answer, from the renderings of two conversations that end in answers with no token in
    common; None where the template closes them with none."""
    shared = common_length(rendered[::-1], other[::-1])
    return rendered[-shared] if shared else None
