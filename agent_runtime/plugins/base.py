"""The plugin interface: any object with methods named like hooks (hooks.py). A method may be `async` or not, and
receives those arguments of the hook that it declares. A plugin's kind is determined by the hook with a result that it
implements. The classes below show the kinds; inheriting from them is optional.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.recording.messages import fold, last_made
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
    """One attempt at one rollout. `task` includes the changes of plugins."""

    index: int
    group: int
    member: int
    attempt: int
    seed: int
    task: Task


@dataclass(frozen=True)
class ToolUse:
    """A tool call of the model and its result; None if none was recorded."""

    call: ToolCall
    result: Observation | None


@dataclass(frozen=True)
class FinishedRollout:
    """A Completed rollout before it is sealed."""

    rollout: RolloutInfo
    result: Result
    verdict: Verdict | None
    records: Sequence[Record]

    @property
    def messages(self) -> list[Message]:
        """Return the final conversation in OpenAI's format."""
        last = last_made(fold(self.records))
        return last.conversation() if last else []

    @property
    def tool_uses(self) -> list[ToolUse]:
        """Return all tool calls in order."""
        uses: list[ToolUse] = []
        for turn in fold(self.records):
            results = {result.call_id: result for result in turn.observations}
            calls = ModelReply(turn.response.message, "").tool_calls if turn.response else []
            uses += [ToolUse(call, results.get(call.id)) for call in calls]
        return uses


@dataclass(frozen=True)
class Refuse:
    """Result of a hook that refuses a tool call. The model gets the reason. Raises TypeError unless that is text."""

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise TypeError(f"Refuse: the reason is of type {type(self.reason).__name__}, expected text")


class RolloutManager(ABC):
    """Ends a group early."""

    @abstractmethod
    async def should_stop_group(self, group: GroupInfo, results: Sequence[Result]) -> str | None:
        """See `Hooks.should_stop_group`."""


class EnvironmentModifier(ABC):
    """Changes a task before its sandbox is requested."""

    @abstractmethod
    async def modify_task(self, rollout: RolloutInfo, task: Task) -> Task | None:
        """See `Hooks.modify_task`."""


class ActionFilter(ABC):
    """Refuses or changes tool calls before they run."""

    @abstractmethod
    async def filter_tool_call(self, rollout: RolloutInfo, call: ToolCall) -> Refuse | ToolCall | None:
        """See `Hooks.filter_tool_call`."""


class EpisodeEvaluator(ABC):
    """Adds scores to the verdict."""

    @abstractmethod
    async def evaluate_rollout(self, finished: FinishedRollout) -> Mapping[str, float]:
        """See `Hooks.evaluate_rollout`."""


class TrajectoryAnalyzer(ABC):
    """Analyses a trajectory."""

    @abstractmethod
    async def analyze_trajectory(self, finished: FinishedRollout) -> Mapping[str, Any]:
        """See `Hooks.analyze_trajectory`."""


KINDS: Mapping[str, str] = {
    kind.__name__: next(iter(kind.__abstractmethods__))
    for kind in (RolloutManager, EnvironmentModifier, ActionFilter, EpisodeEvaluator, TrajectoryAnalyzer)
}
"""The method that determines each kind."""
