"""What drives an episode, wherever it runs: started once, then taken one action further at a time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.tools.base import ToolWorkspace
from rollout_api.environments import TaskEnvironment

Action = str | None
"""What the model chose; None where its answer had no action."""


class EnvironmentFault(StrEnum):
    """Reasons of an EnvironmentFailure that an action of the policy may have caused."""

    FAILED = "EnvironmentFailed"
    HUNG = "EnvironmentHung"
    DIED = "EnvironmentDied"


NO_DATA = "NoData"
"""Reason of an EnvironmentFailure: the environment has nothing under its seed."""


class EnvironmentFailure(SandboxFailure):
    """The environment hung, died or raised."""


@dataclass(frozen=True)
class Beginning:
    """What a reset gave."""

    observation: str
    instruction: str


MOST_REWARD = 1e100
"""Of one step, so that no sum of steps overflows."""


@dataclass(frozen=True)
class Move:
    """What an action came to; see `hosted.game.Move`."""

    observation: str
    reward: Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD, allow_inf_nan=False)]
    terminated: bool
    truncated: bool
    valid: bool
    effective: bool | None = None
    success: bool | None = None

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


class EnvironmentHost(Protocol):
    """One episode."""

    async def start(self) -> Beginning:
        """Reset it. Raises EnvironmentFailure."""

    async def take(self, past: Sequence[Action], action: Action, workspace: ToolWorkspace) -> list[Move]:
        """Take `action` after `past`. The last of the moves is its own.

        Before it are the moves of those of the past, the latest ones, that had to be taken again: in a new process, or
        after a crash. Raises EnvironmentFailure.
        """

    def close(self) -> None:
        """Forget it."""


def described(environment: TaskEnvironment) -> dict[str, Any]:
    return environment.model_dump(
        mode="json", by_alias=True, include={"id", "seed", "max_steps", "format_penalty", "config"}
    )


def checked_reply(line: bytes, name: str) -> dict[str, Any]:
    """The JSON object that a host answered. Raises EnvironmentFailure for anything else, and for an error that it tells."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise EnvironmentFailure(EnvironmentFault.FAILED, f"{name} answered with no JSON object")
    if "error" in reply:
        raise EnvironmentFailure(EnvironmentFault.FAILED, f"{name}: {reply['error']}")
    return reply


def beginning(reply: dict[str, Any], environment: TaskEnvironment) -> Beginning:
    """The start in a host's reply. Raises EnvironmentFailure where there is nothing under the seed."""
    match reply.get("start"):
        case {"observation": None}:
            raise EnvironmentFailure(NO_DATA, f"environment {environment.id} has nothing under seed {environment.seed}")
        case {"observation": str(observation), "instruction": str(instruction)}:
            return Beginning(observation, instruction)
    raise EnvironmentFailure(EnvironmentFault.FAILED, f"{environment.id} did not tell how it starts")


_MOVES = TypeAdapter(list[Move])


def moves(reply: dict[str, Any], *, at_most: int) -> list[Move]:
    """The moves in a host's reply. Raises EnvironmentFailure where they are none."""
    try:
        found = _MOVES.validate_python(reply.get("moves"))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise EnvironmentFailure(EnvironmentFault.FAILED, f"a move is malformed: {problem['msg']}") from None
    if not 0 < len(found) <= at_most:
        raise EnvironmentFailure(
            EnvironmentFault.FAILED, f"{len(found)} moves were answered, at most {at_most} were asked for"
        )
    return found
