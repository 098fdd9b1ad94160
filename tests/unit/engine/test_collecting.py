"""Commands of `verifier.collect` in the agent's workspace."""

from typing import Any, cast

import pytest

from agent_runtime.engine.attempt.attribution import Action, Phase, Situation, attribute
from agent_runtime.engine.attempt.grading import collect
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure, Workspace
from agent_runtime.sandboxes.executor_client.values import not_started
from rollout_api.tasks import Task, TaskVerifier


class Ending:
    """A workspace in which commands end like this, the last result for all others."""

    def __init__(self, *results: CommandResult, stood_still: float = 0.0) -> None:
        self._results, self._stood_still = list(results), stood_still
        self.calls: list[str] = []

    async def stood_still(self) -> float:
        return self._stood_still

    async def set_steady(self, is_steady: bool) -> None:
        self.calls.append("keep running")

    async def run(self, _command: str, **_options: Any) -> CommandResult:
        self.calls.append("run")
        return self._results.pop(0) if len(self._results) > 1 else self._results[0]


async def collected(result: CommandResult) -> str | None:
    task = Task(name="t", prompt="p", verifier=TaskVerifier(commands=["true"], collect=["make"]))
    return await collect(task, cast(Workspace, Ending(result)))


async def test_collect_is_tried_again_when_its_command_cannot_start() -> None:
    with pytest.raises(SandboxFailure, match=r"collect.0. could not be started: fork: out of memory") as failure:
        await collected(not_started("fork: out of memory"))
    decision = attribute(failure.value, Situation(Phase.COLLECTING, answered=True, exposed=True))
    assert decision.action is Action.RETRY_ATTEMPT


async def test_collect_failure_is_the_agents_when_a_limit_ends_its_command() -> None:
    ended = CommandResult(None, None, "Memory", 1.0, b"", b"too large", 0, 9)
    assert await collected(ended) == "verifier.collect[0] failed with Memory: too large"


async def test_collect_is_never_paused_like_the_grading() -> None:
    workspace = Ending(CommandResult(0, None, None, 1.0, b"", b"", 0, 0))
    task = Task(name="t", prompt="p", verifier=TaskVerifier(commands=["true"], collect=["timeout 60 make"]))
    assert await collect(task, cast(Workspace, workspace)) is None
    assert workspace.calls == ["keep running", "run"]


@pytest.mark.parametrize(("stood_still", "runs"), [(0.0, 1), (20.0, 2)])
async def test_collect_runs_once_more_when_it_fails_after_a_standstill(stood_still: float, runs: int) -> None:
    expired = CommandResult(124, None, None, 20.0, b"", b"", 0, 0)
    workspace = Ending(expired, CommandResult(0, None, None, 1.0, b"", b"", 0, 0), stood_still=stood_still)
    task = Task(name="t", prompt="p", verifier=TaskVerifier(commands=["true"], collect=["timeout 15 make"]))
    failed = await collect(task, cast(Workspace, workspace))
    assert (failed is None, workspace.calls.count("run")) == (runs == 2, runs)
