"""What a plugin is: any object that has methods named like hooks (hooks.py). What they are given, and the five kinds.

A method may be `async` or plain, and takes those of the hook's arguments that it names. A kind is a plugin that decides or
finds something out, by one method of its own; its class here says which, and need not be inherited from.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.recording.messages import fold
from rollout_api.records import Message, Observation, Record, Result, Verdict
from rollout_api.tasks import Task


@dataclass(frozen=True)
class GroupInfo:
    """The rollouts of one task."""

    number: int
    task: Task
    size: int


@dataclass(frozen=True)
class RolloutInfo:
    """One attempt at one rollout. `task` is as the plugins that change tasks left it."""

    index: int
    group: int
    member: int
    attempt: int
    seed: int
    task: Task


@dataclass(frozen=True)
class ToolUse:
    """A tool call of the model's, and what came of it; None where nothing was recorded."""

    call: ToolCall
    result: Observation | None


@dataclass(frozen=True)
class FinishedRollout:
    """A Completed rollout, before it is sealed."""

    rollout: RolloutInfo
    result: Result
    verdict: Verdict | None
    records: Sequence[Record]

    @property
    def messages(self) -> list[Message]:
        """The conversation as it ended, in OpenAI's form."""
        turns = fold(self.records)
        return turns[-1].conversation() if turns else []

    @property
    def tool_uses(self) -> list[ToolUse]:
        """All tool calls in order."""
        uses: list[ToolUse] = []
        for turn in fold(self.records):
            results = {result.call_id: result for result in turn.observations}
            calls = ModelReply(turn.response.message, "").tool_calls if turn.response else []
            uses += [ToolUse(call, results.get(call.id)) for call in calls]
        return uses


@dataclass(frozen=True)
class Refuse:
    """A tool call is not to be run. The model is told why."""

    reason: str


class RolloutManager(ABC):
    """Ends a group early."""

    @abstractmethod
    async def should_stop_group(self, group: GroupInfo, results: Sequence[Result]) -> str | None:
        """See `Hooks.should_stop_group`."""


class EnvironmentModifier(ABC):
    """Changes a task before its sandbox is asked for."""

    @abstractmethod
    async def modify_task(self, rollout: RolloutInfo, task: Task) -> Task | None:
        """See `Hooks.modify_task`."""


class ActionFilter(ABC):
    """Refuses or changes tool calls before they run."""

    @abstractmethod
    async def filter_tool_call(self, rollout: RolloutInfo, call: ToolCall) -> Refuse | ToolCall | None:
        """See `Hooks.filter_tool_call`."""


class EpisodeEvaluator(ABC):
    """Gives scores beside the verdict."""

    @abstractmethod
    async def evaluate_rollout(self, finished: FinishedRollout) -> Mapping[str, float]:
        """See `Hooks.evaluate_rollout`."""


class TrajectoryAnalyzer(ABC):
    """Says something about a trajectory."""

    @abstractmethod
    async def analyze_trajectory(self, finished: FinishedRollout) -> Mapping[str, Any]:
        """See `Hooks.analyze_trajectory`."""


KINDS: Mapping[str, str] = {
    kind.__name__: next(iter(kind.__abstractmethods__))
    for kind in (RolloutManager, EnvironmentModifier, ActionFilter, EpisodeEvaluator, TrajectoryAnalyzer)
}
"""The method that makes a plugin one of its kind."""
