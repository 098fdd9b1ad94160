"""Layers of workspaces in object storage: `layers/<digest>.tar.zst`, next to the runs. Runs share equal layers.

A run names the layers that it needs by empty objects in its own folder, `<run>/layers/<digest>`, written before the
layer itself. So a listing shows which layers are needed, without reading any journal.
"""

import asyncio
import contextlib
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from agent_runtime.recording.artifacts import ArtifactsTooLarge, Packer, unpacked
from agent_runtime.recording.downloads import Downloads
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store, write_spool
from rollout_api.records import Layer

FOLDER: Final = "layers"
SUFFIX: Final = ".tar.zst"

SPARED_SECONDS: Final = 24 * 3600.0
"""A layer that was written within a day is not deleted, because its writer may not have named it yet."""

_RENEWED_SECONDS: Final = SPARED_SECONDS / 2
"""A stored layer that is older than this is written again when it is needed, so that `gc` does not delete it meanwhile.
"""

DELETION_SECONDS: Final = 600.0
"""A deletion that has not finished this long after it wrote its markers stops."""

_PAUSE_SECONDS: Final = 0.5

_SPOOL_BYTES: Final = 8 << 20
"""Compressed layers up to this size stay in memory until their digest is known, larger ones on disk."""


class LayerTooLarge(Exception):
    """A layer exceeds its size limit."""


@dataclass(frozen=True)
class ReadLayer:
    """A layer that was read, with its compressed tar."""

    layer: Layer
    spool: tempfile.SpooledTemporaryFile[bytes] = field(repr=False)


class Layers:
    """The layers of one output, and those that one run names."""

    def __init__(self, output: Store, run: Store) -> None:
        self._output, self._run = output, run
        self._downloads = Downloads(output)

    async def keep(self, chunks: AsyncIterator[bytes], limit: int) -> Layer:
        """Store a tar. Raises as `read`, and StorageError."""
        async with self.read(chunks, limit) as read:
            return await self.store(read)

    @contextlib.asynccontextmanager
    async def read(self, chunks: AsyncIterator[bytes], limit: int) -> AsyncIterator[ReadLayer]:
        """Give a tar that was read to its end, for `store` while the context is open. Raises LayerTooLarge over `limit`
        bytes, SpoolFull, and errors of `chunks`.
        """
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
            yield ReadLayer(Layer(digest=digest.hexdigest(), bytes=packer.size), spool)

    async def store(self, read: ReadLayer) -> Layer:
        """Store a layer and have the run name it. Raises StorageError."""
        layer = read.layer
        await self.name(layer)
        modified = await self._output.modified(key_of(layer.digest))
        if modified is None or time.time() - modified > _RENEWED_SECONDS:
            await self._output.put_file(key_of(layer.digest), read.spool)
        return layer

    async def name(self, layer: Layer) -> None:
        """Have the run name a layer, so that it is kept as long as the run. Waits until no deletion of it is in
        progress.

        A deletion writes a marker first and then looks for names (gc.py). So either the deletion finds this name, or
        this call finds the marker, and the layer no longer exists when the marker is removed.
        """
        await self._run.put(f"{FOLDER}/{layer.digest}", b"")
        while (since := await self._output.modified(marker_of(layer.digest))) is not None:
            if time.time() - since > DELETION_SECONDS:
                break  # the process that created the marker was killed
            await asyncio.sleep(_PAUSE_SECONDS)

    async def has(self, layer: Layer) -> bool:
        """Whether the layer is stored. If the run named it before this call, it is kept as long as the run."""
        return await self._output.modified(key_of(layer.digest)) is not None

    async def load(self, layer: Layer) -> AsyncIterator[bytes]:
        """Yield the tar in pieces. Raises RecordCorrupt if it is damaged or missing, StorageError."""
        if not await self.has(layer):
            raise RecordCorrupt(key_of(layer.digest), "it is missing, but a snapshot needs it")
        async for piece in self._read(layer.digest, layer.bytes):
            yield piece

    async def stored(self) -> list[str]:
        """Return the digests of all layers of the output."""
        keys = [meta.key for meta in await self._output.list(FOLDER)]
        return [key.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX) for key in keys if key.endswith(SUFFIX)]

    async def check(self, digest: str) -> None:
        """Read a stored layer. Raises RecordCorrupt if it is damaged, StorageError."""
        async for _ in self._read(digest, None):
            pass

    async def _read(self, name: str, size: int | None) -> AsyncIterator[bytes]:
        key, digest = key_of(name), hashlib.sha256()
        try:
            async for piece in unpacked(key, self._downloads.stream(key), size):
                digest.update(piece)
                yield piece
            if digest.hexdigest() != name:
                raise RecordCorrupt(key, "its content does not match its name")
        except RecordCorrupt:
            self._downloads.forget(key)
            raise


def marker_of(digest: str) -> str:
    """Return the key of the layer's deletion marker, relative to the output."""
    return f"{FOLDER}/{digest}.deleting"


def key_of(digest: str) -> str:
    """Return the key of a layer, relative to the output."""
    return f"{FOLDER}/{digest}{SUFFIX}"
