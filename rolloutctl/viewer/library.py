"""The recorded runs of a place, opened for the pages and kept up to date while somebody looks."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent_runtime.engine.run_folder import holder
from agent_runtime.recording.artifacts import open_artifacts
from agent_runtime.recording.health import HealthReport, health_reports, is_working
from agent_runtime.recording.job_record import parsed_json, read_abort
from agent_runtime.recording.overview import overview
from agent_runtime.recording.reader import DamagedRun, NoSuchRun, RunFolder, RunReader, run_folders
from agent_runtime.recording.seals import StoredSeals
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import READS_AT_ONCE, Store
from agent_runtime.statistics import advantages
from rollout_api.records import Record, Seal
from rollout_api.rewards import GroupBy
from rolloutctl.comparison import Comparison, Rewards, by_task, compared
from rolloutctl.run_state import state_of
from rolloutctl.viewer.live import InFlight, member_of
from rolloutctl.viewer.rollout import Rollout, changes, visible
from rolloutctl.viewer.summary import FIGURES_OF_A_ROW, facts, of_statistics, row, row_of_damaged, summary
from rolloutctl.viewer.table import RolloutTable, fields

FRESH_SECONDS: Final = 0.5
BUSY_SHARE: Final = 0.2
"""Most of the time that is spent with reading a live run, or the list of runs: a look at large ones, or at object storage,
takes long."""
FIRST_WAIT_SECONDS: Final = 0.5
"""A page that comes while a run is read for the first time shows what is read so far after this time."""
COMPARED: Final = 20_000
"""Advantages that compare more rollouts than this are left out of the page."""
MOST_COMPARISONS: Final = 8
"""Comparisons that are kept. One of 100,000 tasks takes 30 MB."""

Json = dict[str, Any]


@dataclass
class _State:
    """What is known of a run beside its seals."""

    finished: bool = False
    aborted: str | None = None
    in_flight: int = 0
    shown: list[Json] = field(default_factory=list)
    health: list[HealthReport] = field(default_factory=list)


class OpenRun:
    """One run. Must be closed."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.table = RolloutTable(run.store)
        self._in_flight = InFlight(run)
        self._state = _State()
        self._reading: asyncio.Task[None] | None = None
        self._read_at, self._read_seconds = 0.0, 0.0
        self._problem: str | None = None
        self._stats: Json = {}
        """Figures of `stats.json`, while a finished run is read."""
        self._of_finished: Json = {}
        """The summary of a finished run, which does not change."""

    @property
    def health(self) -> list[HealthReport]:
        """Return the latest report of each process, as it was read."""
        return self._state.health

    @property
    def is_reading(self) -> bool:
        """Whether the records are being read."""
        return self._reading is not None and not self._reading.done()

    async def refresh(self) -> None:
        """Read what was recorded since the last time, unless that was just now. Waits for it for FIRST_WAIT_SECONDS at
        most; afterwards the reading continues in the background.
        """
        if self._reading is None or self._reading.done():
            if self._state.finished or time.monotonic() < self._read_at + _pause(self._read_seconds):
                return
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait([self._reading], timeout=FIRST_WAIT_SECONDS)

    async def read(self) -> None:
        """Read what was recorded since the last time. Raises RecordCorrupt, StorageError."""
        store = self.run.store
        stored = await store.get("stats.json")
        finished = stored is not None
        if stored is not None:
            with contextlib.suppress(RecordCorrupt):  # the seals have all of it
                self._stats = of_statistics(parsed_json("stats.json", stored), self.run.job.spec.group_size)
        aborted = await read_abort(store)
        await self.table.load()
        self._stats = {}
        in_flight, shown = (0, []) if finished else await self._in_flight.look(self.table)
        health = [] if finished else await health_reports(store)
        self._state = _State(finished, aborted["message"] if aborted else None, in_flight, shown, health)

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            await self.read()
            self._problem = None
        except Exception as error:  # noqa: BLE001 - the page shows it, and reading is tried again
            self._problem = f"{type(error).__name__}: {error}"
        self._read_at = time.monotonic()
        self._read_seconds = self._read_at - began

    async def rewards(self) -> Rewards:
        """Return the rewards of graded rollouts, after all that is recorded has been read."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
        graded = "SELECT task, reward FROM rollouts WHERE outcome = 'Completed' AND reward IS NOT NULL"
        return by_task((task, reward) for task, reward in self.table.query(graded))

    @property
    def is_finished(self) -> bool:
        """Whether its results are written, and read."""
        return self._state.finished and not self.is_reading

    def summary(self) -> Json:
        """Return what the run's page shows, of what is read so far."""
        if self._state.finished and self._of_finished:
            return self._of_finished
        now = time.time()
        state, latest = self._named_state(), self._latest()
        found = {
            "uri": self.run.store.uri,
            "state": state,
            "latest": latest,
            "aborted": self._state.aborted,
            "isReading": self.is_reading and not self._state.finished,
            "problem": self._problem,
            "damaged": {str(index): problem for index, problem in sorted(self.table.damaged.items())},
            "inFlight": {"count": self._state.in_flight, "shown": self._state.shown},
            "health": _health(self._state.health, now) if state == "running" else None,
            "error": next((visible(report.error) for report in self._state.health if report.error), None),
            "fields": fields(),
            "time": now,
            **summary(self.run, self.table, now=now),
            **self._stats,
            "read": len(self.table),
        }
        self._of_finished = found if self._state.finished else {}
        return found

    def row(self) -> Json:
        """Return the run as a row of the list of runs, of what is read so far."""
        found = self.summary()
        damaged = next(iter(found["damaged"].values()), found["problem"])
        return (
            facts(self.run)
            | {name: found[name] for name in (*FIGURES_OF_A_ROW, "cost", "aborted")}
            | {
                "tasks": self.run.job_file.tasks.count,
                "tokens": found["promptTokens"] + found["completionTokens"],
                "duration": (found["time"] if found["state"] == "running" else found["latest"] or found["created"])
                - found["created"],
                "state": "damaged" if damaged else found["state"],
                "damaged": damaged,
            }
        )

    def _named_state(self) -> str:
        state, sealed = self._state, len(self.table)
        return state_of(
            self.run.job_file.uid, state.health, finished=state.finished, sealed=sealed, aborted=state.aborted
        )

    def _latest(self) -> float | None:
        """Return the time of the latest record."""
        times = [entry["since"] for entry in self._state.shown if entry["since"] is not None]
        times += [row[0] for row in self.table.query("SELECT max(finished) FROM rollouts") if row[0] is not None]
        return max(times, default=None)

    async def rollout(self, index: int, attempt: int | None = None) -> Rollout:
        """Return a rollout for its page. Raises NoSuchRun, RecordCorrupt."""
        seal, records = await self._records(index, attempt)
        task, member = member_of(self.run, index)
        if seal is None or attempt not in (None, seal.result.attempt):
            return Rollout(records, task=task, member=member)
        advantage = self._advantage(index, seal.result.group)
        return Rollout(records, seal.result, seal.verdict, advantage, task=seal.result.task, member=member)

    async def reader(self, index: int) -> tuple[RunReader, Seal | None]:
        """Return a reader that knows the seal of this rollout, and the seal if there is one. Raises RecordCorrupt."""
        key, seals = f"seals/{index}.json", StoredSeals()
        if (data := await self.run.store.get(key)) is not None:
            seals.add(key, data)
        return RunReader(self.run, seals), seals.get(index)

    async def records(self, index: int, attempt: int | None = None) -> list[Record]:
        """Return the records of an attempt, sorted by conversation. Raises NoSuchRun, RecordCorrupt."""
        return (await self._records(index, attempt))[1]

    async def _records(self, index: int, attempt: int | None) -> tuple[Seal | None, list[Record]]:
        reader, seal = await self.reader(index)
        return seal, await reader.records(index, attempt)

    @contextlib.asynccontextmanager
    async def artifacts(self, index: int) -> AsyncIterator[tuple[Any, Mapping[str, str]]]:
        """Return the archive of a rollout's artifacts, None without one, and what the agent changed in the prepared files,
        by path. Raises NoSuchRun, RecordCorrupt.
        """
        records = await self.records(index)
        async with open_artifacts(self.run.store, records) as archive:
            yield archive, changes(records)

    def _advantage(self, index: int, group: int) -> float | None:
        """Return the advantage among the rollouts that are sealed so far; None if too many would have to be compared."""
        spec = self.run.job.spec.reward
        if spec is None:
            return None
        condition = '"group" = ?' if spec.group_by is GroupBy.GROUP else "? IS NOT NULL"
        compared = [row[0] for row in self.table.query(f'SELECT "index" FROM rollouts WHERE {condition}', (group,))]
        if len(compared) > COMPARED:
            return None
        return advantages((self.table[number] for number in compared), spec).get(index)

    async def aclose(self) -> None:
        """Stop reading, and remove the table."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self.table.close()


def _pause(read_seconds: float) -> float:
    """Return the seconds until something is read again whose last reading took so long."""
    return max(FRESH_SECONDS, read_seconds / BUSY_SHARE)


def _health(reports: Sequence[HealthReport], now: float) -> Json:
    """Return what the processes that work on a run wait for, added up."""
    working = [report for report in reports if is_working(report, now)]
    lost, sandboxes = Counter[str](), Counter[str]()
    for report in reports:
        lost.update(report.lost_attempts)
    for report in working:
        sandboxes.update(report.sandboxes)
    silent = max(working, key=lambda report: report.silent_seconds, default=None)
    return {
        "processes": len(working),
        "failingCalls": sum(report.failing_calls for report in working),
        "callRetries": sum(report.call_retries for report in reports),
        "rateLimitedCalls": sum(report.rate_limited_calls for report in reports),
        "callProblem": next((visible(report.call_problem) for report in working if report.call_problem), None),
        "silentSeconds": silent.silent_seconds if silent else 0,
        "silentPlace": silent.silent_place if silent else None,
        "storageFailures": sum(report.storage_failures for report in working),
        "sandboxes": {state: sandboxes[state] for state in sorted(sandboxes)},
        "sandboxProblem": next((visible(report.sandbox_problem) for report in working if report.sandbox_problem), None),
        "lostAttempts": dict(lost.most_common()),
    }


@dataclass
class _Stopped:
    """A run on which no process works."""

    row: Json
    health: list[HealthReport]

    async def is_current(self, run: RunFolder) -> bool:
        """Return whether no process works on it, nor has done so since."""
        if self.row["damaged"] is not None or holder(run.job_file.uid) is not None:
            return False
        return await health_reports(run.store) == self.health


class Library:
    """The runs of a place. Must be closed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[str, OpenRun] = {}
        self._folders: dict[str, RunFolder] = {}
        self._damaged: dict[str, DamagedRun] = {}
        """Runs whose `job.json` cannot be read."""
        self._listing = asyncio.Lock()
        self._viewed: set[str] = set()
        """Runs whose pages were asked for. They stay open."""
        self._finished: dict[str, Json] = {}
        """Rows of finished runs, which do not change."""
        self._stopped: dict[str, _Stopped] = {}
        """Runs on which no process works. They are closed meanwhile, because there may be thousands."""
        self._compared: dict[tuple[str, str], tuple[float, Comparison]] = {}
        """Comparisons, and until when each is used."""
        self._rows: list[Json] = []
        self._listed_at, self._listing_seconds = -math.inf, 0.0

    @property
    def uri(self) -> str:
        """Return the URI of the place."""
        return self._store.uri

    async def rows(self) -> list[Json]:
        """Return the list of runs, newest first, as it was at most a moment ago."""
        async with self._listing:
            began = time.monotonic()
            if began >= self._listed_at + _pause(self._listing_seconds):
                self._rows = await self._list()
                self._listed_at = time.monotonic()
                self._listing_seconds = self._listed_at - began
            return self._rows

    async def _list(self) -> list[Json]:
        found_runs = {run.folder: run async for run in run_folders(self._store)}
        self._folders = {folder: run for folder, run in found_runs.items() if isinstance(run, RunFolder)}
        self._damaged = {folder: run for folder, run in found_runs.items() if isinstance(run, DamagedRun)}
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def found(run: RunFolder) -> Json:
            async with gate:
                return await self._row(run)

        rows = await asyncio.gather(*map(found, self._folders.values()))
        rows += map(row_of_damaged, self._damaged.values())
        return sorted(rows, key=lambda row: (row["created"], row["folder"]), reverse=True)

    async def _row(self, run: RunFolder) -> Json:
        if run.folder not in self._finished:
            if await run.store.get("stats.json") is None:
                return await self._row_of_unfinished(run)
            self._finished[run.folder] = row(await overview(run))
        return self._finished[run.folder]

    async def _row_of_unfinished(self, run: RunFolder) -> Json:
        stopped = self._stopped.get(run.folder)
        if stopped is not None and await stopped.is_current(run):
            return stopped.row
        opened = self._opened(run)
        await opened.refresh()
        found = opened.row()
        if found["state"] != "running" and not opened.is_reading and run.folder not in self._viewed:
            self._stopped[run.folder] = _Stopped(found, opened.health)
            await self._open.pop(run.folder).aclose()
        return found

    def _opened(self, run: RunFolder) -> OpenRun:
        if run.folder not in self._open:
            self._open[run.folder] = OpenRun(run)
        return self._open[run.folder]

    async def folder(self, name: str) -> RunFolder:
        """Return the run in a folder. Raises NoSuchRun."""
        if name not in self._folders:
            async with self._listing:
                await self._list()
        if name in self._damaged:
            raise NoSuchRun(self._damaged[name].problem)
        if name not in self._folders:
            raise NoSuchRun(f"{self.uri} has no run in a folder {name}")
        return self._folders[name]

    async def run(self, folder: str) -> OpenRun:
        """Return an open run, up to date. Raises NoSuchRun."""
        run = self._opened(await self.folder(folder))
        self._viewed.add(folder)
        await run.refresh()
        return run

    async def compare(self, before: OpenRun, after: OpenRun) -> Comparison:
        """Compare two runs by task."""
        key, now = (before.run.folder, after.run.folder), time.monotonic()
        if key not in self._compared or now >= self._compared[key][0]:
            first, second = await before.rewards(), await after.rewards()
            began = time.monotonic()
            found = compared(before.run, first, after.run, second)
            ended = time.monotonic()
            is_final = before.is_finished and after.is_finished
            self._compared.pop(key, None)
            self._compared[key] = math.inf if is_final else ended + _pause(ended - began), found
            if len(self._compared) > MOST_COMPARISONS:
                del self._compared[next(iter(self._compared))]
        return self._compared[key][1]

    async def close(self) -> None:
        """Close all runs."""
        for run in self._open.values():
            await run.aclose()
