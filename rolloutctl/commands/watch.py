"""`rolloutctl watch` and `rolloutctl logs`: follow a run, or one of its rollouts, while another process works on it."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Annotated

import typer
from rich.text import Text

from agent_runtime.engine.run_folder import holder
from agent_runtime.recording.job_record import read_abort
from agent_runtime.recording.reader import RunFolder, RunReader
from agent_runtime.recording.seals import SealedResults
from agent_runtime.statistics import mean
from rollout_api.records import Result
from rolloutctl.commands.show import RolloutArgument, ending, index_of, print_end, print_step
from rolloutctl.errors import CommandError, Exit
from rolloutctl.runs import JobArgument, NewestJobArgument, find_run_folder
from rolloutctl.ui.console import Form, FormOption, answer_json_line, answer_text, harmless, number, say
from rolloutctl.ui.transcript import steps

LOOK_SECONDS = 1.0
BUSY_SHARE = 0.1
"""Largest share of the time that is spent on reading: each look at a run of 100,000 rollouts takes hundreds of requests."""


async def watch(job: NewestJobArgument = None, form: FormOption = Form.TEXT) -> None:
    """Follow a run until its end: each rollout when it is finished. With -o json, print a line of JSON for each."""
    run = await find_run_folder(job, os.environ, may_be_empty=True)
    ended, rewards = 0, list[float]()
    with contextlib.closing(SealedResults(run.store)) as sealed:
        async for result in _new_results(run, sealed):
            ended += 1
            rewards += [] if result.reward is None else [result.reward]
            if form is Form.JSON:
                answer_json_line(result.wire())
            else:
                _print(result, f"{ended}/{run.total or '…'}, mean {number(mean(rewards), 3)}")
    if (aborted := await read_abort(run.store)) is not None:
        raise CommandError(f"Aborted: {aborted['message']}", code=Exit.ABORTED)
    say(f"{run.folder} is finished.")


async def _new_results(run: RunFolder, sealed: SealedResults) -> AsyncIterator[Result]:
    """Yield each result once, until the run has ended."""
    seen, is_told = set[int](), False
    while True:
        began = time.monotonic()
        is_over = await run.store.get("stats.json") is not None or await read_abort(run.store) is not None
        await sealed.load()
        for index in [index for index in sealed if index not in seen]:
            seen.add(index)
            yield sealed[index]
        if is_over:
            return
        if not is_told and holder(run.job_file.uid) is None:
            is_told = True
            say(
                "No process of yours on this machine works on the run. Waiting for one elsewhere; Ctrl-C ends the wait."
            )
        await _pause(began)


async def _pause(began: float) -> None:
    await asyncio.sleep(max(LOOK_SECONDS, (time.monotonic() - began) / BUSY_SHARE))


def _print(result: Result, progress: str) -> None:
    line = Text(harmless(f"{result.task}/{result.member}  ")).append_text(ending(result))
    answer_text(line.append(f"  ({progress})", "dim"))


async def logs(
    job: JobArgument,
    rollout: RolloutArgument,
    full: Annotated[bool, typer.Option("--full", help="Show whole tool results.")] = False,
) -> None:
    """Follow one rollout until its end: messages, tool calls and results as they are recorded, then the verdict."""
    folder = await find_run_folder(job, os.environ, may_be_empty=True)
    run = await RunReader.of(folder)
    index, shown, attempt = index_of(run, rollout), 0, -1
    while True:
        began = time.monotonic()
        if index not in run.seals and await run.store.get(f"seals/{index}.json") is not None:
            run = await RunReader.of(folder)
        seal, attempts = run.seals.get(index), await run.attempts(index)
        newest = seal.result.attempt if seal is not None else max(attempts, default=-1)
        if newest != attempt:
            if attempt >= 0:
                say(f"Attempt {attempt} was lost; attempt {newest} follows.", "yellow")
            attempt, shown = newest, 0
        # In the order of writing, because conversations of sub-agents grow at the same time.
        found = steps(await run.journal(index, attempt)) if attempt >= 0 else []
        # The last step may grow: the results of its tool calls are recorded later.
        complete = found if seal is not None else found[:-1]
        for step in complete[shown:]:
            print_step(step, full)
        shown = max(shown, len(complete))
        if seal is not None:
            print_end(seal, full)
            return
        await _pause(began)
