"""The seals of a run, and their results in bounded memory.

Reading a seal takes a request, and its verdict may be a hundred times as large as its result. So runners also write the
results to `results-index/<digest>.jsonl.zst`, some hundreds per object. Only a seal proves that a rollout ended:
entries without a seal are ignored, and seals without an entry are read.
"""

import asyncio
import hashlib
import re
import sqlite3
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from pydantic_core import from_json

from agent_runtime.recording.results import result_line
from agent_runtime.recording.segments import RecordCorrupt, compress, decompress, validated
from agent_runtime.recording.store import READS_AT_ONCE, Store
from agent_runtime.statistics import advantages
from rollout_api.records import Outcome, Result, Seal
from rollout_api.rewards import RewardNormalization

INDEX: Final = "results-index"

ENTRIES: Final = 500
"""Results per object of the index. After a crash, at most this many seals are read one by one; 100,000 results need 200
objects.
"""

Wanted = Callable[[int], bool]
_Row = tuple[int, bytes, str, float | None, str | None]
T = TypeVar("T", covariant=True)


class _Rows(Mapping[int, T]):
    """Rows by rollout index in a temporary file: those of 100,000 rollouts may take gigabytes."""

    def __init__(self, columns: str) -> None:
        # An empty name: SQLite uses a temporary file, and 2 MB of memory.
        self._table = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._table.close)
        self._table.execute("PRAGMA journal_mode = OFF")
        self._table.execute(f"CREATE TABLE results (number INTEGER PRIMARY KEY, line BLOB, {columns})")

    def __contains__(self, index: object) -> bool:
        return self._table.execute("SELECT 1 FROM results WHERE number = ?", (index,)).fetchone() is not None

    def __iter__(self) -> Iterator[int]:
        return (number for (number,) in self._table.execute("SELECT number FROM results ORDER BY number"))

    def __len__(self) -> int:
        count: int = self._table.execute("SELECT count(*) FROM results").fetchone()[0]
        return count

    def _column(self, name: str, index: int) -> bytes:
        found = self._table.execute(f"SELECT {name} FROM results WHERE number = ?", (index,)).fetchone()
        if found is None:
            raise KeyError(index)
        data: bytes = found[0]
        return data


