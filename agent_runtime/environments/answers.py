"""Extract the action from an answer, in linear time because the policy controls the text."""

import re
from dataclasses import dataclass

ANSWER = "<answer>(.*?)</answer>"
"""Default position of an action; ROLL's own pattern."""
WHOLE_ANSWER = "^(.*)$"
GROUP = "(.*?)"
# The literal text between groups must not have these characters, which could make matching slower than linear.
_OPERATORS = re.compile(r"[][(){}|.*+?^$]")


@dataclass(frozen=True)
class AnswerForm:
    """A pattern such as `<think>(.*?)</think>\\s*<answer>(.*?)</answer>`: the last group is the action.

    It may consist of literal text, `\\s*` and `(.*?)`, or be `^(.*)$`. The result equals that of `re.search` with
    DOTALL.
    """

    pattern: str
    pieces: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, pattern: str = ANSWER) -> "AnswerForm":
        """Parse a pattern. Raises ValueError for an unsupported one."""
        if pattern == WHOLE_ANSWER:
            return cls(pattern)
        # White space before the text that ends a group is a part of the group, which is stripped. A search that begins with
        # it would start again at each character of it.
        pieces = [re.sub(r"^(\\s\*)+", "", piece) for piece in pattern.split(GROUP)]
        bare = [piece.replace(r"\s*", "") for piece in pieces]
        if len(pieces) < 2 or not all(bare) or any(_OPERATORS.search(piece) for piece in bare):
            raise ValueError(
                f"{pattern!r} is not an answer pattern; expected text and \\s* around one or more {GROUP}, or "
                f"{WHOLE_ANSWER}"
            )
        if any(re.match(r"\s+\\s\*", piece) for piece in pieces):
            raise ValueError(f"{pattern!r}: white space stands before \\s* after a group; leave it out")
        return cls(pattern, tuple(re.compile(piece) for piece in pieces))

    def action(self, answer: str) -> str | None:
        """Return the action without surrounding space; None if the answer has none."""
        if not self.pieces:
            return answer.strip() or None
        place, action = 0, ""
        for number, piece in enumerate(self.pieces):
            found = piece.search(answer, place)
            if found is None:
                return None
            action = answer[place : found.start()] if number else ""
            place = found.end()
        return action.strip()
