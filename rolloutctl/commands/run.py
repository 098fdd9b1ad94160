"""`rolloutctl run`: run a job on this machine with a progress display. A stopped run can be resumed."""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from agent_runtime.engine.events import Event, JobStarted, JobSummary
from agent_runtime.engine.opening import STOPPED_SECONDS
from agent_runtime.engine.run import run_job
from agent_runtime.engine.run_folder import RunInProgress
from rollout_api.records import Result
from rollout_api.rollout_job import RolloutJob
from rolloutctl.commands.check import ManifestArgument, ProviderOption
from rolloutctl.commands.results import print_results
from rolloutctl.commands.view import serve_run, until_interrupted
from rolloutctl.completion import DEFAULT_OUTPUT, complete_task
from rolloutctl.errors import CommandError, Exit
from rolloutctl.manifest import read_manifest, with_options
from rolloutctl.runs import find_run
from rolloutctl.ui.console import Form, FormOption, answer_json, duration, err, harmless, out, program, say
from rolloutctl.ui.figures import notes
from rolloutctl.ui.progress import Display, display_for
from rolloutctl.ui.scalars import ScalarLog

MASKED_BY_FAILURE = ("InfraFailed", "VerifierFailed")


async def run(
    manifest: ManifestArgument,
    new: Annotated[bool, typer.Option("--new", help="Start a new run instead of resuming the last one.")] = False,
    provider: ProviderOption = None,
    output: Annotated[
        str | None, typer.Option("--output", help="Destination of results, instead of spec.output.uri.")
    ] = None,
    model_url: Annotated[
        str | None, typer.Option("--model-url", help="Base URL of an OpenAI-compatible model, instead of spec.model.")
    ] = None,
    model_name: Annotated[str | None, typer.Option("--model-name", help="Name of the model at that endpoint.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the endpoint's key.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            help="Run only the task of this name; `*` and `?` match as in file names. Repeatable.",
            autocompletion=complete_task,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Run at most this many tasks.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Write scalars for TensorBoard below this folder.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option("--wandb", help="Write scalars to this project of Weights & Biases.")
    ] = None,
    view: Annotated[
        bool, typer.Option("--view", help="Show the run in a browser, as `rolloutctl view` does, until Ctrl-C.")
    ] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Run a job on this machine, or resume its last run."""
    job = with_options(
        read_manifest(manifest),
        output=output,
        model_url=model_url,
        model_name=model_name,
        api_key_env=api_key_env,
        tasks=task or (),
        limit=limit,
    )
    pages: list[asyncio.Task[None]] = []
    with (
        display_for(err) as display,
        ScalarLog(display, job.spec.group_size, tensorboard=tensorboard, wandb=wandb) as log,
    ):
        begun = asyncio.Event()

        def observer(event: Event) -> None:
            if isinstance(event, JobStarted):
                begun.set()
            if view and isinstance(event, JobStarted):
                pages.append(asyncio.create_task(serve_run(event.uri)))
            log(event)

        stop = asyncio.Event()
        with _stopping_cleanly(stop, begun, display, _stay(job)):
            path = manifest.resolve()
            try:
                summary = await run_job(
                    job,
                    base_dir=path.parent,
                    environ=os.environ,
                    provider=provider,
                    new=new,
                    observer=observer,
                    stop=stop,
                    private=[path],
                    command=f"cd {shlex.quote(str(Path.cwd()))} && {resume_command()}",
                )
            except asyncio.CancelledError:
                if not stop.is_set() or begun.is_set():
                    raise
                say("Stopped before the first rollout: the model, the sandboxes and storage were still being checked.")
                raise typer.Exit(Exit.INTERRUPTED) from None
            except RunInProgress as error:
                watched = shlex.quote(output or str(manifest))
                raise CommandError(str(error), hint=f"Follow it with: rolloutctl watch {watched}") from error
    if form is Form.JSON:
        answer_json(summary_json(summary))
    else:
        await _report(summary)
    if pages:
        await until_interrupted("The pages stay until Ctrl-C.")
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)
    raise typer.Exit(exit_code(summary))


@contextlib.contextmanager
def _stopping_cleanly(stop: asyncio.Event, begun: asyncio.Event, display: Display, stay: str) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM. The first one asks the run to stop, and the second one ends the process immediately. The
    run can be resumed in both cases. Before the run has begun, the first one cancels its checks.
    """
    starting = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set():
            display.__exit__(None, None, None)  # gives the terminal its cursor back
            say(f"Stopped immediately. Workspaces of unfinished rollouts stay for at least {stay}.")
            say(f"Resume with: {resume_command()}")
            os._exit(Exit.INTERRUPTED)
        stop.set()
        if not begun.is_set() and starting is not None:
            starting.cancel()
            return
        say("Stopping. The run can be resumed. Press Ctrl-C again to stop immediately.", "bold")

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _stay(job: RolloutJob) -> str:
    """Return for how long the workspaces of a stopped run stay, in words."""
    return duration(min(job.spec.sandbox.idle_seconds, STOPPED_SECONDS))


def resume_command() -> str:
    return f"{program()} {shlex.join(argument for argument in sys.argv[1:] if argument != '--new')}"


def exit_code(summary: JobSummary) -> Exit:
    if summary.aborted is not None:
        return Exit.ABORTED
    if not summary.completed:
        return Exit.INTERRUPTED
    masked = any(summary.outcomes.get(outcome) for outcome in MASKED_BY_FAILURE)
    is_agent_broken = summary.tracebacks and sum(summary.tracebacks.values()) == sum(summary.outcomes.values())
    return Exit.FAILED if masked or is_agent_broken else Exit.OK


def summary_json(summary: JobSummary) -> dict[str, object]:
    return {
        "name": summary.name,
        "folder": summary.folder,
        "uri": summary.uri,
        "total": summary.total,
        "sealed": sum(summary.outcomes.values()),
        "outcomes": dict(summary.outcomes),
        "meanReward": summary.mean_reward,
        "completed": summary.completed,
        "aborted": summary.aborted,
        "resumable": summary.resumable,
        "stats": dict(summary.stats),
        "tracebacks": dict(summary.tracebacks),
    }


async def _report(summary: JobSummary) -> None:
    run = await find_run(summary.uri, os.environ)
    results = run.results()
    print_results(run.folder, results, summary.total, run.job.spec.group_size)
    remarks = notes(run.seals.values())
    for remark in remarks:
        out.print(Text(harmless(f"• {remark}")), soft_wrap=True)
    if remarks:
        out.print()
    for traceback, count in summary.tracebacks.items():
        raised = traceback.strip().splitlines()[-1]
        say(f"The agent's own code raised in {count} of {len(results)} rollouts (AgentError): {raised}", "bold red")
    if summary.aborted is not None:
        say(f"Aborted: {summary.aborted}", "bold red")
        say("Fix the cause, then start a new run with --new.")
    elif summary.resumable:
        say(f"Stopped with {len(results)} of {summary.total} rollouts done. Resume with: {resume_command()}", "bold")
        stay = _stay(run.job)
        say(f"Workspaces of unfinished rollouts stay for {stay}; after that they end, and the rollouts begin anew.")
    _say_next_commands(summary, worst_rollout(results))


def worst_rollout(results: Sequence[Result]) -> int:
    """Return the index of the rollout to read first: an exception of the agent, a failure, then the lowest reward."""

    def rank(result: Result) -> tuple[bool, bool, float, int]:
        has_failed = result.outcome in MASKED_BY_FAILURE
        return result.traceback is None, not has_failed, 0 if result.reward is None else result.reward, result.index

    return min(results, key=rank).index if results else 0


def _say_next_commands(summary: JobSummary, rollout: int) -> None:
    in_default = Path(DEFAULT_OUTPUT).resolve() / summary.folder
    name = shlex.quote(summary.folder if summary.uri == str(in_default) else summary.uri)
    say(f"Everything is recorded in {summary.uri}")
    say(f"  {program()} show {name} {rollout}    show one rollout, by its index or as TASK/MEMBER")
    say(f"  {program()} view {name}      show the run in a browser")
    say(f"  {program()} report {name}    write all rollouts as one HTML file")