class SealedResults(_Rows[Result]):
    """The results of the sealed rollouts that are `wanted`, by index. Must be closed."""

    def __init__(self, store: Store, wanted: Wanted = lambda index: True) -> None:
        super().__init__("outcome TEXT, reward REAL, policy TEXT")
        self._store, self._wanted = store, wanted
        self._unindexed: list[bytes] = []

    def __getitem__(self, index: int) -> Result:
        return Result.model_validate_json(self._column("line", index))

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Return the number of rollouts by outcome."""
        counts = self._table.execute("SELECT outcome, count(*) FROM results GROUP BY outcome")
        return Counter({Outcome(outcome): count for outcome, count in counts})

    @property
    def mean_reward(self) -> float | None:
        """Return the mean over the results with a reward."""
        mean: float | None = self._table.execute("SELECT avg(reward) FROM results").fetchone()[0]
        return mean

    @property
    def newest_policy(self) -> int | None:
        """The newest policy version that sampled a token of them."""
        # Stored as text: a version may exceed SQLite's integers.
        query = "SELECT policy FROM results WHERE policy IS NOT NULL ORDER BY length(policy) DESC, policy DESC LIMIT 1"
        found = self._table.execute(query).fetchone()
        return None if found is None else int(found[0])

    async def load(self) -> None:
        """Read the seals in storage. Raises RecordCorrupt naming the key of a damaged seal."""
        sealed, entries = await asyncio.gather(_sealed(self._store), self._store.list(INDEX))
        unread = {index for index in sealed if self._wanted(index) and index not in self}
        async for key, data in _objects(self._store, [meta.key for meta in entries]):
            try:
                rows = [row for row in map(_row, decompress(key, data).splitlines()) if row[0] in unread]
            except RecordCorrupt:
                continue  # the index is incomplete; the missing results are read from the seals
            self._insert(rows)
            unread.difference_update(row[0] for row in rows)
            await asyncio.sleep(0)  # other tasks run while a large run is read
        async for key, data in _objects(self._store, [f"seals/{index}.json" for index in sorted(unread)]):
            try:
                result = parse_seal(key, data).result
            except RecordCorrupt as error:
                self._report_damage(error)
            else:
                await self.add(result)

    def _report_damage(self, error: RecordCorrupt) -> None:
        raise error

    async def add(self, result: Result) -> None:
        """Add a result whose seal is written. Writes an object of the index when there are enough."""
        line = result_line(result)
        self._insert([_row(line)])
        self._unindexed.append(line)
        if len(self._unindexed) >= ENTRIES:
            await self._write_index()

    async def end(self) -> None:
        """Write the remaining results to the index, unless there are so few that reading their seals is as fast."""
        if len(self._unindexed) > READS_AT_ONCE:
            await self._write_index()

    def close(self) -> None:
        """Remove the temporary file."""
        self._table.close()

    async def _write_index(self) -> None:
        lines, self._unindexed = self._unindexed, []
        data = compress(b"".join(lines))
        await self._store.put(f"{INDEX}/{hashlib.sha256(data).hexdigest()}.jsonl.zst", data)

    def _insert(self, rows: Iterable[_Row]) -> None:
        self._table.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)", rows)


class StoredSeals(_Rows[Seal]):
    """Complete seals by index."""

    def __init__(self) -> None:
        super().__init__("data BLOB")
        self._advantages: Mapping[int, float] | None = None

    def add(self, key: str, data: bytes) -> None:
        """Add a seal. Raises RecordCorrupt."""
        result = parse_seal(key, data).result
        self._table.execute("INSERT INTO results VALUES (?, ?, ?)", (result.index, result_line(result), compress(data)))

    def result(self, index: int) -> Result:
        """Return only the result, which takes a tenth of the time, because a verdict is large."""
        return self._compared(Result.model_validate_json(self._column("line", index)))

    def compare(self, spec: RewardNormalization) -> None:
        """Set the results' advantages relative to all of these."""
        self._advantages = advantages(map(self.result, self), spec)

    def __getitem__(self, index: int) -> Seal:
        seal = Seal.model_validate_json(decompress(f"seals/{index}.json", self._column("data", index)))
        return seal.model_copy(update={"result": self._compared(seal.result)})

    def _compared(self, result: Result) -> Result:
        if self._advantages is None:
            return result
        return result.model_copy(update={"advantage": self._advantages.get(result.index)})


async def read_seals(store: Store) -> StoredSeals:
    """Return the complete seals below a run's folder. Raises RecordCorrupt."""
    seals = StoredSeals()
    async for key, data in _objects(store, [f"seals/{index}.json" for index in sorted(await _sealed(store))]):
        seals.add(key, data)
    return seals


async def read_seal(store: Store, index: int) -> Seal | None:
    """Return the seal of a rollout below a run's folder; None if it is not sealed. Raises RecordCorrupt."""
    key = f"seals/{index}.json"
    data = await store.get(key)
    return None if data is None else parse_seal(key, data)


def parse_seal(key: str, data: bytes) -> Seal:
    """Parse a seal. Raises RecordCorrupt."""
    seal = validated(key, Seal.model_validate_json, data)
    if key != f"seals/{seal.result.index}.json":
        raise RecordCorrupt(key, f"it seals rollout {seal.result.index}")
    return seal


async def _sealed(store: Store) -> list[int]:
    """Return the sealed rollouts. Raises RecordCorrupt for other names, except files that file managers create."""
    names = [meta.key.removeprefix("seals/") for meta in await store.list("seals")]
    seals = [name for name in names if not name.startswith(".")]
    if other := next((name for name in seals if not re.fullmatch(r"[0-9]+\.json", name)), None):
        raise RecordCorrupt(f"seals/{other}", "seals are named INDEX.json")
    return [int(name.removesuffix(".json")) for name in seals]


async def _objects(store: Store, keys: list[str]) -> AsyncIterator[tuple[str, bytes]]:
    """Yield keys with contents, some hundreds in memory at once; empty contents for a missing object."""
    step = 4 * READS_AT_ONCE
    for start in range(0, len(keys), step):
        batch = keys[start : start + step]
        for key, data in zip(batch, await store.get_all(batch), strict=True):
            yield key, data or b""


def _row(line: bytes) -> _Row:
    fields = from_json(line)  # in half the time of json.loads
    numbers = [version for version in fields.get("policyVersions", ()) if version.isdecimal()]
    return fields["index"], line, fields["outcome"], fields.get("reward"), numbers[-1] if numbers else None
