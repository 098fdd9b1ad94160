"""Environments as tasks: a game that is reset once and then answers one action a turn with an observation and a reward."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from rollout_api.base import ApiModel

# A built-in, a Gymnasium id (`ALE/Pong-v5`, `module:Env-v0`), or module:Class.
EnvironmentId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w./-]*(:[A-Za-z_][\w.-]*)?$", max_length=512)]

ENVIRONMENT_PROMPT = "{feedback}\n{observation}"
"""Default prompt for each turn."""


BUILT_IN = ("FrozenLake", "Sokoban")


class RunIn(StrEnum):
    """`Runner`: a process beside the engine, with the runner's files and network. `Sandbox`: the rollout's workspace."""

    RUNNER = "Runner"
    SANDBOX = "Sandbox"


class TaskEnvironment(ApiModel):
    """The environment of one task. Its reward is the sum of its steps' rewards."""

    id: EnvironmentId
    """`FrozenLake`, `Sokoban`, a registered Gymnasium id, or module:Class."""
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Seed of the reset, the same for every member of a group."""
    max_steps: Annotated[int, Field(ge=1, le=100_000)] = 20
    """Steps after which the episode ends."""
    format_penalty: Annotated[float, Field(ge=-1_000_000, le=1_000_000)] = 0
    """Added to the reward of a step whose answer contains no valid action; usually negative."""
    config: dict[str, Any] = {}
    """Options of the environment, passed unchanged."""
    run_in: RunIn = RunIn.RUNNER
    """`Sandbox` for untrusted environments. Its image needs Python 3.10 or newer and the modules that the environment
    imports.
    """
