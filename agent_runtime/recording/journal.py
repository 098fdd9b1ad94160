"""The journal of one attempt: its records, its artifacts, and the seal that ends its rollout.

The records are below `attempts/<index>/<attempt>/`, written and taken over as described in `epoch_log.py`.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

from agent_runtime.recording import atif, branches, segments
from agent_runtime.recording.artifacts import ArtifactsTooLarge, Packer, unpacked
from agent_runtime.recording.attempt_folder import RECORDS, TOKENS, AttemptFolder
from agent_runtime.recording.epoch_log import EpochLog, Superseded
from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.messages import linear
from agent_runtime.recording.seals import parse_seal, read_seal
from agent_runtime.recording.segments import RecordCorrupt, Repeats
from agent_runtime.recording.store import StorageError
from agent_runtime.wall_clock import unix_time
from rollout_api.records import ArtifactsRecord, ObjectDigest, Record, ResponseRecord, Result, Seal, StopRecord, Verdict

__all__ = ["AlreadySealed", "ArtifactsTooLarge", "Journal", "RecordCorrupt", "Superseded"]

log = logging.getLogger(__name__)

DELETE_SECONDS: Final = 15.0
"""Time for which the deletion of segments is retried. It frees space, and the rollout does not depend on it."""
_LARGE_BYTES: Final = 1 << 20
"""Compressed records above this size are sealed in a thread: with them it takes about 0.1 s, in which others would wait."""


class AlreadySealed(Exception):
    """Another runner has sealed the rollout. `result` is its result."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"rollout {result.index} is sealed already")
        self.result = result


