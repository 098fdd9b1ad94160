"""`rolloutctl validate` and `rolloutctl check`: checks that need no model."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from agent_runtime.engine.branching.sources import find_origins
from agent_runtime.engine.check import CheckRow, check_job
from agent_runtime.engine.opening import RunEnvironment, about_bases, about_services, check_tasks, missing_programs
from agent_runtime.engine.validation import wrong_fields
from agent_runtime.environments.pool import EnvironmentPool
from agent_runtime.plugins.registry import load_plugins, unused_hooks
from agent_runtime.tasks import LoadedTasks, TaskProblem, TaskSourceError, load_tasks
from rollout_api.manifest import ManifestError, load_manifest, locate_problems
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Provider
from rollout_api.tasks import Task
from rolloutctl.errors import MANIFEST_HELP, CommandError, Exit
from rolloutctl.manifest import describe, read_manifest
from rolloutctl.ui.console import (
    Form,
    FormOption,
    amount,
    answer_json,
    answer_table,
    answer_text,
    err,
    number,
    out,
    say,
)

ManifestArgument = Annotated[Path, typer.Argument(help="File with a RolloutJob, YAML or JSON.")]
ProviderOption = Annotated[
    Provider | None,
    typer.Option("--provider", help="Source of sandboxes, instead of spec.sandbox.provider.", case_sensitive=False),
]


def validate(
    manifest: ManifestArgument,
    provider: ProviderOption = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Make no test call of the model, write nothing to storage, and pull no image."),
    ] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Check all that a run needs: manifest, tasks, agent, tools, plugins, keys, model, storage, verifiers.

    No rollout is run.

    Prints every problem as `file:line: field: message`.
    """
    base_dir = manifest.resolve().parent
    try:
        job = load_manifest(manifest) if form is Form.JSON and manifest.is_file() else read_manifest(manifest)
    except ManifestError as error:
        answer_json({"valid": False, "problems": [asdict(problem) for problem in error.problems]})
        raise typer.Exit(Exit.BAD_INPUT) from None
    fields = locate_problems(manifest, asyncio.run(wrong_fields(job, base_dir, os.environ, offline=offline)))
    stream, loaded, in_tasks = job.spec.tasks.stream is not None, LoadedTasks([]), TaskSourceError([])
    try:
        if job.spec.tasks.branch is not None:
            origins = asyncio.run(find_origins(job, base_dir, os.environ))
            loaded = LoadedTasks([origin.task for origin in origins])
        elif not stream:
            loaded = load_tasks(job.spec.tasks, base_dir, os.environ)
        asyncio.run(_check_tasks(job, loaded.tasks))
    except TaskSourceError as error:
        in_tasks = error
    if fields or in_tasks.problems:
        if form is Form.TEXT:
            texts = [describe(manifest, ManifestError(fields)), str(in_tasks)]
            raise CommandError("\n".join(filter(None, texts)), hint=MANIFEST_HELP)
        answer_json({"valid": False, "problems": [*map(asdict, fields), *map(asdict, in_tasks.problems)]})
        raise typer.Exit(Exit.BAD_INPUT)
    plugins = load_plugins(job.spec.plugins)
    unused = (
        [TaskProblem(str(manifest), None, text) for text in unused_hooks(plugins)] if job.spec.agent.is_program else []
    )
    warnings = [*loaded.warnings, *about_services(job, loaded.tasks), *about_bases(job, loaded.tasks), *unused]
    # Looking for the verifiers' programs starts sandboxes, which pull their images.
    looks = not offline or all(task.sandbox.apply(job.spec.sandbox).image is None for task in loaded.tasks)
    run_environment = RunEnvironment(base_dir, os.environ, provider)
    missing = asyncio.run(missing_programs(job, loaded.tasks, run_environment)) if looks else []
    valid = all(found.has_setup for found in missing)
    size, count = job.spec.group_size, len(loaded.tasks)
    if form is Form.JSON:
        problems = [asdict(found) | {"message": str(found)} for found in missing]
        totals = {"tasks": count, "rollouts": count * size}
        answer_json({"valid": valid, "problems": problems, "warnings": list(map(asdict, warnings)), **totals})
    else:
        _warn(warnings)
        for found in missing:
            say(f"{manifest}: {found}", "yellow" if found.has_setup else "bold red")
        if not looks:
            say("--offline: whether the images have the verifiers' programs was not checked.", "dim")
        amount = "a stream of tasks" if stream else _amount(count, size)
        if valid:
            out.print(f"{manifest} is valid: {amount}.", soft_wrap=True)
    raise typer.Exit(Exit.OK if valid else Exit.BAD_INPUT)


def _amount(tasks: int, size: int) -> str:
    total = tasks * size
    return f"{amount(tasks, 'task')} × groupSize {size} = {amount(total, 'rollout')}"


async def _check_tasks(job: RolloutJob, tasks: Sequence[Task]) -> None:
    environments = EnvironmentPool(job.spec.tasks.own_environments)
    try:
        await check_tasks(job, tasks, environments)
    finally:
        await environments.close()


async def check(manifest: ManifestArgument, provider: ProviderOption = None, form: FormOption = Form.TEXT) -> None:
    """Check that every task can be graded: its solution must get reward 1, and an agent that does nothing less than 1."""
    job = read_manifest(manifest)
    base_dir = manifest.resolve().parent
    loaded = load_tasks(job.spec.tasks, base_dir, os.environ)
    _warn(loaded.warnings)
    with err.status("Running each task's solution, and an agent that does nothing…"):
        rows = await check_job(job, loaded.tasks, base_dir=base_dir, environ=os.environ, provider=provider)
    if form is Form.JSON:
        answer_json([asdict(row) for row in rows])
    else:
        _print(rows)
    raise typer.Exit(Exit.OK if all(row.ok for row in rows) else Exit.FAILED)


def _print(rows: Sequence[CheckRow]) -> None:
    verdicts = {True: Text("ok", "green"), False: Text("wrong", "bold red")}
    cells: list[list[str | Text]] = [
        [row.task, row.agent, number(row.reward), row.outcome, verdicts[row.ok]] for row in rows
    ]
    answer_table("", ["task", "agent", "reward", "outcome", ""], cells, right=["reward"], optional=["outcome"])
    for row in rows:
        if row.message:
            answer_text(f"{row.task}, agent {row.agent}: {row.message}")
        if row.output:
            answer_text(f"The verifier's output:\n{row.output}")
    say(f"{sum(row.ok for row in rows)} of {len(rows)} checks passed.")
    if shared := [row.task for row in rows if row.only_shared]:
        say(f"Only mode Shared can grade {', '.join(shared)}; in it, an agent could forge its reward.", "yellow")


def _warn(warnings: Sequence[TaskProblem]) -> None:
    for warning in warnings:
        say(f"Warning: {warning}", "yellow")
