"""Matches wildcards without backtracking, so that no pattern of a task takes exponential time."""

from collections.abc import Callable, Iterable, Sequence

Positions = frozenset[int]
Step = Callable[[str, Positions], Positions]
"""Maps the positions in a text at which a part of a pattern may start to those at which it may end."""


def one(accepts: Callable[[str], bool]) -> Step:
    """Match one accepted character."""

    def step(text: str, starts: Positions) -> Positions:
        return frozenset(at + 1 for at in starts if at < len(text) and accepts(text[at]))

    return step


def many(accepts: Callable[[str], bool]) -> Step:
    """Match any number of accepted characters."""

    def step(text: str, starts: Positions) -> Positions:
        ends: set[int] = set()
        for start in sorted(starts):
            at = start
            while at not in ends:
                ends.add(at)
                if at == len(text) or not accepts(text[at]):
                    break
                at += 1
        return frozenset(ends)

    return step


def literal(character: str) -> Step:
    """Match one character."""
    return one(lambda other: other == character)


def folders(text: str, starts: Positions) -> Positions:
    """Match any number of whole folders: nothing, or everything up to some slash."""
    if not starts:
        return starts
    after_slash = (at + 1 for at in range(min(starts), len(text)) if text[at] == "/")
    return starts | frozenset(after_slash)


def ends(steps: Iterable[Step], text: str, start: int = 0) -> Positions:
    """Return all positions at which a match that starts at `start` may end."""
    positions = frozenset({start})
    for step in steps:
        positions = step(text, positions)
        if not positions:
            break
    return positions


def matches_all(steps: Sequence[Step], text: str) -> bool:
    """Return whether the steps match the whole text."""
    return len(text) in ends(steps, text)
