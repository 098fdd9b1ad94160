"""Interface of an environment with text actions and observations. This folder also runs inside a sandbox, so it imports
no other parts of this repository and supports Python 3.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class GameError(Exception):
    """An environment cannot be created: it is unknown, not installed, or rejects its options. The message says which."""


@dataclass(frozen=True)
class Start:
    """Result of a reset."""

    observation: str
    instruction: str = ""
    """Rules and actions, shown once."""


@dataclass(frozen=True)
class Move:
    """Result of an action."""

    observation: str
    reward: float
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    """Whether the action exists."""
    effective: bool | None = None
    """Whether the action changed the state; None if the environment does not report it."""
    success: bool | None = None
    """Whether the goal is reached; None if the environment does not report it."""


class Game(Protocol):
    """One environment. After `reset`, it is a function of its seed and the actions so far."""

    def reset(self, seed: int) -> Start | None:
        """Begin. None: there is no episode for that seed (a dataset has ended)."""

    def step(self, action: str | None) -> Move:
        """Take an action; None represents an answer without one. An unknown action is not an error; its move is not
        `valid`.
        """


def lookup(given: Mapping[Any, str] | None, standard: Mapping[int, str]) -> dict[int, str]:
    """Return a table from the options, with numeric keys, which JSON stores as text; the default table if none is
    given.
    """
    return dict(standard) if given is None else {int(key): value for key, value in given.items()}


def instruction(rules: str, vocabulary: Mapping[str, str], actions: Mapping[int, str]) -> str:
    """Return rules, symbols and actions as one text."""
    symbols = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in vocabulary.items())
    return f"{rules}\nSymbols: {symbols}\nActions: {', '.join(actions.values())}"


def action_number(action: str | None, actions: Mapping[int, str]) -> int | None:
    """Return the number of an action by its name, in any case; None for an unknown name."""
    wanted = (action or "").strip().lower()
    return next((number for number, name in actions.items() if name.lower() == wanted), None)
