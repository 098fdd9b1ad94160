"""Layers of workspaces in object storage: `layers/<digest>.tar.zst` beside the runs, each content once.

A run names the layers that it needs by empty objects in its own folder, `<run>/layers/<digest>`, written before the layer
itself: what a listing shows is what must be kept, without reading any journal.
"""

import asyncio
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Final

from agent_runtime.recording.artifacts import ArtifactsTooLarge, Packer, unpacked
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store, write_spool
from rollout_api.records import Layer

FOLDER: Final = "layers"
SUFFIX: Final = ".tar.zst"

SPARED_SECONDS: Final = 24 * 3600.0
"""A layer that was written within a day is not deleted: whoever wrote it may not have named it yet, or is about to."""

_RENEWED_SECONDS: Final = SPARED_SECONDS / 2
"""An equal layer that is older is written again, so that no cleanup deletes it meanwhile."""

DELETION_SECONDS: Final = 600.0
"""A deletion takes less from its markers on, or deletes nothing."""

_PAUSE_SECONDS: Final = 0.5

_SPOOL_BYTES: Final = 8 << 20
"""Compressed layers up to here stay in memory until their digest is known, larger ones lie on the disk."""


class LayerTooLarge(Exception):
    """A layer has more bytes than it may."""


class Layers:
    """The layers of one output, and those of them that one run names."""

    def __init__(self, output: Store, run: Store) -> None:
        self._output, self._run = output, run

    async def keep(self, chunks: AsyncIterator[bytes], limit: int) -> Layer:
        """Store a tar. Raises LayerTooLarge over `limit` bytes, SpoolFull, StorageError, and what `chunks` raises."""
        digest = hashlib.sha256()

        async def hashed() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                digest.update(chunk)
                yield chunk

        packer = Packer(hashed(), limit)
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
            try:
                async for piece in packer.packed():
                    write_spool(spool, piece)
            except ArtifactsTooLarge:
                raise LayerTooLarge(f"a layer takes more than sandbox.snapshotLimit, {limit} bytes") from None
            layer = Layer(digest=digest.hexdigest(), bytes=packer.size)
            await self.name(layer)
            modified = await self._output.modified(key_of(layer.digest))
            if modified is None or time.time() - modified > _RENEWED_SECONDS:
                await self._output.put_file(key_of(layer.digest), spool)
        return layer

    async def name(self, layer: Layer) -> None:
        """Have the run name a layer, so that it is kept as long as the run is. Waits until no deletion of it is under way.

        Whoever deletes writes a marker first and looks for names then (gc.py). So either it finds this name, or this finds
        the marker, and the layer is known to be gone when the marker is.
        """
        await self._run.put(f"{FOLDER}/{layer.digest}", b"")
        while (since := await self._output.modified(marker_of(layer.digest))) is not None:
            if time.time() - since > DELETION_SECONDS:
                break  # whoever deleted was killed
            await asyncio.sleep(_PAUSE_SECONDS)

    async def load(self, layer: Layer) -> AsyncIterator[bytes]:
        """The tar in pieces. Raises RecordCorrupt where it is damaged or gone, StorageError."""
        key, digest = key_of(layer.digest), hashlib.sha256()
        if await self._output.modified(key) is None:
            raise RecordCorrupt(key, "it is missing, and a snapshot needs it")
        async for piece in unpacked(key, self._output.stream(key), layer.bytes):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != layer.digest:
            raise RecordCorrupt(key, "its content is not that of its name")


def marker_of(digest: str) -> str:
    """Key of the marker that the layer is being deleted, relative to the output."""
    return f"{FOLDER}/{digest}.deleting"


def key_of(digest: str) -> str:
    """Key of a layer, relative to the output."""
    return f"{FOLDER}/{digest}{SUFFIX}"
