"""Retention: selects runs to delete; deletes runs, and layers that no remaining run names."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent_runtime.recording.build_steps import stored_steps
from agent_runtime.recording.job_record import is_copy, job_files
from agent_runtime.recording.layers import DELETION_SECONDS, FOLDER, SPARED_SECONDS, SUFFIX, marker_of
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import READS_AT_ONCE, ObjectMeta, Store

LIVE_SECONDS: Final = 24 * 3600.0
"""A run with a write within a day counts as active: a turn may take hours, a suspended job longer."""


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
    """The run's results are written."""
    sealed: bool
    """At least one rollout has ended and is sealed."""
    aborted: bool = False
    """The run was aborted because of too many infrastructure failures."""
    is_copy: bool = False
    """It is a copy of another run, or its folder was renamed: no job resumes it."""


@dataclass(frozen=True)
class Plan:
    """Result of a retention rule. `spared`: runs that the rule would delete but that may be active."""

    delete: tuple[Run, ...]
    keep: tuple[Run, ...]
    spared: tuple[Run, ...]
    layers: tuple[ObjectMeta, ...] = ()
    """Workspace layers to delete, because no other run names them."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return every run in the plan."""
        return self.delete + self.keep + self.spared

    def only(self, name: str) -> "Plan":
        """Return the part of the plan for the run in the folder `name` and the runs of the job `name`."""
        delete, keep, spared = (
            tuple(run for run in runs if name in (run.folder, run.name))
            for runs in (self.delete, self.keep, self.spared)
        )
        return Plan(delete, keep, spared)


async def list_runs(store: Store) -> list[Run]:
    """Return all runs, oldest first. A folder without a readable `job.json` is not a run and is ignored."""
    runs = []
    async for folder, job_file in job_files(store):
        if isinstance(job_file, RecordCorrupt):
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
                sealed=any(meta.key.startswith(f"{folder}/seals/") for meta in objects),
                aborted=any(meta.key == f"{folder}/abort.json" for meta in objects),
                is_copy=is_copy(folder, job_file),
            )
        )
    return sorted(runs, key=lambda run: (run.created, run.folder))


def _age(run: Run) -> tuple[float, bool, str]:
    # A copy has the same age and may be incomplete. Only the original run is resumed.
    return run.created, not run.is_copy, run.folder


def plan(
    runs: Sequence[Run], *, now: float, older_than_seconds: float | None = None, keep_newest: int | None = None
) -> Plan:
    """Return which runs to delete: those whose last write is longer ago, and those beyond the newest of their name.

    Aborted runs, runs without a sealed rollout, and copies do not count among the newest, so that as many runs with
    results are kept. With both rules, only runs that match both are deleted; without rules, none. An unfinished run with
    recent writes is never deleted.
    """
    newer: dict[str, int] = {}
    delete, keep, spared = [], [], []
    for run in sorted(runs, key=_age, reverse=True):
        rank = newer.get(run.name, 0)
        newer[run.name] = rank + (run.sealed and not run.aborted and not run.is_copy)
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
    """Delete a run's folder; False if part of it remains: it was written to since it was listed, or contains links."""
    objects = await store.list(run.folder)
    if max((meta.modified for meta in objects), default=0.0) > run.last_write:
        return False
    # `job.json` last, and in a separate request: an interrupted deletion leaves a run that the next one recognises, and
    # S3 deletes the objects of one request in any order.
    job_file = f"{run.folder}/job.json"
    await store.delete([meta.key for meta in objects if meta.key != job_file])
    await store.delete([job_file])
    return not await store.list(run.folder)


async def unnamed_layers(store: Store, *, leaving: Sequence[Run] = (), now: float) -> list[ObjectMeta]:
    """Return the layers to delete: those that neither a build step nor a run names, except runs that are being deleted
    (`leaving`). Layers written within SPARED_SECONDS are kept, because the run that needs them may not name them yet.
    """
    folders = set(await store.folders()) - {FOLDER, *(run.folder for run in leaving)}
    named = {meta.key.rsplit("/", 1)[-1] for folder in folders for meta in await store.list(f"{folder}/{FOLDER}")}
    named |= {step.entry.layer.digest for step in await stored_steps(store)}
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
    """Apply a retention rule; a dry run only returns the plan. `only` names the single run or job to which it applies."""
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
    """Delete those of these layers that no run has named meanwhile. A run that needs one waits for the deletion and
    stores the layer again.
    """
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
