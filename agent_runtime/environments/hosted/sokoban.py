"""Sokoban with a random room: options and rooms of ROLL, rules and rewards of gym-sokoban.

Rewards: -0.1 for each step, 1 for a box pushed onto a target, -1 for a box pushed off, and 10 more for the last box.
Rooms are solvable, and equal those of ROLL and gym-sokoban for equal seeds. They are generated as described by Weber et
al. 2017 (arXiv 1707.06203, appendix): a random walk creates the floor, boxes are placed on targets, and a depth-first
search plays backwards, pulling boxes, for the state whose boxes were pulled most often and farthest. ROLL then lets the
player walk up to three steps away. All random draws have the same order as in ROLL.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_runtime.environments.hosted.game import GameError, Move, Start, action_number, instruction, lookup

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER = range(6)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
TRIES = 4  # rooms drawn before another seed is used
SEEDS = 100  # tried before the search for a room fails
MOST_STATES = 300_000  # limit of one search
TURN_PROBABILITY = 0.35
# The cells that a walker digs around itself: a row, a column, or a corner.
_BRUSHES = (
    ((1, 0), (1, 1), (1, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 0), (2, 1)),
    ((1, 1), (1, 2), (2, 1)),
)
_DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))
ACTIONS = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
PLAYER_ON_TARGET = 6
SYMBOLS = {0: "#", FLOOR: "_", TARGET: "O", BOX_ON_TARGET: "√", BOX: "X", PLAYER: "P", PLAYER_ON_TARGET: "S"}
VOCABULARY = {
    "#": "wall",
    "_": "floor",
    "O": "target",
    "√": "box on a target",
    "X": "box",
    "P": "player",
    "S": "player on a target",
}
RULES = (
    "You play Sokoban: push every box onto a target. Walking into a box pushes it on, if nothing is behind it. A box "
    "cannot be pulled, and two cannot be pushed at once."
)


class Sokoban:
    """A room of `dim_room` cells, walls included, with `num_boxes` boxes. The episode ends when all of them are on
    targets.

    `search_depth` limits the search for a room: large values with many boxes take seconds.
    """

    def __init__(
        self,
        dim_room: Sequence[int] = (10, 10),
        num_boxes: int = 4,
        search_depth: int = 300,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
    ) -> None:
        if len(dim_room) != 2 or min(dim_room) < 5 or not 0 < num_boxes <= min(dim_room) or search_depth < 2:
            raise GameError(
                f"Sokoban: dim_room {list(dim_room)}, num_boxes {num_boxes} and search_depth {search_depth} allow no "
                "room; expected two sides from 5, at most as many boxes as the shorter side, and a depth from 2"
            )
        self._rows, self._columns = dim_room
        self._boxes, self._depth = num_boxes, search_depth
        self._symbols, self._actions = lookup(grid_lookup, SYMBOLS), lookup(action_lookup, ACTIONS)
        self._instruction = instruction(
            RULES if env_instruction is None else env_instruction,
            VOCABULARY if grid_vocab is None else grid_vocab,
            self._actions,
        )

    def reset(self, seed: int) -> Start:
        room = random_room(self._rows, self._columns, self._boxes, self._depth, seed)
        self._fixed, self._now = room.fixed, list(room.now)
        self._on_target = 0
        return Start(self._text(), self._instruction)

    def step(self, action: str | None) -> Move:
        """Walk or push; an unknown action only counts as a step."""
        number = action_number(action, self._actions)
        moved = number in ACTIONS and self._walk(MOVES[number - 1])
        open_targets = sum(
            fixed == TARGET and cell not in (BOX_ON_TARGET, BOX)
            for fixed, cell in zip(self._fixed, self._now, strict=True)
        )
        before, self._on_target = self._on_target, self._boxes - open_targets
        reward = -0.1 + (self._on_target > before) - (self._on_target < before) + 10 * (open_targets == 0)
        return Move(
            self._text(),
            reward,
            terminated=open_targets == 0,
            valid=number is not None,
            effective=moved,
            success=open_targets == 0,
        )

    def _walk(self, move: tuple[int, int]) -> bool:
        offset = move[0] * self._columns + move[1]
        place = self._now.index(PLAYER)
        ahead, behind_it = place + offset, place + 2 * offset
        if self._now[ahead] in (BOX, BOX_ON_TARGET) and self._now[behind_it] in (FLOOR, TARGET):
            self._now[behind_it] = BOX_ON_TARGET if self._fixed[behind_it] == TARGET else BOX
        elif self._now[ahead] not in (FLOOR, TARGET):
            return False
        self._now[ahead], self._now[place] = PLAYER, self._fixed[place]
        return True

    def _text(self) -> str:
        cells = [
            PLAYER_ON_TARGET if cell == PLAYER and fixed == TARGET else cell
            for cell, fixed in zip(self._now, self._fixed, strict=True)
        ]
        shown = [self._symbols.get(cell, "?") for cell in cells]
        return "\n".join("".join(shown[first : first + self._columns]) for first in range(0, len(shown), self._columns))


@dataclass(frozen=True)
class Room:
    """Cells row by row: fixed ones (walls, floor, targets), and the current contents."""

    width: int
    fixed: tuple[int, ...]
    now: tuple[int, ...]


class _NoRoom(Exception):
    """The random numbers of a seed give no room with a box to push."""


def random_room(rows: int, columns: int, boxes: int, search_depth: int, seed: int) -> Room:
    """Return the room of a seed, or of a derived seed if its draws give no room. Raises GameError if none is found."""
    for _ in range(SEEDS):
        try:
            return _room(rows, columns, boxes, search_depth, random.Random(seed), np.random.RandomState(seed % 2**32))
        except _NoRoom:
            seed = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")
    raise GameError(
        f"Sokoban: no room of {rows} × {columns} with {boxes} boxes was found at search_depth {search_depth}; make it "
        "larger, take fewer boxes, or search deeper"
    )


def _room(rows: int, columns: int, boxes: int, depth: int, walk: random.Random, places: np.random.RandomState) -> Room:
    for _ in range(TRIES):
        level = _floor(rows, columns, walk)
        _place(level, boxes, places)
        fixed = tuple(FLOOR if cell == PLAYER else cell for cell in level)
        begin = bytes(BOX if cell == TARGET else cell for cell in level)
        state, pulled = _play_backwards(begin, fixed, columns, depth)
        if pulled:
            now = [BOX if cell == BOX_ON_TARGET else cell for cell in state]
            _walk_away(now, fixed, columns, 0.8 if pulled == 1 else 0.5, walk)
            return Room(columns, fixed, tuple(now))
    raise _NoRoom


def _floor(rows: int, columns: int, walk: random.Random) -> list[int]:
    direction = walk.sample(_DIRECTIONS, 1)[0]
    row, column = walk.randint(1, rows - 1), walk.randint(1, columns - 1)
    dug: set[tuple[int, int]] = set()
    for _ in range(int(1.7 * (rows + columns))):
        if walk.random() < TURN_PROBABILITY:
            direction = walk.sample(_DIRECTIONS, 1)[0]
        row = max(min(row + direction[0], rows - 2), 1)
        column = max(min(column + direction[1], columns - 2), 1)
        dug.update((row - 1 + down, column - 1 + right) for down, right in walk.sample(_BRUSHES, 1)[0])
    inside = {(r, c) for r, c in dug if 0 < r < rows - 1 and 0 < c < columns - 1}
    return [FLOOR if divmod(place, columns) in inside else WALL for place in range(rows * columns)]


def _place(level: list[int], boxes: int, places: np.random.RandomState) -> None:
    free = [place for place, cell in enumerate(level) if cell == FLOOR]
    if len(free) <= boxes + 1:
        raise _NoRoom
    for thing in [PLAYER, *[TARGET] * boxes]:
        level[free.pop(int(places.randint(len(free))))] = thing


def _play_backwards(begin: bytes, fixed: tuple[int, ...], columns: int, depth: int) -> tuple[bytes, int]:
    """Return the best state, and the sum of its boxes' distances from their targets; 0 if no box could be pulled."""
    targets = tuple(place for place, cell in enumerate(fixed) if cell == TARGET)
    offsets = [rows * columns + cols for rows, cols in MOVES]
    best, best_score, best_distance = begin, -1, 0
    seen: set[bytes] = set()
    # Each entry: state, position of each target's box, number of changes of the pulled box, last pulled box (-1: none),
    # remaining depth.
    waiting = [(begin, targets, 0, -1, depth)]
    while waiting:
        state, boxes, changes, last, left = waiting.pop()
        if left <= 1 or len(seen) >= MOST_STATES or state in seen:
            continue
        seen.add(state)
        distance = sum(_distance(box, target, columns) for box, target in zip(boxes, targets, strict=True))
        score = changes * distance if state.count(TARGET) == len(targets) else 0
        if score > best_score:
            best, best_score, best_distance = state, score, distance
        player = state.index(PLAYER)
        for offset in reversed(offsets):
            if state[player + offset] in (FLOOR, TARGET):
                waiting.append(_pull(state, fixed, boxes, changes, last, left - 1, player, offset))
    return best, best_distance


