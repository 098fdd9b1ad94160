"""Check a dataset without a model: each task's own solution must score 1, and doing nothing must score less."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent_runtime.engine.attempt.results import output_of
from agent_runtime.engine.opening import RunEnvironment, missing_programs
from agent_runtime.engine.run import run_job
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import Outcome, Seal
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Provider
from rollout_api.tasks import Task, VerifierMode

ONLY_SHARED = "can only be graded in the agent's own workspace (Shared, forgeable)"
SEPARATE_TOO = "can also be graded in a separate workspace: give the job verifier.mode Separate"
EXPECTED = {"Oracle": "reward 1", "Nop": "reward below 1"}


@dataclass(frozen=True)
class CheckRow:
    """One task under one agent. `ok`: it scored as it should."""

    task: str
    agent: str
    reward: float | None
    outcome: str
    ok: bool
    message: str
    only_shared: bool = False
    """The row is only ok in the agent's own workspace (mode Shared), where an agent can forge its reward."""
    output: str = ""
    """The end of the verifier's output, if the row is not ok."""


async def check_job(
    job: RolloutJob,
    tasks: Sequence[Task],
    *,
    base_dir: Path,
    environ: Mapping[str, str],
    provider: Provider | None = None,
) -> list[CheckRow]:
    """Run Oracle and Nop over all tasks without writing to the job's output. Tasks without a verifier are not sound.

    An environment is sound if it can be reset.
    """
    missing = await missing_programs(job, tasks, RunEnvironment(base_dir, environ, provider))
    broken = {
        found.task: CheckRow(found.task, "-", None, "-", False, str(found)) for found in missing if not found.has_setup
    }
    rows = list(broken.values())
    tasks = [task for task in tasks if task.name not in broken]
    solvable = [task for task in tasks if task.has_solution]

    async def seals(agent: str, tasks: Sequence[Task]) -> dict[str, Seal]:
        """Return seals by the names of their tasks."""
        if not tasks:
            return {}
        with tempfile.TemporaryDirectory(prefix="agent-rollouts-check-") as folder:
            checked = _checked_by(agent, job, tasks, folder)
            await run_job(checked, base_dir=base_dir, environ=environ, provider=provider)
            run = await open_run(Store.open(folder, {}), job.metadata.name)
        return {seal.result.task: seal for seal in run.seals.values()}

    # Only a trial shows whether a task needs Shared. Try Separate first, because it is safer.
    oracle = await seals("Oracle", [_in_separate(job, task) for task in solvable])
    only_shared = {
        task.name
        for task in solvable
        if _asks_for_shared(job, task) and not _row(task, "Oracle", oracle.get(task.name)).ok
    }
    oracle |= await seals("Oracle", [task for task in solvable if task.name in only_shared])
    nop = await seals("Nop", tasks)
    for task in tasks:
        if task.environment is not None:  # the reset succeeded; that does not prove that the task can be solved
            rows.append(_row(task, "Nop", nop.get(task.name)))
            continue
        row = _row(task, "Oracle", oracle.get(task.name))
        if row.ok and _asks_for_shared(job, task):
            message = ONLY_SHARED if task.name in only_shared else SEPARATE_TOO
            row = replace(row, only_shared=task.name in only_shared, message=message)
        rows += [row, _row(task, "Nop", nop.get(task.name))]
    return rows


def _asks_for_shared(job: RolloutJob, task: Task) -> bool:
    """Whether the task itself, and not the job, requests grading in the agent's workspace."""
    return job.spec.verifier.mode is None and not task.steps and job.spec.verifier_of(task).mode is VerifierMode.SHARED


def _in_separate(job: RolloutJob, task: Task) -> Task:
    if task.verifier is None or not _asks_for_shared(job, task):
        return task
    return task.model_copy(update={"verifier": task.verifier.model_copy(update={"mode": VerifierMode.SEPARATE})})


def _checked_by(agent: str, job: RolloutJob, tasks: Sequence[Task], folder: str) -> RolloutJob:
    """Return the job with only that agent, over those tasks, recorded in a folder."""
    spec = job.spec.model_copy(
        update={
            "group_size": 1,
            "plugins": [],
            "tasks": job.spec.tasks.moved_to(inline=list(tasks)),
            "agent": job.spec.agent.model_copy(update={"type": agent, "command": [], "install": []}),
            "completion": job.spec.completion.model_copy(
                update={"min_completed_per_group": 1, "max_infra_failure_fraction": 1.0}
            ),
            "output": job.spec.output.model_copy(update={"uri": folder}),
        }
    )
    return job.model_copy(update={"spec": spec})


def _row(task: Task, agent: str, seal: Seal | None) -> CheckRow:
    if seal is None:
        message = "" if task.environment else "has no solution to check the verifier with; add one"
        return CheckRow(task.name, agent, None, "-", False, message)
    result, verdict = seal.result, seal.verdict
    ok, message, reward = False, "", result.reward
    if not task.is_graded:
        message, reward = "has no verifier, so it gets no reward", None
    elif result.outcome is not Outcome.COMPLETED or (reward is None and task.environment is None):
        message, reward = f"{result.reason}: {result.message}", None
    elif task.environment is not None or reward is None:
        ok = True
    elif not (ok := reward >= 1 if agent == "Oracle" else reward < 1):
        said = f": {verdict.message}" if verdict and verdict.message else ""
        message = f"expected {EXPECTED[agent]}{said}"
    output = "" if ok else output_of(verdict)
    return CheckRow(task.name, agent, reward, result.outcome.value, ok, message, output=output)
