"""The game that the policy learns (FrozenLake), and the best possible result in it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from agent_rollouts.environments import TaskEnvironment
from agent_rollouts.tasks import Task

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
"""Gymnasium's 4 × 4 map. S: start, F: frozen, H: hole, G: goal."""
SMALL = ("SFF", "FHF", "FFG")
"""Easier: a player who moves at random reaches the goal in 13 of 100 episodes, instead of 1."""
STEPS = 20
DIRECTIONS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""(columns, rows) moved by the actions left, down, right and up, in Gymnasium's order."""


def task(number: int, *, slippery: bool, tiles: Sequence[str] = MAP) -> Task:
    config: dict[str, Any] = {"desc": list(tiles), "is_slippery": slippery}
    environment = TaskEnvironment(id="FrozenLake", seed=number, max_steps=STEPS, config=config)
    return Task(name=f"lake-{number}", prompt="{feedback}\n{observation}", environment=environment)


def best_possible(*, slippery: bool) -> float:
    """Return the share of episodes in which a perfect player reaches the goal, by value iteration over the remaining
    steps.
    """
    return _value(slippery, best=True)


def at_random(*, slippery: bool) -> float:
    return _value(slippery, best=False)


def _value(slippery: bool, *, best: bool) -> float:
    tiles, size = "".join(MAP), len(MAP)
    values = np.array([float(tile == "G") for tile in tiles])
    for _ in range(STEPS):
        new = values.copy()
        for place, tile in enumerate(tiles):
            if tile in "SF":
                reached = [values[_walk(place, direction, size)] for direction in DIRECTIONS]
                # On slippery ice each of the two sideways directions is as likely as the chosen one; they are its
                # neighbours in the list of directions.
                turns = (-1, 0, 1) if slippery else (0,)
                chances = [np.mean([reached[(action + turn) % 4] for turn in turns]) for action in range(4)]
                new[place] = max(chances) if best else np.mean(chances)
        values = new
    return float(values[tiles.index("S")])


def _walk(place: int, direction: tuple[int, int], size: int) -> int:
    row, column = place // size + direction[0], place % size + direction[1]
    return min(max(row, 0), size - 1) * size + min(max(column, 0), size - 1)
