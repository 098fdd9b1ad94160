"""Records that are durable when `append` returns, and are kept when another holder takes over.

docs/recording.md ("Taking an attempt over") lists the keys, all of them create-only. The next holder *closes* each
earlier epoch by creating its next segment, so it has every record that was acknowledged to an earlier holder.
"""

import asyncio
import secrets
from collections.abc import Sequence

from agent_runtime.recording import segments
from agent_runtime.recording.attempt_folder import AttemptFolder, Claim, EpochSegments, digest_of
from agent_runtime.recording.segments import Closing, Repeats, restored
from agent_runtime.recording.store import StorageError
from rollout_api.records import ObjectDigest, Record


class Superseded(Exception):
    """Another holder has taken the folder over. This one must stop; its further writes do not count."""


class EpochLog:
    """One epoch of a folder. Order of calls: `claim`, then fence everything that the older holder used, then `begin`,
    then `append`.
    """

    def __init__(self, folder: AttemptFolder, epoch: int, holder: str, name: str) -> None:
        self.epoch, self.holder = epoch, holder
        self.name = f"{name}, epoch {epoch}"
        """Name for messages."""
        self.objects: list[ObjectDigest] = []
        """The valid segments of all epochs in order."""
        self._folder, self._store = folder, folder.store
        self._lock = asyncio.Lock()
        self._begun = False
        self._next = 0
        self._unsettled: tuple[bytes, Sequence[Record]] | None = None
        self._records: list[Record] = []
        self._repeats = Repeats()

    @classmethod
    async def claim(cls, folder: AttemptFolder, name: str) -> "EpochLog":
        """Claim the next epoch. The previous holder is fenced off by `begin`."""
        latest = 0
        while (log := await cls.claim_after(latest, folder, name)) is None:
            latest = await folder.latest_epoch()
        return log

    @classmethod
    async def claim_after(
        cls, latest: int, folder: AttemptFolder, name: str, address: str | None = None
    ) -> "EpochLog | None":
        """Claim the epoch after `latest`, reachable at `address`; None if another holder has it already."""
        claim = Claim(epoch=latest + 1, holder=secrets.token_hex(8), address=address)
        if not await folder.store.create(folder.claim_key(claim.epoch), claim.encode()):
            return None
        return cls(folder, claim.epoch, claim.holder, name)

    @property
    def records(self) -> Sequence[Record]:
        """The records that count, in order, after `begin`."""
        return self._records

    @property
    def replaceable(self) -> list[str]:
        """Keys of the objects that nothing needs when the records are stored elsewhere. Claims and closings stay, so that
        an older holder is still refused.
        """
        starts = [self._folder.start_key(epoch) for epoch in range(1, self.epoch + 1)]
        return [*starts, *(item.key for item in self.objects)]

    async def peek(self) -> list[Record]:
        """Return the records of earlier epochs so far. An older holder may still add to them."""
        return await self._folder.records() if self.epoch > 1 else []

    async def begin(self) -> list[Record]:
        """Close the earlier epochs; return the valid records in order. Fence everything that the older holder used
        before this call. A second call returns the same records, and those appended meanwhile. Raises Superseded,
        RecordCorrupt.
        """
        async with self._lock:
            if not self._begun:
                earlier = await self._close_earlier() if self.epoch > 1 else {}
                follows = {str(epoch): len(found.objects) for epoch, found in earlier.items()}
                start = {"epoch": self.epoch, "holder": self.holder, "follows": follows}
                if not await self._store.create(self._folder.start_key(self.epoch), segments.compact_json(start)):
                    raise Superseded(f"{self.name}: another holder has begun it")
                found_records = [record for found in earlier.values() for record in found.records]
                self._records = restored(self.name, found_records)
                self._repeats = Repeats(self._records)
                self.objects = [digest for found in earlier.values() for digest in found.objects]
                self._begun = True
        return list(self._records)

    async def append(self, records: Sequence[Record]) -> None:
        """Write records as one segment; they are durable when this returns. Without records, nothing is written.

        Appends are written in the order of their calls. If one is cancelled or times out, its records precede those of
        the next one, or are missing. Raises Superseded, StorageUnavailable.
        """
        if not self._begun:
            raise RuntimeError(f"{self.name}: call begin() before append()")
        async with self._lock:
            await self._write_pending()
            if records:
                self._unsettled = self._repeats.encode(records), records
                await self._write_pending()

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        """Store an object beside the records, in a zstd frame. It counts only if a record names it. Raises
        StorageError.
        """
        key = self._folder.object_key(self.epoch, f"{name}.zst")
        return await self.write_once(key, await asyncio.to_thread(segments.compress, data))

    async def test_storage(self) -> None:
        """Return when storage has answered a small read. Raises StorageError."""
        await self._store.modified(self._folder.claim_key(self.epoch))

    async def write_once(self, key: str, data: bytes) -> ObjectDigest:
        """Write an object whose name this epoch uses once. Raises StorageError."""
        if not await self._store.create(key, data):
            raise StorageError(f"{self._store.uri}/{key}: this epoch wrote another object; run the job again")
        return digest_of(key, data)

    async def settle(self) -> None:
        """Wait until the outcome of a cancelled append is known. Raises Superseded if a later epoch is claimed, and
        StorageUnavailable.
        """
        async with self._lock:
            await self._write_pending()
        if (later := await self._folder.latest_claim(self.epoch + 1)) is not None:
            raise Superseded(f"{self.name}: epoch {later.epoch} is claimed; another holder continues it")

    async def _write_pending(self) -> None:
        """Write the pending segment. Its bytes are kept until the outcome is known, so that each number is used once."""
        if self._unsettled is None:
            return
        data, records = self._unsettled
        key = self._folder.segment_key(self.epoch, self._next)
        if not await self._store.create(key, data):
            raise Superseded(f"{self.name}: a later epoch has closed it; another holder continues it")
        self._unsettled = None
        self._next += 1
        self._records += records
        self.objects.append(digest_of(key, data))

    async def _close_earlier(self) -> dict[int, EpochSegments]:
        """Close all earlier epochs, so that nothing can be added to them; return their segments."""
        if (latest := await self._folder.latest_epoch()) > self.epoch:
            raise Superseded(f"{self.name}: epoch {latest} is claimed; another holder continues it")
        found = await self._folder.read()
        closing = segments.encode_closing(Closing(closed_by=self.epoch, holder=self.holder))
        closed = {}
        for epoch in range(1, self.epoch):
            closed[epoch] = earlier = found.get(epoch, EpochSegments())
            while earlier.closed_by is None:
                key = self._folder.segment_key(epoch, len(earlier.objects))
                if await self._store.create(key, closing):
                    break
                # Another holder created this segment first: read its records or its closing.
                earlier.add(key, await self._store.get(key) or b"")
        return closed
