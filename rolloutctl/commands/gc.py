"""`rolloutctl gc`: delete old runs."""

import asyncio
import os
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from agent_runtime.recording.gc import Plan, Run, collect
from rolloutctl.completion import DEFAULT_OUTPUT
from rolloutctl.errors import CommandError
from rolloutctl.runs import WhereArgument, open_place
from rolloutctl.ui.console import Form, FormOption, amount, answer_json, answer_table, say

DAY_SECONDS = 24 * 3600.0


def gc(
    where: WhereArgument = DEFAULT_OUTPUT,
    older_than_days: Annotated[
        float | None, typer.Option("--older-than-days", min=0, help="Delete runs whose last write is longer ago.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, help="Delete runs except the newest N of each name.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the runs; without it, only list them.")] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Delete old runs. With both rules, a run must match both. A run that may be active is never deleted."""
    if older_than_days is None and keep is None:
        raise CommandError("give --older-than-days, --keep, or both")
    plan = asyncio.run(
        _collect(where, None if older_than_days is None else older_than_days * DAY_SECONDS, keep, dry_run=not delete)
    )
    if form is Form.JSON:
        rules = {"delete": plan.delete, "keep": plan.keep, "spared": plan.spared}
        layers = [asdict(layer) for layer in plan.layers]
        found = {rule: [asdict(run) for run in runs] for rule, runs in rules.items()}
        answer_json({"deleted": delete, **found, "layers": layers})
    else:
        _print(plan, delete)


async def _collect(where: str, older_than_seconds: float | None, keep: int | None, *, dry_run: bool) -> Plan:
    store, place = await open_place(where, os.environ)
    plan = await collect(
        store, older_than_seconds=older_than_seconds, keep_newest=keep, only=place.name, dry_run=dry_run
    )
    if place.name is not None and not plan.runs:
        raise CommandError(f"{place.uri} contains no run of {place.name!r}; nothing was deleted")
    return plan


def _print(plan: Plan, deleted: bool) -> None:
    gone = "deleted" if deleted else "would be deleted"
    rows = [
        *([*_row(run), gone] for run in plan.delete),
        *([*_row(run), "kept: it may be active"] for run in plan.spared),
        *([*_row(run), "kept"] for run in plan.keep),
    ]
    answer_table("", ["run", "last write", "size", ""], rows, right=["size"])
    megabytes = (sum(run.bytes for run in plan.delete) + sum(layer.size for layer in plan.layers)) / 1e6
    layers = f" and {amount(len(plan.layers), 'layer')} of workspaces" if plan.layers else ""
    say(
        f"{amount(len(plan.delete), 'run')}{layers}, {megabytes:.1f} MB {gone}."
        + ("" if deleted else " Use --delete to delete them.")
    )


def _row(run: Run) -> list[str]:
    last_write = datetime.fromtimestamp(run.last_write, UTC).strftime("%Y-%m-%d %H:%M")
    return [run.folder, last_write, f"{run.bytes / 1e6:.1f} MB"]
