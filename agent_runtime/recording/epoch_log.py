"""Records that are durable when `append` returns, and takeovers that lose none of them.

docs/recording.md ("Taking an attempt over") has the keys, all of them create-only, and says why no record is acknowledged to
one holder and missed by the next: who takes over *closes* each earlier epoch by creating its next segment.
"""

import asyncio
import secrets
from collections.abc import Sequence

from agent_runtime.recording import segments
from agent_runtime.recording.attempt_folder import AttemptFolder, Claim, EpochSegments, digest_of
from agent_runtime.recording.repeats import Repeats, restored
from agent_runtime.recording.segments import Closing
from rollout_api.records import ObjectDigest, Record


class Superseded(Exception):
    """Somebody else has taken the folder over. This holder must stop; nothing that it writes counts any more."""


class EpochLog:
    """One epoch of a folder. `claim`, then fence whatever the older holder acted on, then `begin`, then `append`."""

    def __init__(self, folder: AttemptFolder, epoch: int, holder: str, name: str) -> None:
        self.epoch, self.holder = epoch, holder
        self.name = f"{name}, epoch {epoch}"
        """For messages."""
        self.objects: list[ObjectDigest] = []
        """The segments that count, of all epochs in order."""
        self._folder, self._store = folder, folder.store
        self._lock = asyncio.Lock()
        self._begun = False
        self._next = 0
        self._unsettled: tuple[bytes, Sequence[Record]] | None = None
        self._records: list[Record] = []
        self._repeats = Repeats()

    @classmethod
    async def claim(cls, folder: AttemptFolder, name: str) -> "EpochLog":
        """Make the next epoch ours. Whoever had it before is fenced off from `begin` on."""
        latest = 0
        while (log := await cls.claim_after(latest, folder, name)) is None:
            latest = await folder.latest_epoch()
        return log

    @classmethod
    async def claim_after(
        cls, latest: int, folder: AttemptFolder, name: str, address: str | None = None
    ) -> "EpochLog | None":
        """Make the epoch after `latest` ours, reached at `address`; None where another holder has it already."""
        claim = Claim(epoch=latest + 1, holder=secrets.token_hex(8), address=address)
        if not await folder.store.create(folder.claim_key(claim.epoch), claim.encode()):
            return None
        return cls(folder, claim.epoch, claim.holder, name)

    @property
    def records(self) -> Sequence[Record]:
        """The records that count, in order, from `begin` on."""
        return self._records

    async def peek(self) -> list[Record]:
        """The records that earlier epochs left so far. An older holder may still add to them."""
        return await self._folder.records() if self.epoch > 1 else []

    async def begin(self) -> list[Record]:
        """Close the earlier epochs; the records that count, in order. Comes after what the older holder acted on is fenced.

        A second call returns the same again, with what was appended meanwhile. Raises Superseded, RecordCorrupt.
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
        """Write records as one segment; durable when it returns. No records: nothing is written.

        Appends are written in the order of their calls. When one is cancelled or runs out of patience, its records stand
        before those of the next one, or not at all. Raises Superseded, StorageUnavailable.
        """
        if not self._begun:
            raise RuntimeError(f"{self.name}: begin() comes before append()")
        async with self._lock:
            await self._settle()
            if records:
                self._unsettled = self._repeats.encode(records), records
                await self._settle()

    async def settle(self) -> None:
        """Learn the fate of an append that was cancelled. Raises Superseded, StorageUnavailable."""
        async with self._lock:
            await self._settle()

    async def _settle(self) -> None:
        """Write the segment that is due. Its bytes stay until their fate is known, so that no number is used twice."""
        if self._unsettled is None:
            return
        data, records = self._unsettled
        key = self._folder.segment_key(self.epoch, self._next)
        if not await self._store.create(key, data):
            raise Superseded(f"{self.name}: a later epoch has closed it; another holder goes on with it")
        self._unsettled = None
        self._next += 1
        self._records += records
        self.objects.append(digest_of(key, data))

    async def _close_earlier(self) -> dict[int, EpochSegments]:
        """Close all earlier epochs, so that nothing can be added to them any more; what they hold."""
        if (latest := await self._folder.latest_epoch()) > self.epoch:
            raise Superseded(f"{self.name}: epoch {latest} is claimed; another holder goes on with it")
        found = await self._folder.read()
        closing = segments.encode_closing(Closing(closed_by=self.epoch, holder=self.holder))
        closed = {}
        for epoch in range(1, self.epoch):
            closed[epoch] = earlier = found.get(epoch, EpochSegments())
            while earlier.closed_by is None:
                key = self._folder.segment_key(epoch, len(earlier.objects))
                if await self._store.create(key, closing):
                    break
                # The older holder, or another one that takes over, was first: its segment counts, or its closing does.
                earlier.add(key, await self._store.get(key) or b"")
        return closed
