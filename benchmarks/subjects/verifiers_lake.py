"""FrozenLake in verifiers 0.4: an Env steps the game and the `null` harness calls the model, as in verifiers' textarena.

Runs in its own virtual environment. The game is the same class as ours.
"""

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]

from agent_runtime.environments.hosted.frozen_lake import FrozenLake
from benchmarks.conversation import answer_questions
from benchmarks.measuring import Meter

__all__ = ["LakeEnv", "LakeTaskset"]
ACTION = "Right"


class LakeData(vf.TaskData):  # type: ignore[misc]
    """A map, identified by its seed."""

    seed: int


class LakeTask(vf.Task[LakeData]):  # type: ignore[misc]
    """One map."""


class LakeConfig(vf.TasksetConfig):  # type: ignore[misc]
    """A number of maps."""

    maps: int = 1


class LakeTaskset(vf.Taskset[LakeTask, LakeConfig]):  # type: ignore[misc]
    """The maps of the first seeds."""

    def load(self) -> Iterator[LakeTask]:
        for seed in range(self.config.maps):
            start = FrozenLake(is_slippery=False).reset(seed)
            prompt = f"{start.instruction}\n{start.observation}"
            yield LakeTask(LakeData(name=f"lake-{seed}", prompt=prompt, seed=seed), self.config.task)


class LakeEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class LakeEnv(vf.Env[LakeEnvConfig]):  # type: ignore[misc]
    """Makes one step of the game with every reply."""

    async def run(self, task: Any, agents: Any) -> None:
        """One episode of at most `LAKE_STEPS` steps."""
        game = FrozenLake(is_slippery=False)
        game.reset(task.data.seed)
        total = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for step in range(int(os.environ["LAKE_STEPS"])):
                if segment.terminated:
                    raise RuntimeError(f"the conversation ended after {step} steps")
                move = game.step(ACTION if f"<answer>{ACTION}</answer>" in segment.last_reply else None)
                if not move.valid:
                    raise RuntimeError(f"the model said {segment.last_reply!r}")
                total += move.reward
                if move.terminated or step + 1 == int(os.environ["LAKE_STEPS"]):
                    break
                segment = await interaction.turn(move.observation)
        interaction.trace.record_reward("reward", total)


async def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of rollouts of each map. The question is {base_url, model, maps, rollouts, at_once, steps}."""
    from verifiers.v1.utils.loaders import load_environment  # type: ignore[import-not-found]

    os.environ.update(BENCHMARK_KEY="none", LAKE_STEPS=str(question["steps"]))
    env = load_environment(LakeEnvConfig(taskset={"id": "verifiers-lake", "maps": question["maps"]}))
    client = vf.EvalClientConfig(base_url=question["base_url"], api_key_var="BENCHMARK_KEY")
    context = vf.ModelContext(client=client, model=question["model"], sampling=vf.SamplingConfig())
    gate = asyncio.Semaphore(question["at_once"])
    async with env.serving():
        meter = Meter()
        slots = [slot for task in env.taskset for slot in env.slots(task, question["rollouts"])]
        episodes = await asyncio.gather(*(env.run_slot(slot, context, gate) for slot in slots))
        cost = meter.read()
    if failed := [episode for episode in episodes if not episode.ok]:
        raise RuntimeError(f"{len(failed)} episodes failed, the first: {failed[0].errors or failed[0].traces}")
    return {**asdict(cost), "rollouts": len(episodes)}


if __name__ == "__main__":
    # verifiers finds a task set by the name of its module; uv is in the interpreter's folder.
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    asyncio.run(answer_questions(importlib.import_module("verifiers_lake").measure))
