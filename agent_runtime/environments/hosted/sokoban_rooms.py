"""Random Sokoban rooms that can be solved: the rooms of ROLL and gym-sokoban, seed for seed.

Made as Weber et al. 2017 (arXiv 1707.06203, appendix) describe: a random walk carves the floor, boxes are set on their
targets, and the game is played backwards, pulling boxes, in a depth-first search for the state whose boxes were pulled
most often and farthest. ROLL then lets the player walk up to three steps away. The draws and their order are theirs.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np

from agent_runtime.environments.hosted.game import GameError

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER = range(6)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
TRIES = 4  # rooms drawn before another seed is taken
SEEDS = 100  # taken before no room is believed to exist
MOST_STATES = 300_000  # of one search
TURN_PROBABILITY = 0.35
# What a walker digs around itself: a row, a column, or a corner.
_BRUSHES = (
    ((1, 0), (1, 1), (1, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 0), (2, 1)),
    ((1, 1), (1, 2), (2, 1)),
)
_DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))


@dataclass(frozen=True)
class Room:
    """Cells row by row: what cannot move (walls, floor, targets), and what stands there now."""

    width: int
    fixed: tuple[int, ...]
    now: tuple[int, ...]


class _NoRoom(Exception):
    """These draws give no room with a box to push."""


def random_room(rows: int, columns: int, boxes: int, search_depth: int, seed: int) -> Room:
    """The room of a seed; where its draws give none, that of a seed derived from it. Raises GameError where none does."""
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
    """The best state found, and how far its boxes are from their targets, all together; 0 where none could be pulled."""
    targets = tuple(place for place, cell in enumerate(fixed) if cell == TARGET)
    offsets = [rows * columns + cols for rows, cols in MOVES]
    best, best_score, best_distance = begin, -1, 0
    seen: set[bytes] = set()
    # A state, where the box of each target is, changes of the pulled box, the box pulled last (-1: none), and depth left.
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
