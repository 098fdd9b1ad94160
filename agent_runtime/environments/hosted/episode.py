"""An episode as a function of its environment's description and the actions so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agent_runtime.environments.hosted.game import Game, GameError, Move

BUILT_IN = ("FrozenLake", "Sokoban")


def make_game(name: str, config: dict[str, Any]) -> Game:
    """Create the environment with that id. Raises GameError."""
    if name not in BUILT_IN:
        from agent_runtime.environments.hosted.gymnasium_game import make_gymnasium_game

        return make_gymnasium_game(name, config)
    try:
        from agent_runtime.environments.hosted.frozen_lake import FrozenLake
        from agent_runtime.environments.hosted.sokoban import Sokoban
    except ImportError as error:
        raise GameError(f"{name} needs numpy: pip install 'agent-rollouts[environments]'") from error
    try:
        return FrozenLake(**config) if name == "FrozenLake" else Sokoban(**config)
    except TypeError as error:
        raise GameError(f"{name}: config is invalid: {error}") from error


class Episode:
    """One game, starting at its reset. `described` has id, seed, maxSteps, formatPenalty and config, as in a manifest."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._described = described
        self._game = make_game(described["id"], described.get("config", {}))
        self._taken = 0
        self._over = False

    def start(self) -> dict[str, Any]:
        """Reset: return `{observation, instruction}`; `observation` is None if there is no episode for that seed."""
        start = self._game.reset(int(self._described["seed"]))
        if start is None:
            self._over = True
            return {"observation": None, "instruction": ""}
        return asdict(start)

    def steps(self, actions: Sequence[str | None]) -> list[dict[str, Any]]:
        """Take these actions in order; return a Move for each. Actions after the end have no effect."""
        return [asdict(self._step(action)) for action in actions]

    def try_step(self) -> None:
        """Take any valid action, to detect a broken `step` before the first rollout."""
        self._step(getattr(self._game, "any_action", None))

    def _step(self, action: str | None) -> Move:
        if self._over:
            return Move("The episode is over.", 0.0, terminated=True, valid=False)
        move = self._game.step(action)
        self._taken += 1
        reward = move.reward if move.valid else move.reward + float(self._described["formatPenalty"])
        if not math.isfinite(reward):
            raise GameError(
                f"environment {self._described['id']!r} returned the reward {reward}, expected a finite number"
            )
        truncated = move.truncated or (not move.terminated and self._taken >= int(self._described["maxSteps"]))
        self._over = move.terminated or truncated
        return Move(move.observation, reward, move.terminated, truncated, move.valid, move.effective, move.success)
