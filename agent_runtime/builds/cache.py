"""The stored steps of one output, as builders of one run use them.

Two builders of one step both succeed, and the layer of either is right, but they differ: at least in times. So a run keeps
which one it uses, in `<run>/builds/KEY.json`: all its rollouts are started, resumed and graded from that one, whatever other
runs store, and whatever is deleted from the output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from agent_runtime.recording.build_steps import RENEWED_SECONDS, BuildEntry, key_of_entry, parse_entry
from agent_runtime.recording.layers import Layers, key_of
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import SandboxFailure, StoredLayer
from rollout_api.records import Layer

LAYER_BYTES = 64 << 30
"""Limit of one layer, which stops a step that fills the disk before it fills the storage."""


class LayerLost(SandboxFailure):
    """A stored layer was damaged or missing. It is forgotten, so that it is made again."""

    def __init__(self, message: str) -> None:
        super().__init__("LayerLost", message)


@dataclass(frozen=True)
class Stored:
    """The results of a step whose layers are stored, over whatever layers they were made."""

    own: BuildEntry | None
    """The one that the run uses."""
    shared: BuildEntry | None
    """The newest one of the output."""


class BuildCache:
    """The steps of one output, used by one run."""

    def __init__(self, output: Store, run: Store, layers: Layers) -> None:
        self._output, self._run, self._layers = output, run, layers
        self.losses = 0
        """Number of layers that turned out to be damaged or missing."""

    async def look_up(self, key: str) -> Stored:
        """Return what is stored of a step. Raises StorageError."""
        name = key_of_entry(key)
        own, shared = await asyncio.gather(self._run.get(name), self._output.get(name))
        return Stored(*await asyncio.gather(self._usable(own), self._usable(shared)))

    async def find(self, key: str, over: str, stored: Stored) -> BuildEntry | None:
        """Return a step's result over those layers, which is kept as long as the run; None if it must be built. Raises
        StorageError.
        """
        if stored.own is not None and stored.own.over == over:
            return stored.own
        entry, name = stored.shared, key_of_entry(key)
        if entry is None or entry.over != over:
            return None
        modified = await self._output.modified(name)
        if modified is not None and time.time() - modified > RENEWED_SECONDS:
            await self._output.put(name, _content(entry))
        return await self._chosen(key, entry)

    async def _usable(self, data: bytes | None) -> BuildEntry | None:
        entry = None if data is None else parse_entry(data)
        if entry is None:
            return None
        await self._layers.name(entry.layer)
        return entry if await self._layers.has(entry.layer) else None

    async def _chosen(self, key: str, entry: BuildEntry) -> BuildEntry:
        """Return the entry that the run uses from now on: this one, unless it has another."""
        name = key_of_entry(key)
        if await self._run.create(name, _content(entry)):
            return entry
        first = await self._usable(await self._run.get(name))
        if first is not None and first.over == entry.over:
            return first
        await self._run.put(name, _content(entry))  # a layer of the earlier one, or below it, was lost
        return entry

    async def _forget(self, key: str, layer: Layer) -> None:
        """Remove a step with its damaged layer, so that both are made again. Raises StorageError."""
        self.losses += 1
        await self._run.delete([key_of_entry(key)])
        await self._output.delete([key_of_entry(key), key_of(layer.digest)])

    async def record(
        self,
        key: str,
        chunks: AsyncIterator[bytes],
        *,
        over: str,
        step: str,
        below: str | None,
        image: str,
        began: float,
    ) -> BuildEntry:
        """Store a step's layer and its entry; return the entry that the run uses. Raises LayerTooLarge, StorageError and
        errors of `chunks`.
        """
        layer = await self._layers.keep(chunks, LAYER_BYTES)
        seconds = round(time.time() - began, 3)
        entry = BuildEntry(
            layer=layer, step=step, below=below, over=over, image=image, seconds=seconds, created=time.time()
        )
        # Not create-only: an entry whose layer was lost, or that was made over another layer, is replaced.
        await self._output.put(key_of_entry(key), _content(entry))
        return await self._chosen(key, entry)

    def stored(self, key: str, entry: BuildEntry) -> StoredLayer:
        """Return a step's layer for the specification of a workspace."""

        async def load() -> AsyncIterator[bytes]:
            try:
                async for piece in self._layers.load(entry.layer):
                    yield piece
            except RecordCorrupt as error:
                await self._forget(key, entry.layer)
                raise LayerLost(f"the layer of {entry.step!r}: {error}") from error

        return StoredLayer(entry.layer.digest, entry.layer.bytes, load)


def _content(entry: BuildEntry) -> bytes:
    return entry.model_dump_json(by_alias=True).encode()
