"""Environments that misbehave on demand, and models that play: `module:Class` and `model.function` in tests."""

import asyncio
import hashlib
import os
import time
from typing import Any


class Game:
    """Counts its steps. The actions `hang`, `die` and `raise` do so; `crowded ACTION` does if its process has had another
    episode. `drift` distinguishes processes. Seeds from `limit` on have no episode. While the file `outage` exists, every
    action is what the file says, as if a service that the environment calls were away.
    """

    resets = 0
    """Episodes of this process."""

    def __init__(self, slow_reset: bool = False, drift: bool = False, limit: int = 1000, outage: str = "") -> None:
        self._slow_reset, self._drift, self._limit, self._outage = slow_reset, drift, limit, outage

    def reset(self, seed: int) -> tuple[str | None, dict[str, Any]]:
        if self._slow_reset:
            time.sleep(3600)
        self.steps = 0
        Game.resets += 1
        return f"seed {seed}" if seed < self._limit else None, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._outage and os.path.exists(self._outage):
            with open(self._outage) as file:
                action = file.read()
        if Game.resets > 1:
            action = action.removeprefix("crowded ")
        if action == "hang":
            time.sleep(3600)
        if action == "slow":
            time.sleep(1.5)
        if action == "die":
            os._exit(3)
        if action == "raise":
            raise RuntimeError("it broke")
        self.steps += 1
        # What an environment prints must not be taken for its answer.
        print(f"step {self.steps}")
        seen = f"{action} {self.steps}" + (f" in process {os.getpid()}" if self._drift else "")
        return seen, 1.0, action == "end", False, {"variables": sorted(os.environ)}


class OldGame(Game):
    """Steps like Gym before version 0.26."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:  # type: ignore[override]
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


async def wander(messages: list[dict[str, Any]], task: str, member: int, **_: Any) -> str:
    """Walk at random, in the same way for equal observations; every fifth answer has no action."""
    await asyncio.sleep(0.2)
    drawn = hashlib.sha256(f"{task}{member}{messages}".encode()).digest()[0] % 5
    return ["<answer>Left</answer>", "<answer>Down</answer>", "<answer>Right</answer>", "<answer>Up</answer>", "Hm."][
        drawn
    ]
