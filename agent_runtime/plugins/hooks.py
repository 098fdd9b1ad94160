"""The hooks for pluggy: names, arguments, order of calls, effects of results.

The plugins of one hook are called one after another: in the order of the manifest, then those of the Python client.
pluggy's `tryfirst` and `trylast` (`hook(tryfirst=True)` before a method) move one to the front or to the end.

`key` identifies the occasion, such as `<run>/rollout-<index>-<attempt>:turn-<t>:call-<c>`. If a runner dies before the
rollout is sealed, the next one may call the same hook again, with the same key.
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
"""Decorator that sets `tryfirst=True` or `trylast=True` for a hook's method; without it a method is found by its name.
"""


class Hooks:
    """All hooks, in the order of a rollout. Those named before_ and after_ only observe."""

    @spec
    def before_group(self, group: GroupInfo, key: str) -> None:
        """Called before the first of a group's rollouts starts."""

    @spec
    def before_rollout(self, rollout: RolloutInfo, key: str) -> None:
        """Called before an attempt at a rollout requests its sandbox."""

    @spec
    def modify_task(self, rollout: RolloutInfo, task: Task, key: str) -> Task | None:
        """Return another task of the same name to replace this one. It is recorded in the attempt, and used until the
        rollout ends.

        If the hook fails, the attempt ends as an infrastructure failure, because it must not run with an unchanged
        task.
        """

    @spec
    def filter_tool_call(self, rollout: RolloutInfo, call: ToolCall, key: str) -> Refuse | ToolCall | None:
        """Refuse a tool call, or replace it by another one. `call.arguments` is JSON as the model wrote it.

        Called for all calls of a turn in order before the first of them runs. On failure the call is refused.
        """

    @spec
    def before_tool_call(self, rollout: RolloutInfo, call: ToolCall, key: str) -> None:
        """Called before a tool call that was not refused runs."""

    @spec
    def after_tool_call(self, rollout: RolloutInfo, call: ToolCall, result: Observation, key: str) -> None:
        """Called for each tool call that was not refused, when all calls of the turn have results."""

    @spec
    def before_verifier_command(self, rollout: RolloutInfo, command: str, key: str) -> None:
        """Called before a verifier command runs."""

    @spec
    def after_verifier_command(self, rollout: RolloutInfo, command: str, result: CommandVerdict, key: str) -> None:
        """Called after a verifier command has ended."""

    @spec
    def evaluate_rollout(self, finished: FinishedRollout, key: str) -> Mapping[str, float]:
        """Return scores of a Completed rollout by name. They are added to its result; the reward comes from the
        verifier alone.
        """
        raise NotImplementedError

    @spec
    def analyze_trajectory(self, finished: FinishedRollout, key: str) -> Mapping[str, Any]:
        """Return any analysis of a Completed rollout as JSON."""
        raise NotImplementedError

    @spec
    def after_rollout(self, rollout: RolloutInfo, result: Result, key: str) -> None:
        """Called before a rollout is sealed, for all outcomes."""

    @spec
    def should_stop_group(self, group: GroupInfo, results: Sequence[Result], key: str) -> str | None:
        """Return why the group's other members are no longer needed, or None. The hook is called once for each member,
        when it and all members before it have ended. `results` has the results of these members, in their order.
        Members that have not ended by then are Cancelled.
        """

    @spec
    def after_group(self, group: GroupInfo, results: Sequence[Result], key: str) -> None:
        """Called when all members of a group are sealed."""


HOOKS = tuple(name for name in vars(Hooks) if not name.startswith("_"))
