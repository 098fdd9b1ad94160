"""Retention: which runs may go, decided purely; deleting them, and the layers that no run names any more."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent_runtime.recording.job_record import read_job_file
from agent_runtime.recording.layers import DELETION_SECONDS, FOLDER, SPARED_SECONDS, SUFFIX, marker_of
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import READS_AT_ONCE, ObjectMeta, Store

LIVE_SECONDS: Final = 24 * 3600.0
"""A run that was written to within a day may have a runner at work: a turn may take hours, a suspended job longer."""


@dataclass(frozen=True)
class Run:
    """One run in storage. Times are Unix seconds."""

    folder: str
    name: str
    created: float
    last_write: float
    objects: int
    bytes: int
    finished: bool
    """Its results are written."""
    aborted: bool = False
    """It was given up for too many infrastructure failures."""


@dataclass(frozen=True)
class Plan:
    """What a retention rule comes to. `spared`: the rule would delete them, but they may be live."""

    delete: tuple[Run, ...]
    keep: tuple[Run, ...]
    spared: tuple[Run, ...]
    layers: tuple[ObjectMeta, ...] = ()
    """Layers of workspaces that go, because no other run names them."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every run that was decided about."""
        return self.delete + self.keep + self.spared

    def only(self, name: str) -> "Plan":
        """What is decided about the run in the folder `name` and the runs of the job `name`."""
        delete, keep, spared = (
            tuple(run for run in runs if name in (run.folder, run.name))
            for runs in (self.delete, self.keep, self.spared)
        )
        return Plan(delete, keep, spared)


async def list_runs(store: Store) -> list[Run]:
    """All runs, oldest first. A folder without a readable `job.json` is none, and is left alone."""
    runs = []
    for folder in await store.folders():
        try:
            job_file = await read_job_file(store, folder)
        except RecordCorrupt:
            continue
        if job_file is None:
            continue
        objects = await store.list(folder)
        runs.append(
            Run(
                folder=folder,
                name=str(job_file.manifest["metadata"]["name"]),
                created=job_file.created,
                last_write=max((meta.modified for meta in objects), default=job_file.created),
                objects=len(objects),
                bytes=sum(meta.size for meta in objects),
                finished=any(meta.key == f"{folder}/results.jsonl" for meta in objects),
                aborted=any(meta.key == f"{folder}/abort.json" for meta in objects),
            )
        )
    return sorted(runs, key=lambda run: (run.created, run.folder))


def _age(run: Run) -> tuple[float, bool, str]:
    # A copy of a run is as old, and may have less of it: it is the run alone that is resumed.
    return run.created, re.fullmatch(rf"{re.escape(run.name)}-[0-9a-f]{{8}}", run.folder) is not None, run.folder


def plan(
    runs: Sequence[Run], *, now: float, older_than_seconds: float | None = None, keep_newest: int | None = None
) -> Plan:
    """Which runs go: those whose last write is longer ago, and those beyond the newest of their name.

    An aborted run is not counted among the newest, so that it never takes the place of the last one with results.
    Given both, a run goes when both rules say so; given none, none goes. An unfinished run with recent writes never goes.
    """
    newer: dict[str, int] = {}
    delete, keep, spared = [], [], []
    for run in sorted(runs, key=_age, reverse=True):
        rank = newer.get(run.name, 0)
        newer[run.name] = rank + (not run.aborted)
        rules = []
        if older_than_seconds is not None:
            rules.append(now - run.last_write > older_than_seconds)
        if keep_newest is not None:
            rules.append(rank >= keep_newest)
        if not rules or not all(rules):
            keep.append(run)
        elif not run.finished and now - run.last_write < LIVE_SECONDS:
            spared.append(run)
        else:
            delete.append(run)
    return Plan(tuple(reversed(delete)), tuple(reversed(keep)), tuple(reversed(spared)))


async def delete_run(store: Store, run: Run) -> bool:
    """Delete a run's folder; False where some of it stays: it was written to since it was listed, or has links in it."""
    objects = await store.list(run.folder)
    if max((meta.modified for meta in objects), default=0.0) > run.last_write:
        return False
    # `job.json` last: an interrupted deletion leaves a run that the next one still recognises.
    job_file = f"{run.folder}/job.json"
    await store.delete([*(meta.key for meta in objects if meta.key != job_file), job_file])
    return not await store.list(run.folder)


async def unnamed_layers(store: Store, *, leaving: Sequence[Run] = (), now: float) -> list[ObjectMeta]:
    """Layers that no run names but those that are `leaving`, and that were written long enough ago."""
    folders = set(await store.folders()) - {FOLDER, *(run.folder for run in leaving)}
    named = {meta.key.rsplit("/", 1)[-1] for folder in folders for meta in await store.list(f"{folder}/{FOLDER}")}
    return [
        meta for meta in await store.list(FOLDER) if now - meta.modified > SPARED_SECONDS and _digest(meta) not in named
    ]


def _digest(layer: ObjectMeta) -> str:
    return layer.key.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)


async def collect(
    store: Store,
    *,
    older_than_seconds: float | None = None,
    keep_newest: int | None = None,
    only: str | None = None,
    dry_run: bool = True,
) -> Plan:
    """Apply a retention rule; a dry run only says what would go. `only` names the one run or job that it applies to."""
    decided = plan(
        await list_runs(store), now=time.time(), older_than_seconds=older_than_seconds, keep_newest=keep_newest
    )
    if only is not None:
        decided = decided.only(only)
    if dry_run:
        layers = await unnamed_layers(store, leaving=decided.delete, now=time.time())
        return replace(decided, layers=tuple(layers))
    deleted = [run for run in decided.delete if await delete_run(store, run)]
    touched = tuple(run for run in decided.delete if run not in deleted)
    layers = await delete_layers(store, await unnamed_layers(store, now=time.time()))
    return Plan(tuple(deleted), decided.keep, decided.spared + touched, tuple(layers))


async def delete_layers(store: Store, layers: Sequence[ObjectMeta]) -> list[ObjectMeta]:
    """Delete those of the layers that no run names meanwhile. A run that needs one waits, and then stores it anew."""
    if not layers:
        return []
    hasty = replace(store, patience_seconds=DELETION_SECONDS / 8)
    markers = [marker_of(_digest(meta)) for meta in layers]
    started = time.monotonic()
    try:
        for start in range(0, len(markers), READS_AT_ONCE):
            await asyncio.gather(*(hasty.put(marker, b"") for marker in markers[start : start + READS_AT_ONCE]))
        wanted = {meta.key for meta in layers}
        unnamed = [meta for meta in await unnamed_layers(hasty, now=time.time()) if meta.key in wanted]
        if time.monotonic() - started > DELETION_SECONDS / 2:
            return []
        await hasty.delete([meta.key for meta in unnamed])
        return unnamed
    finally:
        await store.delete(markers)
