"""What an environment is here: text in, text out. Everything in this folder also runs alone, inside a sandbox.

So nothing here imports anything else of this repository, and all of it runs on Python 3.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class GameError(Exception):
    """An environment cannot be made: it is unknown, not installed, or refuses its options. The message says which."""


@dataclass(frozen=True)
class Start:
    """What a reset gives."""

    observation: str
    instruction: str = ""
    """Rules and actions, told once."""


@dataclass(frozen=True)
class Move:
    """What an action comes to."""

    observation: str
    reward: float
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    """The action was one that the environment knows."""
    effective: bool | None = None
    """It changed something; None where the environment does not say."""
    success: bool | None = None
    """The goal is reached; None where the environment does not say."""


class Game(Protocol):
    """One environment. After `reset`, it is a function of its seed and the actions so far."""

    def reset(self, seed: int) -> Start | None:
        """Begin. None: there is nothing under that seed (a data set has ended)."""

    def step(self, action: str | None) -> Move:
        """Take an action; None stands for an answer without one. Unknown actions are not errors, but not `valid`."""


def lookup(given: Mapping[Any, str] | None, standard: Mapping[int, str]) -> dict[int, str]:
    """A table of the options: its keys are numbers, which are text in JSON. The standard one where none is given."""
    return dict(standard) if given is None else {int(key): value for key, value in given.items()}


def instruction(rules: str, vocabulary: Mapping[str, str], actions: Mapping[int, str]) -> str:
    """Rules, symbols and actions as one text."""
    symbols = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in vocabulary.items())
    return f"{rules}\nSymbols: {symbols}\nActions: {', '.join(actions.values())}"


def action_number(action: str | None, actions: Mapping[int, str]) -> int | None:
    """The number of an action by its name, in any case; None where there is none of that name."""
    wanted = (action or "").strip().lower()
    return next((number for number, name in actions.items() if name.lower() == wanted), None)
