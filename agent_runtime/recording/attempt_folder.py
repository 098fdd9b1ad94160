"""The keys of one attempt, and reading its epochs' segments."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Final

from agent_runtime.recording import segments
from agent_runtime.recording.segments import Closing, RecordCorrupt, restored
from agent_runtime.recording.store import Store
from rollout_api.records import ObjectDigest, Record

_CLAIM: Final = re.compile(r"epoch-(\d+)\.json")
TOKENS: Final = "tokens.jsonl.zst"
"""Name of an epoch's sealed token sequences."""
RECORDS: Final = "records.jsonl.zst"
"""Name of a sealed rollout's records: all that its segments had."""
_SEGMENT: Final = re.compile(r"(\d+)-(\d+)\.jsonl\.zst")


@dataclass
class EpochSegments:
    """The segments of one epoch, in order."""

    records: list[Record] = field(default_factory=list)
    objects: list[ObjectDigest] = field(default_factory=list)
    closed_by: int | None = None
    """Epoch that closed this one; None while it is open."""

    def add(self, key: str, data: bytes) -> None:
        """Add the next segment. Raises RecordCorrupt."""
        if self.closed_by is not None:
            raise RecordCorrupt(key, f"it was written after epoch {self.closed_by} had closed this one")
        content = segments.decode(key, data)
        if isinstance(content, Closing):
            self.closed_by = content.closed_by
        else:
            self.records += content
            self.objects.append(digest_of(key, data))


@dataclass(frozen=True)
class Claim:
    """The holder of an epoch."""

    epoch: int
    holder: str
    """A random id."""
    address: str | None = None
    """URL at which others reach the holder, if they need to."""

    def encode(self) -> bytes:
        """Return its object."""
        fields = {"epoch": self.epoch, "holder": self.holder} | ({"address": self.address} if self.address else {})
        return segments.compact_json(fields)


@dataclass(frozen=True)
class AttemptFolder:
    """The folder of an attempt, or of a session of the proxy."""

    store: Store
    _path: str

    @classmethod
    def of_rollout(cls, store: Store, index: int, attempt: int) -> "AttemptFolder":
        """Return the folder `attempts/<index>/<attempt>/` of a job's store."""
        return cls(store, f"attempts/{index}/{attempt}")

    def claim_key(self, epoch: int) -> str:
        """Return the key of the epoch's claim."""
        return f"{self._path}/epoch-{epoch}.json"

    def start_key(self, epoch: int) -> str:
        """Return the key of the epoch's start, which names the records that it continues."""
        return f"{self._path}/epoch-{epoch}.start.json"

    def segment_key(self, epoch: int, number: int) -> str:
        """Return the key of a segment of the epoch; they count from 0."""
        return f"{self._path}/{epoch}-{number}.jsonl.zst"

    def object_key(self, epoch: int, name: str) -> str:
        """Return the key of another object of the epoch, such as its trajectory; docs/recording.md has the names."""
        return f"{self._path}/{epoch}-{name}"

    async def latest_claim(self, known: int = 0) -> Claim | None:
        """Return the claim with the highest epoch, without a listing: one read for each epoch after `known`."""
        latest, epoch = None, max(known, 1)
        while (data := await self.store.get(self.claim_key(epoch))) is not None:
            try:
                latest = Claim(**json.loads(data))
            except (ValueError, TypeError) as error:
                raise RecordCorrupt(self.claim_key(epoch), f"it is not a claim ({error})") from error
            epoch += 1
        return latest

    async def latest_epoch(self) -> int:
        """Return the highest claimed epoch; 0 if no epoch was claimed."""
        names = [meta.key.rsplit("/", 1)[-1] for meta in await self.store.list(self._path)]
        return max((int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))), default=0)

    async def read(self) -> dict[int, EpochSegments]:
        """Return the segments of each epoch so far. Raises RecordCorrupt for a damaged or missing segment."""
        numbers: dict[int, list[int]] = {}
        for meta in await self.store.list(self._path):
            if match := _SEGMENT.fullmatch(meta.key.rsplit("/", 1)[-1]):
                numbers.setdefault(int(match[1]), []).append(int(match[2]))
        epochs: dict[int, EpochSegments] = {}
        for epoch, found in sorted(numbers.items()):
            keys = [self.segment_key(epoch, number) for number in range(max(found) + 1)]
            epochs[epoch] = EpochSegments()
            for key, data in zip(keys, await self.store.get_all(keys), strict=True):
                if data is None:
                    raise RecordCorrupt(key, "it is missing, but later segments of its epoch exist")
                epochs[epoch].add(key, data)
        return epochs

    async def records(self) -> list[Record]:
        """Return the current records of all epochs in order. Raises RecordCorrupt."""
        return restored(self._path, [record for epoch in (await self.read()).values() for record in epoch.records])


def digest_of(key: str, data: bytes) -> ObjectDigest:
    """Return the digest of an object for a seal."""
    return ObjectDigest(key=key, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


async def checked_object(store: Store, item: ObjectDigest) -> bytes:
    """Return the content of an object that a seal or a record names. Raises RecordCorrupt if it is missing or differs."""
    data = await store.get(item.key)
    if data is None:
        raise RecordCorrupt(item.key, "it is missing, but a seal lists it")
    if digest_of(item.key, data) != item:
        raise RecordCorrupt(item.key, f"its SHA-256 or size differs from the seal ({item.sha256[:12]}…)")
    return data
