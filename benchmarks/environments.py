"""Rollouts in environments per second: FrozenLake with a model that answers immediately, compared with verifiers and with
a loop without a model.
"""

import time
from typing import Any

import gymnasium

from agent_runtime.environments.hosted.frozen_lake import random_map
from benchmarks.conversation import Subject
from benchmarks.instant_model import NAME, instant_model
from benchmarks.jobs import endpoint, rollout_job
from benchmarks.measuring import memory_folder
from benchmarks.peers import VERIFIERS_PROGRAMS, install
from benchmarks.report import Row, Target, comparison

MAPS = 40
ROLLOUTS = 32  # for each map
STEPS = 10  # at most, as in ROLL's examples
AT_ONCE = 256
PEER_MAPS, PEER_ROLLOUTS, PEER_AT_ONCE = 2, 2, 2
LEAST = Target("at least", 5)
ACTION = "Right"


def measure() -> list[Row]:
    """Return rollouts per second of this project, of verifiers, and of a Gymnasium loop without any model."""
    with instant_model(1, text=f"<answer>{ACTION}</answer>") as base_url:
        ours = _ours(base_url)
        with Subject("benchmarks.subjects.verifiers_lake", install(VERIFIERS_PROGRAMS)) as peer:
            question = {"base_url": base_url, "model": NAME, "at_once": PEER_AT_ONCE, "steps": STEPS}
            peer.ask(maps=1, rollouts=1, **question)  # uv creates the program's environment at its first start
            theirs = peer.ask(maps=PEER_MAPS, rollouts=PEER_ROLLOUTS, **question)
    rate = MAPS * ROLLOUTS / ours["wall_seconds"]
    their_rate = theirs["rollouts"] / theirs["wall_seconds"]
    bare = _bare_loop()
    named = f"verifiers {VERIFIERS_PROGRAMS.version}"
    return [
        comparison("rollouts a second, 40 maps × 32", rate, "rollouts/s", named, their_rate, LEAST),
        Row("the same in a Gymnasium loop, no model", bare, "rollouts/s"),
        Row("processor time of a turn", ours["cpu_seconds"] / ours["turns"] * 1e3, "ms"),
    ]


def _ours(base_url: str) -> dict[str, Any]:
    with Subject("benchmarks.subjects.engine") as subject, memory_folder() as folder:

        def job(name: str, maps: int, rollouts: int) -> dict[str, Any]:
            lake = {"id": "FrozenLake", "groups": maps, "maxSteps": STEPS, "config": {"is_slippery": False}}
            return rollout_job(
                str(folder / name),
                tasks={"environments": [lake]},
                model=endpoint(base_url),
                group_size=rollouts,
                concurrency=AT_ONCE,
                agent={"type": "Environment", "tools": [], "maxTurns": 1000},
            ).wire()

        subject.ask(job=job("warm", 1, 8))
        return subject.ask(job=job("measured", MAPS, ROLLOUTS))


def _bare_loop() -> float:
    started = time.perf_counter()
    for seed in range(MAPS):
        tiles = random_map(4, 0.8, seed)
        game = gymnasium.make(
            "FrozenLake-v1", desc=[tiles[row : row + 4] for row in range(0, 16, 4)], is_slippery=False
        )
        for _ in range(ROLLOUTS):
            game.reset(seed=seed)
            for _ in range(STEPS):
                if game.step(2)[2]:
                    break
    return MAPS * ROLLOUTS / (time.perf_counter() - started)
