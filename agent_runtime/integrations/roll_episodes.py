"""Single episodes for an external driver: ROLL's `AgentRunner.run_job(seed) → EpisodeResult`.

Each episode is an ordinary rollout of an open job, recorded and resumable.
"""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent_runtime.engine.scheduling.shard import derived_seed
from agent_runtime.engine.session import RolloutSession
from agent_runtime.environments.act import step_rewards
from agent_runtime.environments.host import NO_DATA, EnvironmentFault
from agent_runtime.models.base import Model
from rollout_api.environments import TaskEnvironment
from rollout_api.manifest import validate
from rollout_api.records import Outcome, Result, StopReason
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import EnvironmentGroups, Task


class EpisodeStatus(StrEnum):
    """How an episode ended. `Failed` and `NoData` have no score; `Timeout` has the score of the steps before it."""

    FINISHED = "Finished"
    FAILED = "Failed"
    """Lost to infrastructure."""
    NO_DATA = "NoData"
    """The environment has no episode for that seed."""
    TIMEOUT = "Timeout"
    """The environment hung, or the agent's time ran out."""


@dataclass(frozen=True)
class EpisodeResult:
    """The fields of an episode that ROLL's env managers read."""

    status: EpisodeStatus
    score: float | None
    """Sum of the steps' rewards; None if the status has no score."""
    step_scores: list[float] = field(default_factory=list)
    agent_exit_reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "status": self.status.value,
            "score": self.score,
            "step_scores": self.step_scores,
            "agent_exit_reason": self.agent_exit_reason,
            **self.metrics,
        }


def episode_result(result: Result, step_scores: list[float]) -> EpisodeResult:
    if result.outcome is not Outcome.COMPLETED:
        status = EpisodeStatus.NO_DATA if result.reason == NO_DATA else EpisodeStatus.FAILED
        return EpisodeResult(status, None, step_scores, result.reason or result.outcome.value)
    hung = any(attempt.reason == EnvironmentFault.HUNG for attempt in result.failed_attempts)
    timed_out = result.stop_reason is StopReason.AGENT_TIMEOUT or (
        result.stop_reason is StopReason.RESOURCE_LIMIT and hung
    )
    return EpisodeResult(
        EpisodeStatus.TIMEOUT if timed_out else EpisodeStatus.FINISHED,
        result.reward or 0.0,
        step_scores,
        result.stop_reason.value if result.stop_reason else "",
        dict(result.rewards),
    )


class AgentRunner:
    """Runs episodes of one kind of environment. A context manager, not for use inside an event loop.

    `environment` is an entry of `tasks.environments` (its seed and groups are not used), `spec` has further fields of a
    job's spec, and `model` is an object or the field of that name. Without `output`, episodes are recorded in a temporary
    folder. Without `seed`, answers are drawn by a seed that depends on the output.
    """

    def __init__(
        self, environment: Mapping[str, Any], *, model: Model | Mapping[str, Any] | None = None, **spec: Any
    ) -> None:
        self._environment = validate(EnvironmentGroups, dict(environment))
        self._model = None if isinstance(model, Mapping) else model
        self._folder = tempfile.TemporaryDirectory(prefix="agent-rollouts-episodes-")
        given: dict[str, Any] = {"output": {"uri": self._folder.name}, **spec}
        if isinstance(model, Mapping):
            given["model"] = model
        agent = {"type": "Environment", "maxTurns": self._environment.max_steps, **given.pop("agent", {})}
        self._job = validate(
            RolloutJob,
            {
                "apiVersion": "rollout.dev/v1alpha1",
                "kind": "RolloutJob",
                "metadata": {"name": "episodes"},
                "spec": {
                    "mode": "Eval",
                    "agent": agent,
                    # Members of a group have runners of their own, and must not all draw the same answers.
                    "seed": derived_seed(0, str(given["output"])),
                    # A placeholder, because a manifest must name a model.
                    "model": {"function": "agent_runtime.integrations.roll_episodes:no_model"},
                    **given,
                    "tasks": {"stream": {}, "runnerEnvironments": [self._environment.id]},
                },
            },
        )
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        """Open storage, model and environments. Raises the errors of each."""
        self._session = RolloutSession(self._job, base_dir=Path(), model=self._model)
        self._runner.run(self._session.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runner.run(self._session.__aexit__(kind, error, traceback))
        self._runner.close()
        self._folder.cleanup()

    def run_job(self, seed: int) -> EpisodeResult:
        """Run one episode with that seed. Raises only errors that end the whole run: lost storage, or an aborted job."""
        return self._runner.run(self._episode(seed))

    async def _episode(self, seed: int) -> EpisodeResult:
        entry = self._environment
        environment = TaskEnvironment.model_validate(
            {name: getattr(entry, name) for name in TaskEnvironment.model_fields} | {"seed": seed}
        )
        sequence = await self._session.submit(
            Task(
                name=f"{entry.label}-{seed}",
                prompt=entry.prompt,
                tags=[entry.label],
                timeouts=entry.timeouts,
                environment=environment,
            )
        )
        # Groups of earlier runners with this output, and of an interrupted call, are delivered too.
        while (group := await anext(self._session)).sequence != sequence:
            pass
        result = group.results[0]
        return episode_result(result, step_rewards(await self._session.records(result)))


async def no_model(messages: list[dict[str, Any]]) -> str:
    """Placeholder for a missing model."""
    raise RuntimeError("give AgentRunner a model: model=..., or the field model of a job's spec")
