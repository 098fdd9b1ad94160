"""Find out before the first rollout whether the verifiers can start where the job will run."""

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_runtime.engine.assignment import Rollout
from agent_runtime.engine.context import workspace_spec
from agent_runtime.engine.opening import Surroundings
from agent_runtime.sandboxes.base import Fence, SandboxProvider, WorkspaceSpec
from agent_runtime.sandboxes.factory import open_provider
from agent_runtime.verification.programs import missing_program
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Provider
from rollout_api.tasks import Task

PREFLIGHT = Fence(epoch=1, holder="preflight")
SANDBOXES_LOOKED_UP = 16
"""Different sandboxes that are tried: a data set may have an image for each of ten thousand tasks."""


@dataclass(frozen=True)
class MissingProgram:
    """A task whose verifier starts with something that its sandbox lacks."""

    task: str
    missing: str
    """`program cargo`, `module pytest`."""
    has_setup: bool
    """The task's setup, which was not run for this, may bring it."""

    def __str__(self) -> str:
        where = f"task {self.task}: verifier.commands[0] needs {self.missing}, which the sandbox does not have"
        return f"{where} before the task's setup" if self.has_setup else f"{where}; install it, or change the command"


async def missing_programs(job: RolloutJob, tasks: Sequence[Task], surroundings: Surroundings) -> list[MissingProgram]:
    """The tasks whose verifier could not start, among those of the first sandboxes and commands.

    Raises SandboxFailure when no sandbox can be had at all.
    """
    if not any(task.verifier for task in tasks):
        return []
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-preflight-") as folder:
        provider = surroundings.provider
        if provider is None or isinstance(provider, Provider):
            provider = open_provider(job.spec, Path(folder), provider, base_dir=surroundings.base_dir)
        await provider.open()
        try:
            return await _look_up(job, tasks, provider)
        finally:
            await provider.close()


async def _look_up(job: RolloutJob, tasks: Sequence[Task], provider: SandboxProvider) -> list[MissingProgram]:
    answers: list[tuple[WorkspaceSpec, str, str | None]] = []
    """Each sandbox and command is looked up once: a whole data set shares a few of them."""
    found = []
    for number, task in enumerate(tasks):
        if task.verifier is None:
            continue
        command = task.verifier.commands[0]
        spec = workspace_spec(job, Rollout.of(job, number, 0, task))
        bare = dataclasses.replace(spec, group="preflight", files=(), setup=())
        known = next((answer for answer in answers if answer[:2] == (bare, command)), None)
        if known is None and len(answers) == SANDBOXES_LOOKED_UP:
            continue
        if known is None:
            known = bare, command, await _look_up_one(bare, command, provider, f"{number}-0")
            answers.append(known)
        if known[2] is not None:
            found.append(MissingProgram(task.name, known[2], bool(task.setup)))
    return found


async def _look_up_one(spec: WorkspaceSpec, command: str, provider: SandboxProvider, attempt: str) -> str | None:
    workspace = await provider.acquire(spec, attempt=attempt, fence=PREFLIGHT, name="preflight")
    try:
        return await missing_program(workspace, [command], key="1:look-up")
    finally:
        await workspace.release()
