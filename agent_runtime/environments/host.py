"""Interface of an episode, wherever it runs: it is started once, then takes one action at a time."""

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
"""The model's action; None if its answer had none."""


class EnvironmentFault(StrEnum):
    """Reasons of an EnvironmentFailure that an action of the policy may have caused."""

    FAILED = "EnvironmentFailed"
    HUNG = "EnvironmentHung"
    DIED = "EnvironmentDied"


NOT_LISTED = "EnvironmentNotListed"
"""Reason of an EnvironmentFailure: only a data set names the environment, which would run beside the engine."""

NO_DATA = "NoData"
"""Reason of an EnvironmentFailure: the environment has no episode for its seed."""


class EnvironmentFailure(SandboxFailure):
    """The environment hung, died or raised."""

    failed_trial = False
    """Whether the environment then failed without the policy's actions too, so that these are not the cause."""


@dataclass(frozen=True)
class Beginning:
    """Result of a reset."""

    observation: str
    instruction: str


MOST_REWARD = 1e100
"""Largest reward of one step, so that no sum of steps overflows."""


@dataclass(frozen=True)
class Move:
    """Result of an action; see `hosted.game.Move`."""

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

    async def start(self, past: Sequence[Action]) -> tuple[Beginning, list[Move]]:
        """Reset the episode, and repeat the actions that an earlier runner took; return its start and their moves, or
        only the last of these moves. Each action has the time of a step. Raises EnvironmentFailure.
        """

    async def take(self, past: Sequence[Action], action: Action, workspace: ToolWorkspace) -> list[Move]:
        """Take `action` after `past`. The last returned move is its result.

        Earlier moves are those of past actions that were repeated in a new process. Raises EnvironmentFailure.
        """

    def close(self) -> None:
        """Discard the episode."""


def described(environment: TaskEnvironment) -> dict[str, Any]:
    return environment.model_dump(
        mode="json", by_alias=True, include={"id", "seed", "max_steps", "format_penalty", "config"}
    )


def checked_reply(line: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in a host's reply. Raises EnvironmentFailure for anything else, and for a reported error."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise EnvironmentFailure(EnvironmentFault.FAILED, f"{name} did not answer with a JSON object")
    if "error" in reply:
        raise EnvironmentFailure(EnvironmentFault.FAILED, f"{name}: {reply['error']}")
    return reply


def beginning(reply: dict[str, Any], environment: TaskEnvironment) -> Beginning:
    """Return the start in a host's reply. Raises EnvironmentFailure if there is no episode for the seed."""
    match reply.get("start"):
        case {"observation": None}:
            raise EnvironmentFailure(
                NO_DATA, f"environment {environment.id} has no episode for seed {environment.seed}"
            )
        case {"observation": str(observation), "instruction": str(instruction)}:
            return Beginning(observation, instruction)
    raise EnvironmentFailure(EnvironmentFault.FAILED, f"{environment.id} did not report its start")


_MOVES = TypeAdapter(list[Move])


def moves(reply: dict[str, Any], *, at_most: int) -> list[Move]:
    """Return the moves in a host's reply. Raises EnvironmentFailure if they are malformed."""
    try:
        found = _MOVES.validate_python(reply.get("moves"))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise EnvironmentFailure(EnvironmentFault.FAILED, f"a move is malformed: {problem['msg']}") from None
    if not 0 < len(found) <= at_most:
        raise EnvironmentFailure(
            EnvironmentFault.FAILED, f"{len(found)} moves were returned, expected at most {at_most}"
        )
    return found
