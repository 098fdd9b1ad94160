"""Find where a conversation's stored token ids end in a new rendering of it. Pure.

A rendering tokenises earlier answers again, whereas the model may have sampled other tokens for the same text. So the
next prompt begins with the stored ids, and only the ids after them are taken from the rendering. That requires that
both have the same text, which the caller checks by decoding the differing parts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.models.token_history import common_length

SHARED_TOKENS = 4
"""Equal tokens that are decoded with the differing parts, because one character may consist of up to four tokens."""


@dataclass(frozen=True, slots=True)
class Seam:
    """`stored[start:]` and `rendered[start:end]` must have the same text; then the prompt is `stored + rendered[end:]`."""

    start: int
    end: int


def find_seam(stored: Sequence[int], rendered: Sequence[int], end_of_turn: int) -> Seam | None:
    """Return the seam, or None if it cannot be found. `end_of_turn` is the token that closes an answer.

    An answer that was cut off has no such token; then the rendering's token is the first of the new ids.
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


def have_same_text(stored: str, rendered: str, stops: Sequence[str] = (), end: str = "") -> bool:
    """Whether two texts are equal except for white space, and for stop strings at the end of answers.

    Stop strings were sampled, but are not part of the answer's text. Nor are the first bytes of a character with which an
    answer was cut off: they decode to U+FFFD, and vLLM leaves them out of the message. `end` is the text of the token
    that closes an answer.

    vLLM's tool parsers keep the line break before a tool call, to which the template adds its own, and serialise the
    arguments again. So an answer with tool calls seldom has the white space with which it was sampled.
    """
    first, second = _squeezed(stored), _squeezed(rendered)
    closing = _squeezed(end)
    if first == second or not closing:
        return first == second
    # Without the first part, a search in a long run of them would begin at each of them.
    incomplete = re.compile("(?<!\ufffd)\ufffd+" + re.escape(closing))
    first, second = (incomplete.sub(lambda _: closing, text + closing) for text in (first, second))
    for stop in map(_squeezed, stops):
        first, second = first.replace(stop + closing, closing), second.replace(stop + closing, closing)
    return first == second


def _squeezed(text: str) -> str:
    return "".join(text.split())


def end_of_turn(rendered: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the token that closes an answer, from the renderings of two conversations whose answers have no token in
    common; None if the template uses none.
    """
    shared = common_length(rendered[::-1], other[::-1])
    return rendered[-shared] if shared else None