class Journal:
    """One epoch of an attempt. Order of calls: `claim`, then raise epoch and holder at the executor, then `begin`, then
    `append`.
    """

    def __init__(self, record: JobRecord, index: int, folder: AttemptFolder, log: EpochLog) -> None:
        self.epoch, self.holder = log.epoch, log.holder
        self._record, self._index, self._folder, self._log = record, index, folder, log
        self._store = record.store
        self.append, self.store, self.test_storage = log.append, log.store, log.test_storage
        self._artifacts: ObjectDigest | None = None

    @classmethod
    async def claim(cls, record: JobRecord, index: int, attempt: int) -> "Journal":
        """Claim the next epoch of the attempt. The previous holder is fenced off by `begin`."""
        folder = AttemptFolder.of_rollout(record.store, index, attempt)
        return cls(record, index, folder, await EpochLog.claim(folder, f"rollout {index}, attempt {attempt}"))

    async def peek(self) -> list[Record]:
        """See EpochLog. Raises AlreadySealed."""
        return await self._unless_sealed(self._log.peek())

    async def begin(self) -> list[Record]:
        """See EpochLog. Raises AlreadySealed."""
        return await self._unless_sealed(self._log.begin())

    async def _unless_sealed(self, reading: Coroutine[Any, Any, list[Record]]) -> list[Record]:
        """Return what is read. An earlier holder that seals the rollout deletes its segments, so look for a seal after the
        reading.
        """
        try:
            records = await reading
        except RecordCorrupt:
            await self._refuse_sealed()
            raise
        if self.epoch > 1:
            await self._refuse_sealed()
        return records

    async def _refuse_sealed(self) -> None:
        if (seal := await read_seal(self._store, self._index)) is not None:
            raise AlreadySealed(seal.result)

    async def store_artifacts(self, chunks: AsyncIterator[bytes], limit: int) -> ArtifactsRecord:
        """Store a tar, compressed, in bounded memory; return its record, which is not appended yet and whose `bytes`
        are the tar's.

        Raises ArtifactsTooLarge if the tar has more than `limit` bytes, and errors of `chunks`; then no object remains.
        """
        packer = Packer(chunks, limit)
        self._artifacts = await self._store.create_stream(
            self._folder.object_key(self.epoch, "artifacts.tar.zst"), packer.packed()
        )
        return ArtifactsRecord(time=unix_time(), key=self._artifacts.key, bytes=packer.size)

    async def load_artifacts(self, record: ArtifactsRecord) -> AsyncIterator[bytes]:
        """Yield the stored tar in pieces of at most 1 MiB. Raises RecordCorrupt if it is damaged."""
        if record.key is None:
            raise ValueError(f"{self._log.name}: the artifacts' record has no key, so there is nothing to load")
        digest, size = hashlib.sha256(), 0

        async def packed(key: str) -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in self._store.stream(key):
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        async for piece in unpacked(record.key, packed(record.key), record.bytes):
            yield piece
        self._artifacts = ObjectDigest(key=record.key, sha256=digest.hexdigest(), bytes=size)

    async def store_program_trajectory(
        self, file: bytes, atif: bytes | None
    ) -> tuple[ObjectDigest, ObjectDigest | None]:
        """Store the trajectory file that a program wrote, and its ATIF conversion. Neither is in a record yet."""
        file_key, atif_key = (
            self._folder.object_key(self.epoch, f"program-trajectory.{suffix}") for suffix in ("zst", "json")
        )
        stored = await self._store.create_stream(file_key, Packer(_once(file), len(file)).packed())
        return stored, None if atif is None else await self._write_once(atif_key, atif)

    async def seal(self, result: Result, verdict: Verdict | None, records: Sequence[Record]) -> Result:
        """End the rollout: write its records, trajectory and tokens, then the seal, and delete the segments. Returns the
        sealed result.

        If a seal exists already, its result is returned: the first wins. `trajectory`, and `branches` if token ids were
        recorded, are filled in here. After a cancellation it may be called again, also with another result. Raises
        Superseded.
        """
        await self._log.settle()
        is_large = sum(item.bytes for item in self._log.objects) > _LARGE_BYTES
        derived, fields = await asyncio.to_thread(self._derived, records) if is_large else self._derived(records)
        written = await asyncio.gather(*(self._write_once(key, data) for key, data in derived.items()))
        seal = Seal(
            result=result.model_copy(update=fields),
            verdict=verdict,
            objects=[
                *written,
                *_experts_of(records),
                *await self._artifacts_of(records),
                *_program_trajectory_of(records),
            ],
        )
        key, data = f"seals/{self._index}.json", segments.json_bytes(seal)
        if not await self._store.create(key, data):
            data = await self._store.get(key) or b""
        # Parse the stored bytes, so that the caller gets the same value as a later process: surrogates were replaced.
        sealed = parse_seal(key, data).result
        if sealed.attempt == result.attempt:
            await self._delete_segments()
        return sealed

    def _derived(self, records: Sequence[Record]) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Return the objects to write, and fields of the result. They depend only on the records, so that sealing again
        after a cancellation writes the same bytes.
        """
        fields: dict[str, Any] = {}
        derived: dict[str, bytes] = {}
        if self._log.records:
            # The number is part of the name: a repeated seal may have more records, and an object is written once.
            name = f"{len(self._log.objects)}-{RECORDS}"
            derived[self._folder.object_key(self.epoch, name)] = Repeats().encode(self._log.records)
        records = linear(records)
        if samples := branches.token_branches(records):
            derived[self._folder.object_key(self.epoch, TOKENS)] = branches.encode_branches(samples)
            fields["branches"] = len(samples)
        if trajectory := atif.trajectory(self._record.job, f"{self._record.folder}/{self._index}", records):
            fields["trajectory"] = self._folder.object_key(self.epoch, "trajectory.json")
            derived[fields["trajectory"]] = segments.compact_json(trajectory)
        return derived, fields

    async def _delete_segments(self) -> None:
        """Delete what the sealed records replace. What remains after a failure is never read."""
        if not self._record.may_delete:
            return
        try:
            await replace(self._store, patience_seconds=DELETE_SECONDS).delete(self._log.replaceable)
        except StorageError as error:
            # Later rollouts do not wait again.
            self._record.may_delete = False
            log.info("segments of sealed rollouts remain, because storage does not delete objects: %s", error)

    async def _write_once(self, key: str, data: bytes) -> ObjectDigest:
        return await self._log.write_once(key, data)

    async def _artifacts_of(self, records: Sequence[Record]) -> list[ObjectDigest]:
        stored = next((r for r in records if isinstance(r, ArtifactsRecord) and r.key is not None), None)
        if stored is None:
            return []
        if self._artifacts is None or self._artifacts.key != stored.key:
            async for _ in self.load_artifacts(stored):
                pass  # an earlier epoch stored them, so compute their digest
        return [self._artifacts] if self._artifacts else []


def _experts_of(records: Sequence[Record]) -> list[ObjectDigest]:
    answers = (record for record in records if isinstance(record, ResponseRecord))
    return [answer.routed_experts.object for answer in answers if answer.routed_experts is not None]


def _program_trajectory_of(records: Sequence[Record]) -> list[ObjectDigest]:
    found = next((r.program_trajectory for r in records if isinstance(r, StopRecord) and r.program_trajectory), None)
    return [digest for digest in (found.file, found.atif) if digest] if found else []


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
