"""A cancellation or a failure at any moment of a rollout costs no workspace and no earned reward."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.attempt.assignment import Rollout
from agent_runtime.engine.attempt.mcp import AttemptTools
from agent_runtime.engine.context import RunContext
from agent_runtime.engine.events import Event, TurnEnded
from agent_runtime.engine.groups import Groups, RolloutRun
from agent_runtime.engine.opening import RunEnvironment, open_run
from agent_runtime.engine.run import run_job
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.models.providers.function import FunctionModel
from agent_runtime.plugins.plugins import GroupPlugins
from agent_runtime.recording.reader import open_run as read_run
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, FileStat, WorkspaceLimit, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.records import Outcome, StopReason
from rollout_api.rollout_job import Completion, RolloutJob
from rollout_api.sandbox import SandboxTemplate
from tests.support.dummy_sandboxes import DummyProvider, DummyWorkspace

GAME = (Path(__file__).parents[2] / "support/games.py").read_text()
worlds = itertools.count()


def a_job(folder: Path, **task: Any) -> RolloutJob:
    environment = "environment" in task
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "cancelled"},
            "spec": {
                "mode": "Eval",
                "tasks": {"inline": [{"name": "task", "prompt": "{observation}", **task}]},
                "model": {"function": "nobody:asks"},
                "agent": {"type": "Environment"} if environment else {"tools": ["bash", "finish"]},
                "attempts": {"limit": 1, "backoffSeconds": 0},
                "output": {"uri": str(folder)},
            },
        }
    )


async def finishes(messages: list[dict[str, Any]], task: str) -> str:
    return "done"


class ReadyAtThatMoment(DummyProvider):
    """Runs a function between the moment when a workspace is ready and the moment when its caller continues."""

    then: Callable[[], object]

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> DummyWorkspace:
        workspace = await super().acquire(spec, attempt=attempt, fence=fence, name=name)
        asyncio.get_running_loop().call_soon(self.then)
        return workspace


@asynccontextmanager
async def opened(
    folder: Path, provider: DummyProvider, drain: Drain | None = None, job: RolloutJob | None = None
) -> AsyncIterator[tuple[RunContext, RolloutRun]]:
    job = job or a_job(folder)
    tasks = job.spec.tasks.inline or []
    run_environment = RunEnvironment(
        folder, {}, provider=provider, model=FunctionModel(finishes, "test"), drain=drain or Drain()
    )
    async with open_run(job, tasks, run_environment, new=False, observer=lambda event: None) as context:
        yield context, RolloutRun(context, Rollout.of(job, 0, 0, tasks[0]))


async def test_workspace_is_freed_when_it_gets_ready_as_its_rollout_is_cancelled(tmp_path: Path) -> None:
    provider = ReadyAtThatMoment(f"cancellation-{next(worlds)}")
    async with opened(tmp_path, provider) as (_, rollout):
        running = asyncio.create_task(rollout.run())
        provider.then = running.cancel
        with pytest.raises(asyncio.CancelledError):
            await running
        result = await rollout.cancel("GroupComplete", "enough members of its group are Completed")
        assert result.outcome is Outcome.CANCELLED
        assert not provider.world.workspaces, "its place is taken until the run ends"


async def test_workspace_is_freed_when_closing_the_tools_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(tools: AttemptTools) -> None:
        raise RuntimeError("the MCP server's connection is broken")

    monkeypatch.setattr(AttemptTools, "close", fails)
    provider = DummyProvider(f"cancellation-{next(worlds)}")
    async with opened(tmp_path, provider) as (_, rollout):
        assert (await rollout.run()).outcome is Outcome.COMPLETED
        assert not provider.world.workspaces, "its place is taken until the run ends"


class AtOnce(Groups):
    """Starts the second member of a group at the moment when the end of the first one makes it unnecessary."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context, _ignored)
        self.first_ends, self.second_starts = asyncio.Event(), asyncio.Event()
        self._spawned = 0

    async def unless_failed(self, waiting: Coroutine[Any, Any, Any], undo: Callable[[], None] = lambda: None) -> Any:
        if self._spawned:
            await self.first_ends.wait()
        return await super().unless_failed(waiting, undo)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._spawned += 1
        if self._spawned == 2:
            self.second_starts.set()  # the first one continues before the first step of the second one
        return super().spawn(work)


async def _ignored(*arguments: object) -> None:
    pass


async def test_straggler_is_sealed_when_it_is_cancelled_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(tmp_path)
    rules = {"group_size": 2, "completion": Completion(min_completed_per_group=1, cancel_stragglers=True)}
    job = job.model_copy(update={"spec": job.spec.model_copy(update=rules)})
    async with opened(tmp_path, DummyProvider(f"cancellation-{next(worlds)}"), job=job) as (context, _):
        groups = AtOnce(context)

        async def judge(plugins: GroupPlugins, results: Mapping[int, object]) -> None:
            if set(results) == {0}:
                groups.first_ends.set()
                await groups.second_starts.wait()

        monkeypatch.setattr(GroupPlugins, "judge", judge)
        await groups.start(0, (job.spec.tasks.inline or [])[0])
        await groups.drain()
        assert context.results.outcomes == {Outcome.COMPLETED: 1, Outcome.CANCELLED: 1}, "the group never ends"
        assert groups.published == 1


class Attacked(LocalProvider):
    """Workspaces of an earlier process whose programs have meanwhile killed their init."""

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> ExecutorWorkspace:
        workspace = await super().reattach(handle, spec=spec, fence=fence)

        async def stat(path: str, *, key: str | None = None, owner: str | None = None) -> FileStat | None:
            raise WorkspaceLimit("Attacked", "its init was killed from within")

        workspace.stat = stat  # type: ignore[method-assign]
        return workspace


async def test_episode_keeps_its_rewards_when_its_workspace_has_ended_before_a_resume(tmp_path: Path) -> None:
    environment = {"id": "games:Game", "maxSteps": 100, "runIn": "Sandbox"}
    job = a_job(tmp_path / "out", files=[{"path": "games.py", "content": GAME}], environment=environment)
    stop = asyncio.Event()

    async def acts(messages: list[dict[str, Any]], task: str) -> str:
        if stop.is_set():
            await asyncio.sleep(3600)
        return "<answer>walk</answer>"

    def stops(event: Event) -> None:
        if isinstance(event, TurnEnded) and event.turn == 3:
            stop.set()

    def provider(kind: type[LocalProvider]) -> LocalProvider:
        return kind(tmp_path / "run", SandboxTemplate(), places=1)

    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": FunctionModel(acts, "test")}
    first = await run_job(job, provider=provider(LocalProvider), stop=stop, observer=stops, **common)
    assert first.resumable
    await run_job(job, provider=provider(Attacked), **common)
    [result] = (await read_run(Store.open(str(tmp_path / "out"), {}), "cancelled")).results()
    assert (result.outcome, result.stop_reason) == (Outcome.COMPLETED, StopReason.RESOURCE_LIMIT)
    assert result.reward == 3.0, "what an uninterrupted run gives for the recorded steps"
