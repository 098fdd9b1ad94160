"""Read a run, finished or not, from its stored objects."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.recording import atif
from agent_runtime.recording.attempt_folder import RECORDS, TOKENS, AttemptFolder, checked_object
from agent_runtime.recording.branches import Branch, decode_branches, token_branches
from agent_runtime.recording.expert_arrays import ExpertArray, read_experts
from agent_runtime.recording.job_record import JobFile, job_files, newest_run, read_attempt_numbers, read_job_file
from agent_runtime.recording.messages import linear
from agent_runtime.recording.results import statistics_of
from agent_runtime.recording.seals import StoredSeals, read_seal, read_seals
from agent_runtime.recording.segments import Closing, RecordCorrupt, decode, restored, validated
from agent_runtime.recording.store import Store
from rollout_api.records import Outcome, Record, Result, Seal
from rollout_api.rollout_job import RolloutJob


class _Results(Sequence[Result]):
    """The results in seals, by index."""

    def __init__(self, seals: StoredSeals) -> None:
        self._seals, self._indexes = seals, list(seals)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self._seals.result(index) for index in self._indexes[position]]
        return self._seals.result(self._indexes[position])

    def __len__(self) -> int:
        return len(self._indexes)


class NoSuchRun(Exception):
    """The run does not exist, or it lacks the rollout."""


class RunFolder:
    """The folder of one run, of which only `job.json` is read. Raises RecordCorrupt if its manifest is invalid."""

    def __init__(self, store: Store, folder: str, job_file: JobFile) -> None:
        self.store, self.folder, self.job_file = store, folder, job_file
        key = f"{folder}/job.json"
        self.job = validated(key, lambda _: RolloutJob.model_validate(job_file.manifest), b"", "manifest.")

    @property
    def total(self) -> int | None:
        """Return the number of rollouts; None for an open stream."""
        return None if self.job.spec.tasks.stream else self.job_file.tasks.count * self.job.spec.group_size


@dataclass(frozen=True)
class DamagedRun:
    """A run whose `job.json` cannot be read. `problem` names the file and says what to do."""

    folder: str
    problem: str
    written: float
    """Unix time at which this file was written."""


async def run_folders(store: Store) -> AsyncIterator[RunFolder | DamagedRun]:
    """Yield all runs, also those whose `job.json` cannot be read."""
    async for folder, job_file in job_files(store):
        try:
            if isinstance(job_file, RecordCorrupt):
                raise job_file
            run = RunFolder(store.below(folder), folder, job_file)
        except RecordCorrupt as error:
            advice = "Restore this file from a copy of the run, or move the folder away."
            written = await store.modified(f"{folder}/job.json") or 0.0
            yield DamagedRun(folder, f"{error}. {advice}", written)
        else:
            yield run


class RunReader(RunFolder):
    """One run. Seals are read once, when it is opened, and kept on disk; records are read on demand.

    If the job has `spec.reward`, results have advantages relative to the rollouts that are sealed so far.
    """

    def __init__(self, run: RunFolder, seals: StoredSeals) -> None:
        super().__init__(run.store, run.folder, run.job_file)
        self.seals = seals
        if self.job.spec.reward is not None:
            seals.compare(self.job.spec.reward)

    @classmethod
    async def of(cls, run: RunFolder) -> "RunReader":
        """Read the seals. Raises RecordCorrupt."""
        return cls(run, await read_seals(run.store))

    def results(self) -> Sequence[Result]:
        """Results of the sealed rollouts by index; each is read from disk on access."""
        return _Results(self.seals)

    def stats(self) -> dict[str, Any]:
        """Return statistics of the sealed rollouts, as in `stats.json`."""
        return statistics_of(self.results())

    async def attempts(self, index: int) -> list[int]:
        """Return the begun attempts of a rollout in order, sealed or not."""
        return await read_attempt_numbers(self.store, index)

    async def records(self, index: int, attempt: int | None = None) -> list[Record]:
        """Return the records of an attempt, sorted by conversation. Default: the sealed attempt, or else the newest.

        Raises NoSuchRun, RecordCorrupt.
        """
        return linear(await self.journal(index, attempt))

    async def journal(self, index: int, attempt: int | None = None) -> list[Record]:
        """Return the records of an attempt in the order of writing, as a replay needs them.

        For a sealed attempt, exactly the objects in its seal, each checked against its digest. Raises NoSuchRun,
        RecordCorrupt.
        """
        seal = self.seals.get(index)
        if seal is not None and attempt in (None, seal.result.attempt):
            return await sealed_records(self.store, seal)
        attempts = await self.attempts(index)
        if not attempts or attempt not in (None, *attempts):
            known = f"no attempt {attempt}: it has {', '.join(map(str, attempts))}" if attempts else "not begun"
            raise NoSuchRun(f"rollout {index} of {self.folder} has {known}")
        newest = attempts[-1] if attempt is None else attempt
        return await read_attempt(self.store, index, newest)

    async def trajectory(self, index: int) -> dict[str, Any] | None:
        """Return the ATIF trajectory of a rollout so far; None without a model call.

        The outcome of a sealed one is in its `extra`. Raises NoSuchRun, RecordCorrupt.
        """
        trajectory = atif.trajectory(self.job, f"{self.folder}/{index}", await self.records(index))
        if trajectory is not None and index in self.seals:
            trajectory["extra"] = self.seals[index].result.wire()
        return trajectory

    async def program_trajectory(self, index: int) -> dict[str, Any] | None:
        """Return the trajectory that the program of a sealed rollout wrote, as ATIF; None without one."""
        own = self.seals[index].result.program_trajectory
        return None if own is None or own.atif is None else json.loads(await checked_object(self.store, own.atif))

    async def routed_experts(self, branch: Branch) -> ExpertArray | None:
        """Return the routed experts of one of these sequences; None if they were not recorded. Raises RecordCorrupt."""
        return await read_experts(self.store, branch)

    async def tokens(self, index: int) -> list[Branch]:
        """Return the token sequences of a rollout, one for each branch; empty if token ids were not recorded."""
        seal = self.seals.get(index)
        return token_branches(await self.records(index)) if seal is None else await _tokens_of(self.store, seal)


async def read_attempt(store: Store, index: int, attempt: int) -> list[Record]:
    """Return the current records of an attempt of a rollout below a run's folder, in the order of writing. Raises
    RecordCorrupt.
    """
    problem: RecordCorrupt | None = None
    try:
        records = await AttemptFolder.of_rollout(store, index, attempt).records()
    except RecordCorrupt as error:
        problem = error
    # A seal replaces the segments, so look for one after reading them.
    seal = await read_seal(store, index)
    if seal is not None and seal.result.attempt == attempt:
        return await sealed_records(store, seal)
    if problem is not None:
        raise problem
    return records


async def sealed_records(store: Store, seal: Seal) -> list[Record]:
    """Return the records of a sealed rollout in the order of writing, checked against the digest. Raises RecordCorrupt."""
    item = next((item for item in seal.objects if item.key.endswith(RECORDS)), None)
    if item is None:
        if seal.result.turns:
            problem = f"it lists no records of the rollout's {seal.result.turns} turns"
            raise RecordCorrupt(f"seals/{seal.result.index}.json", problem)
        return []
    content = decode(item.key, await checked_object(store, item))
    if isinstance(content, Closing):
        raise RecordCorrupt(item.key, "the seal lists it as records, but it contains none")
    return restored(item.key, content)


class NoTokenIds(Exception):
    """A rollout has no training data, because its model returned no token ids."""


async def sealed_tokens(store: Store, index: int) -> list[Branch]:
    """Return the token sequences of a sealed rollout, like `RunReader.tokens`, without reading the rest of the run.
    Empty if the rollout is masked or has no model call. Raises NoTokenIds if its model returned none, NoSuchRun if it is
    not sealed, RecordCorrupt.
    """
    seal = await read_seal(store, index)
    if seal is None:
        raise NoSuchRun(f"rollout {index} of {store.uri} is not sealed")
    branches = await _tokens_of(store, seal)
    if not branches and seal.result.turns and seal.result.outcome is Outcome.COMPLETED:
        raise NoTokenIds(
            f"rollout {index} of {store.uri} has no token ids, because its model returned none. Serve the model with vLLM "
            "0.10.2 or newer, or with SGLang; mode: Train refuses other servers before the first rollout"
        )
    return branches


async def _tokens_of(store: Store, seal: Seal) -> list[Branch]:
    stored = next((item for item in seal.objects if item.key.endswith(TOKENS)), None)
    return [] if stored is None else decode_branches(stored.key, await checked_object(store, stored))


async def open_run(store: Store, name: str) -> RunReader:
    """Return the run that `find_folder` finds, with its seals. Raises NoSuchRun, RecordCorrupt."""
    return await RunReader.of(await find_folder(store, name))


async def find_folder(store: Store, name: str) -> RunFolder:
    """Return the run in the folder of that name, or the newest run of the job of that name. Raises NoSuchRun,
    RecordCorrupt.
    """
    folder, job_file = name, await read_job_file(store, name)
    if job_file is None and (newest := await newest_run(store, name)):
        folder, job_file = newest
    if job_file is None:
        folders = await store.folders()
        known = f"there are {', '.join(folders[-10:])}" if folders else "it is empty"
        raise NoSuchRun(f"{store.uri} has no run of {name!r}; {known}")
    return RunFolder(store.below(folder), folder, job_file)
