"""Reading the action out of an answer: pure, and in time linear in its length, as the policy writes the text."""

import re
from dataclasses import dataclass

ANSWER = "<answer>(.*?)</answer>"
"""Where an action stands when nothing else is asked for; ROLL's own pattern."""
WHOLE_ANSWER = "^(.*)$"
GROUP = "(.*?)"
# What no piece between groups may have: it could take more than linear time on a text that is made for it.
_OPERATORS = re.compile(r"[][(){}|.*+?^$]")


@dataclass(frozen=True)
class AnswerForm:
    """A pattern such as `<think>(.*?)</think>\\s*<answer>(.*?)</answer>`: the last group is the action.

    Literal text, `\\s*` and `(.*?)` are all that it may be made of, or `^(.*)$`. Finds what `re.search` with DOTALL finds.
    """

    pattern: str
    pieces: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, pattern: str = ANSWER) -> "AnswerForm":
        """Raises ValueError for another pattern."""
        if pattern == WHOLE_ANSWER:
            return cls(pattern)
        pieces = pattern.split(GROUP)
        bare = [piece.replace(r"\s*", "") for piece in pieces]
        if len(pieces) < 2 or not all(bare) or any(_OPERATORS.search(piece) for piece in bare):
            raise ValueError(
                f"{pattern!r} is no form of an answer; expected text and \\s* around one or more {GROUP}, or {WHOLE_ANSWER}"
            )
        return cls(pattern, tuple(re.compile(piece) for piece in pieces))

    def action(self, answer: str) -> str | None:
        """The action, without the space around it; None where the answer has none."""
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
