"""Sokoban with a random room: options and rooms of ROLL, rules and rewards of gym-sokoban.

Each step costs 0.1; a box that gets onto a target gives 1, one that leaves it takes 1, the last one gives 10 more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.environments.hosted.game import GameError, Move, Start, action_number, instruction, lookup
from agent_runtime.environments.hosted.sokoban_rooms import (
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    MOVES,
    PLAYER,
    TARGET,
    random_room,
)

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
    """A room of `dim_room` cells, walls included, with `num_boxes` boxes; it ends when all of them are on targets.

    `search_depth` bounds how far the search for a room goes: large values with many boxes take seconds.
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
                f"Sokoban: dim_room {list(dim_room)}, num_boxes {num_boxes} and search_depth {search_depth} allow no room; "
                "expected two sides from 5, at most as many boxes as the shorter side, and a depth from 2"
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
        """Walk or push; without a known action only the step is counted."""
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
