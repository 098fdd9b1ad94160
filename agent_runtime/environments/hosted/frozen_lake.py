"""FrozenLake with a random map. For equal seeds, maps equal ROLL's and slipping equals Gymnasium's. Maps are drawn from
the seed until one has a path from start to goal, which can be on any tiles. On slippery ice, a step goes in the
intended direction with probability 1/3, else to one of the two sides (Gymnasium's FrozenLake-v1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_runtime.environments.hosted.game import GameError, Move, Start, action_number, instruction, lookup

ACTIONS = {0: "Left", 1: "Down", 2: "Right", 3: "Up"}
DIRECTIONS = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}
PLAYER, ICE, HOLE, GOAL, IN_HOLE, ON_GOAL = range(6)
SYMBOLS = {PLAYER: "P", ICE: "_", HOLE: "O", GOAL: "G", IN_HOLE: "X", ON_GOAL: "√"}
VOCABULARY = {"P": "player", "_": "ice", "O": "hole", "G": "goal", "X": "player in a hole", "√": "player on the goal"}
RULES = "You walk over a frozen lake. Reach the goal, and keep out of the holes."
SLIPPERY = " The ice is slippery: a step may carry you to one side of where you wanted to go."


class FrozenLake:
    """`size` × `size` tiles, each frozen with probability `p`. The goal gives reward 1; goal and holes end the episode.

    `desc` is a user-defined map in Gymnasium's format: rows of S, F, H and G. Then the seed only affects slipping.
    """

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
        desc: Sequence[str] | None = None,
    ) -> None:
        self._given = None if desc is None else checked_map(desc)
        size = size if desc is None else len(desc)
        if size < 2 or not 0 < p <= 1:
            raise GameError(f"FrozenLake: size {size} and p {p} allow no map; expected size from 2 and p in (0, 1]")
        self._size, self._p, self._slippery = size, p, is_slippery
        self._symbols, self._actions = lookup(grid_lookup, SYMBOLS), lookup(action_lookup, ACTIONS)
        rules = RULES + (SLIPPERY if is_slippery else "") if env_instruction is None else env_instruction
        self._instruction = instruction(rules, VOCABULARY if grid_vocab is None else grid_vocab, self._actions)

    def reset(self, seed: int) -> Start:
        self._map = self._given or random_map(self._size, self._p, seed)
        start = self._map.index("S")
        self._row, self._column = divmod(start, self._size)
        self._ice = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._ice.random()  # Gymnasium draws the start among all start tiles; here there is only one
        return Start(self._text(), self._instruction)

    def step(self, action: str | None) -> Move:
        number = action_number(action, self._actions)
        if number is None or number not in DIRECTIONS:
            return Move(self._text(), 0.0, valid=False, effective=False, success=self._tile() == "G")
        before = (self._row, self._column)
        if self._tile() not in "GH":
            rows, columns = DIRECTIONS[self._slip(number)]
            self._row = min(max(self._row + rows, 0), self._size - 1)
            self._column = min(max(self._column + columns, 0), self._size - 1)
        tile = self._tile()
        return Move(
            self._text(),
            1.0 if tile == "G" and before != (self._row, self._column) else 0.0,
            terminated=tile in "GH",
            effective=before != (self._row, self._column),
            success=tile == "G",
        )

    def _slip(self, number: int) -> int:
        if not self._slippery:
            return number
        drawn = float(self._ice.random())
        return (number + (-1 if drawn < 1 / 3 else 0 if drawn < 2 / 3 else 1)) % 4

    def _tile(self) -> str:
        return self._map[self._row * self._size + self._column]

    def _text(self) -> str:
        cells = [{"F": ICE, "S": ICE, "H": HOLE, "G": GOAL}[tile] for tile in self._map]
        cells[self._row * self._size + self._column] = {"H": IN_HOLE, "G": ON_GOAL}.get(self._tile(), PLAYER)
        shown = [self._symbols.get(cell, "?") for cell in cells]
        return "\n".join("".join(shown[first : first + self._size]) for first in range(0, len(shown), self._size))


def checked_map(desc: Sequence[str]) -> str:
    """Return a user-defined map, row by row in one text. Raises GameError."""
    tiles = "".join(desc)
    square = len(desc) > 1 and all(len(row) == len(desc) for row in desc)
    if not square or set(tiles) - set("SFHG") or tiles.count("S") != 1 or not _has_path(tiles, len(desc)):
        raise GameError(
            f"FrozenLake: desc {list(desc)} is not a valid map; expected as many rows as columns, of F and H, "
            "one S, and a G to which a path leads"
        )
    return tiles


def random_map(size: int, p: float, seed: int) -> str:
    """Return the map of a seed, row by row: S start, G goal, F ice, H hole. Random draws have ROLL's order."""
    drawn = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    while True:
        board = drawn.choice(["F", "H"], (size, size), p=[p, 1 - p])
        start, goal = drawn.integers(size, size=2), drawn.integers(size, size=2)
        if (start == goal).all():
            continue
        board[tuple(start)], board[tuple(goal)] = "S", "G"
        tiles = "".join(str(tile) for tile in board.ravel())
        if _has_path(tiles, size):
            return tiles


def _has_path(tiles: str, size: int) -> bool:
    waiting, seen = [tiles.index("S")], set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        row, column = divmod(place, size)
        for rows, columns in DIRECTIONS.values():
            if 0 <= row + rows < size and 0 <= column + columns < size:
                neighbour = (row + rows) * size + column + columns
                if tiles[neighbour] == "G":
                    return True
                if tiles[neighbour] == "F":
                    waiting.append(neighbour)
    return False
