"""The tool with which an agent acts in its task's environment, and the verdict on an episode.

Both derive from the recorded steps, so no other state must be stored or graded.
"""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agent_runtime.environments.host import (
    Action,
    Beginning,
    EnvironmentFailure,
    EnvironmentFault,
    EnvironmentHost,
    Move,
)
from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.statistics import mean
from agent_runtime.tools.base import ToolContext, ToolResult, shortened
from rollout_api.environments import RunIn, TaskEnvironment
from rollout_api.records import Observation, ObservationsRecord, Record, Verdict
from rollout_api.tasks import Task

ACT = "act"
INVALID = "Your answer had no valid action."
DIVERGED = "EnvironmentDiverged"
"""Reason of an EnvironmentFailure: the same actions led to other steps."""
_PLACEHOLDER = re.compile(r"\{(observation|turn|actionsLeft)\}|\{(feedback)\}(\n?)")


def observation_text(template: str, *, observation: str, feedback: str = "", turn: int, actions_left: int) -> str:
    """Return the text for the model at a turn, counted from 1. Without feedback its line is removed."""
    values = {"observation": observation, "turn": str(turn), "actionsLeft": str(actions_left)}

    def filled(found: re.Match[str]) -> str:
        return values[found[1]] if found[1] else feedback and feedback + found[3]

    return _PLACEHOLDER.sub(filled, template)


def action_results(records: Sequence[Record]) -> list[Observation]:
    return [
        result
        for record in records
        if isinstance(record, ObservationsRecord)
        for result in record.results
        if result.tool == ACT and "reward" in result.data
    ]


class Act:
    """Takes actions one after another. Implements `agent_runtime.tools.base.Tool`."""

    name = ACT
    description = "Take one action in the environment; returns what is seen then."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"action": {"type": "string", "description": "One of the actions."}},
    }
    runs_in: Literal["Runner"] = "Runner"
    idempotent = True
    """After a crash, the episode is replayed up to the journaled actions, so an unjournaled action can be repeated."""
    takes_agents_time = False

    def __init__(self, task: Task, host: EnvironmentHost, start: Beginning, past: Sequence[Observation] = ()) -> None:
        assert task.environment is not None
        self.template, self.max_steps = task.prompt, task.environment.max_steps
        shown = observation_text(task.prompt, observation=start.observation, turn=1, actions_left=self.max_steps)
        self.task = task.model_copy(update={"prompt": f"{start.instruction}\n{shown}" if start.instruction else shown})
        """The task as an agent sees it: its prompt has the rules and the first observation."""
        self._host = host
        self._past = list(past)
        # In a sandbox, programs that an action runs can end or replace the episode's process.
        in_sandbox = task.environment.run_in is RunIn.SANDBOX
        self._fault = EnvironmentFault.DIED if in_sandbox else DIVERGED
        self._one_at_a_time = asyncio.Lock()
        self._failure: SandboxFailure | None = None
        """Why it ended. Further actions of the same answer are not taken."""

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Take the action. The end of the episode ends the rollout as Finished."""
        async with self._one_at_a_time:
            if self._failure is not None:
                raise self._failure
            if self._past and self._past[-1].stop:
                return ToolResult("The episode is over.", error=True)
            action: Action = arguments.get("action")
            actions = [step.data["action"] for step in self._past]
            try:
                *again, move = await self._host.take(actions, action, context.workspace)
                require_same(self._past, again, self._fault)
            except SandboxFailure as failure:
                self._failure = failure
                raise
            content = shortened(move.observation)
            data = _data(action, move)
            self._past.append(
                Observation(call_id=context.call_id, tool=ACT, content=content, stop=move.over, data=data)
            )
            return ToolResult(content, stop=move.over, data=data)

    def close(self) -> None:
        """End the episode."""
        self._host.close()


def require_same(past: Sequence[Observation], again: Sequence[Move], reason: str) -> None:
    """Raise EnvironmentFailure with that reason if the last of the past actions gave other results again."""
    for step, move in zip(past[len(past) - len(again) :], again, strict=True):
        if (step.content, step.data["reward"]) != (shortened(move.observation), move.reward):
            raise EnvironmentFailure(
                reason,
                f"repeated actions had another result: action {step.data['action']!r} gave reward {move.reward:g}, but "
                f"{step.data['reward']:g} before; an environment must be a function of its seed and its actions",
            )


def _data(action: Action, move: Move) -> dict[str, Any]:
    known = {"effective": move.effective, "success": move.success}
    return {
        "action": action,
        "reward": move.reward,
        "terminated": move.terminated,
        "truncated": move.truncated,
        "valid": move.valid,
        **{name: value for name, value in known.items() if value is not None},
    }


def episode_verdict(environment: TaskEnvironment, records: Sequence[Record]) -> Verdict:
    """Return the sum of the steps' rewards; 0 without a step.

    `passed` is the success that the environment reports at its last step, or else a reward above 0. The further rewards
    are ROLL's metrics: fractions of valid and of effective actions, and success. In a sandbox, a verdict can be forged,
    because programs run by actions can reach the episode's process.
    """
    steps = action_results(records)
    reward = math.fsum(step.data["reward"] for step in steps)
    last = steps[-1].data if steps else {}
    passed = bool(last.get("success", reward > 0))
    rewards = {"success": float(passed)}
    if steps:
        valid = mean([step.data["valid"] for step in steps])
        effective = mean([step.data["effective"] for step in steps if "effective" in step.data])
        shares = {"action_is_valid": valid, "action_is_effective": effective}
        rewards |= {name: share for name, share in shares.items() if share is not None}
    forgeable = environment.run_in is RunIn.SANDBOX
    return Verdict(reward=reward, rewards=rewards, passed=passed, forgeable=forgeable, message=f"{len(steps)} steps")


def step_rewards(records: Sequence[Record]) -> list[float]:
    return [float(step.data["reward"]) for step in action_results(records)]
