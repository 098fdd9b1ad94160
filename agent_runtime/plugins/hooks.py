"""The hooks as pluggy knows them: their names, their arguments, the order in which they are called, what comes of them.

Of one hook the plugins are called one after another: in the order of the manifest, then those of the Python client;
pluggy's own `tryfirst` and `trylast` (`hook(tryfirst=True)` before a method) move one to the front or to the end.

`key` names the occasion, such as `<run>/rollout-<index>-<attempt>:turn-<t>:call-<c>`. When a runner died before the rollout
was sealed, the next one may call the same hook again, with the same key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.base import FinishedRollout, GroupInfo, Refuse, RolloutInfo
from rollout_api.records import CommandVerdict, Observation, Result
from rollout_api.tasks import Task

PROJECT = "agent_rollouts"
spec = pluggy.HookspecMarker(PROJECT)
hook = pluggy.HookimplMarker(PROJECT)
"""Decorates a hook's method to say `tryfirst=True` or `trylast=True` of it; a method without it is taken by its name."""


class Hooks:
    """All hooks, in the order of a rollout. Those that begin with before_ and after_ only look."""

    @spec
    def before_group(self, group: GroupInfo, key: str) -> None:
        """The first of a group's rollouts is about to start."""

    @spec
    def before_rollout(self, rollout: RolloutInfo, key: str) -> None:
        """An attempt at a rollout is about to ask for its sandbox."""

    @spec
    def modify_task(self, rollout: RolloutInfo, task: Task, key: str) -> Task | None:
        """Another task in place of this one, of the same name. It is recorded in the attempt, and used to the rollout's end.

        Where this fails the attempt is lost as an infrastructure failure, for the task is not the one that was meant.
        """

    @spec
    def filter_tool_call(self, rollout: RolloutInfo, call: ToolCall, key: str) -> Refuse | ToolCall | None:
        """Refuse a tool call, or have another one run in its place. `call.arguments` is JSON as the model wrote it.

        All calls of a turn are asked about in order before the first of them runs. Where this fails the call is refused.
        """

    @spec
    def before_tool_call(self, rollout: RolloutInfo, call: ToolCall, key: str) -> None:
        """A tool call that was not refused is about to run."""

    @spec
    def after_tool_call(self, rollout: RolloutInfo, call: ToolCall, result: Observation, key: str) -> None:
        """A tool call that was not refused has its result; called when all of the turn have."""

    @spec
    def before_verifier_command(self, rollout: RolloutInfo, command: str, key: str) -> None:
        """A verifier command is about to run."""

    @spec
    def after_verifier_command(self, rollout: RolloutInfo, command: str, result: CommandVerdict, key: str) -> None:
        """A verifier command has ended."""

    @spec
    def evaluate_rollout(self, finished: FinishedRollout, key: str) -> Mapping[str, float]:
        """Scores of a Completed rollout by name. They stand beside the reward, which is the verifier's alone."""
        raise NotImplementedError

    @spec
    def analyze_trajectory(self, finished: FinishedRollout, key: str) -> Mapping[str, Any]:
        """Anything worth knowing of a Completed rollout, as JSON."""
        raise NotImplementedError

    @spec
    def after_rollout(self, rollout: RolloutInfo, result: Result, key: str) -> None:
        """A rollout is about to be sealed, whatever its outcome."""

    @spec
    def should_stop_group(self, group: GroupInfo, results: Sequence[Result], key: str) -> str | None:
        """Why the group's other members are not needed any more, or None.

        `results` are those of its first members, in their order: the question is asked once for each member, when it and
        all before it have ended. Members that have not ended by then are Cancelled.
        """

    @spec
    def after_group(self, group: GroupInfo, results: Sequence[Result], key: str) -> None:
        """All members of a group are sealed."""


HOOKS = tuple(name for name in vars(Hooks) if not name.startswith("_"))
