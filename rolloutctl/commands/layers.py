"""`rolloutctl layers`: the stored steps of Dockerfiles, and stored setups."""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from agent_runtime.recording.build_steps import StoredStep, key_of_entry, stored_steps, unused_steps
from agent_runtime.recording.gc import delete_layers, unnamed_layers
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageError, Store
from rolloutctl.completion import DEFAULT_OUTPUT
from rolloutctl.errors import EXIT_CODES, CommandError, Exit
from rolloutctl.runs import WhereArgument, open_place
from rolloutctl.ui.console import Form, FormOption, amount, answer_json, answer_table, say

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, check and delete the stored steps of Dockerfiles, and stored setups.",
)
DAY_SECONDS = 24 * 3600.0
KEY_CHARACTERS = 12


async def _store(where: str) -> Store:
    store, place = await open_place(where, os.environ)
    if place.name is not None:
        raise CommandError(f"{where} names a run; give the folder or URI of output.uri, which its layers are in")
    return store


def _row(step: StoredStep) -> list[str]:
    used = datetime.fromtimestamp(step.used, UTC).strftime("%Y-%m-%d")
    entry = step.entry
    return [step.key[:KEY_CHARACTERS], f"{entry.layer.bytes / 1e6:.1f} MB", f"{entry.seconds:.1f} s", used, entry.step]


def _as_json(step: StoredStep) -> dict[str, object]:
    return {"key": step.key, "used": step.used, **step.entry.wire()}


COLUMNS = ["key", "size", "took", "last used", "step"]
RIGHT = ["size", "took"]


@app.command("ls", epilog=EXIT_CODES)
async def list_steps(where: WhereArgument = DEFAULT_OUTPUT, form: FormOption = Form.TEXT) -> None:
    """List the steps, the least recently used first. Sizes are those of the files that each adds, uncompressed."""
    steps = await stored_steps(await _store(where))
    if form is Form.JSON:
        answer_json([_as_json(step) for step in steps])
        return
    answer_table("", COLUMNS, [_row(step) for step in steps], right=RIGHT)
    layers = {step.entry.layer.digest: step.entry.layer.bytes for step in steps}
    say(f"Steps: {len(steps)}, layers: {len(layers)}, {sum(layers.values()) / 1e6:.1f} MB before compression.")


@app.command(epilog=EXIT_CODES)
async def gc(
    where: WhereArgument = DEFAULT_OUTPUT,
    unused_days: Annotated[
        float | None, typer.Option("--unused-days", min=0, help="Delete steps that were last used longer ago.")
    ] = None,
    most_gb: Annotated[
        float | None,
        typer.Option("--most-gb", min=0, help="Delete the least recently used steps until the rest fits into this."),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the steps; without it, only list them.")] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Delete steps, and the layers that no step and no run needs. The next run that needs a step makes it again."""
    if unused_days is None and most_gb is None:
        raise CommandError("give --unused-days, --most-gb, or both")
    store = await _store(where)
    chosen = unused_steps(
        await stored_steps(store),
        now=time.time(),
        older_than_seconds=None if unused_days is None else unused_days * DAY_SECONDS,
        most_bytes=None if most_gb is None else int(most_gb * 1e9),
    )
    freed = 0
    if delete:
        await store.delete([key_of_entry(step.key) for step in chosen])
        freed = len(await delete_layers(store, await unnamed_layers(store, now=time.time())))
    if form is Form.JSON:
        answer_json({"deleted": delete, "steps": [_as_json(step) for step in chosen], "layers": freed})
        return
    answer_table("", COLUMNS, [_row(step) for step in chosen], right=RIGHT)
    if delete:
        say(f"{len(chosen)} steps and {freed} layers deleted. Layers of the last day are kept until the next gc.")
    else:
        say(f"{len(chosen)} steps would be deleted. Use --delete to delete them.")


@app.command(epilog=EXIT_CODES)
async def verify(where: WhereArgument = DEFAULT_OUTPUT, form: FormOption = Form.TEXT) -> None:
    """Read all layers and compare them with their digests. The run that needs a damaged one of a step makes it again."""
    store = await _store(where)
    steps = await stored_steps(store)
    layers = Layers(store, store)
    # Of snapshots, and of deleted steps that a run still names.
    others = sorted({*await layers.stored()} - {step.entry.layer.digest for step in steps})
    problems = await _problems(layers, steps, others)
    if form is Form.JSON:
        answer_json({"steps": len(steps), "otherLayers": len(others), "problems": problems})
    else:
        for problem in problems:
            say(problem)
        say(f"{amount(len(steps), 'step')}, {amount(len(others), 'other layer')}, {len(problems)} damaged.")
    if problems:
        raise typer.Exit(Exit.FAILED)


async def _problems(layers: Layers, steps: Sequence[StoredStep], others: Sequence[str]) -> list[str]:
    found = []
    for step in {step.entry.layer.digest: step for step in steps}.values():
        try:
            async for _ in layers.load(step.entry.layer):
                pass
        except (RecordCorrupt, StorageError) as error:
            found.append(f"{step.entry.step}: {error}")
    for digest in others:
        try:
            await layers.check(digest)
        except (RecordCorrupt, StorageError) as error:
            found.append(str(error))
    return found