def _pull(
    state: bytes,
    fixed: tuple[int, ...],
    boxes: tuple[int, ...],
    changes: int,
    last: int,
    left: int,
    player: int,
    offset: int,
) -> tuple[bytes, tuple[int, ...], int, int, int]:
    after = bytearray(state)
    after[player], after[player + offset] = fixed[player], PLAYER
    behind = player - offset
    if state[behind] in (BOX_ON_TARGET, BOX):
        after[player], after[behind] = BOX_ON_TARGET, fixed[behind]
        pulled = boxes.index(behind)
        boxes = (*boxes[:pulled], player, *boxes[pulled + 1 :])
        changes, last = changes + (pulled != last), pulled
    return bytes(after), boxes, changes, last, left


def _distance(one: int, other: int, columns: int) -> int:
    return abs(one // columns - other // columns) + abs(one % columns - other % columns)


def _walk_away(now: list[int], fixed: tuple[int, ...], columns: int, probability: float, walk: random.Random) -> None:
    if walk.random() > probability:
        return
    place = now.index(PLAYER)
    visited = [place]
    for step in range(3):
        free = [
            place + rows * columns + cols
            for rows, cols in MOVES
            if now[place + rows * columns + cols] in (FLOOR, TARGET) and place + rows * columns + cols not in visited
        ]
        if not free:
            return
        now[place], place = fixed[place], walk.choice(free)
        now[place] = PLAYER
        visited.append(place)
        if step == 2 or walk.random() > 0.5:
            return
