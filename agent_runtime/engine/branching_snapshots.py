"""Snapshots of a rollout's workspace on its way, for other rollouts to start from.

A snapshot is the chain of layers from the image up: in `Overlay` the prepared state that all members of a group share, and
what the rollout changed over it; in `Plain` whole folders. What is frozen is stored once for all who stand on it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from agent_runtime.recording.layers import Layers, LayerTooLarge
from agent_runtime.recording.store import SpoolFull
from agent_runtime.sandboxes.base import FileError, SandboxFailure, Workspace
from rollout_api.base import quantity_value
from rollout_api.records import Layer, Record, SnapshotRecord
from rollout_api.sandbox import SandboxTemplate


class SnapshotStore:
    """Where the snapshots of one run go."""

    def __init__(self, layers: Layers, limit: int) -> None:
        self._layers, self._limit = layers, limit
        self._frozen: dict[tuple[str, str], asyncio.Task[Layer]] = {}

    async def chain(self, workspace: Workspace) -> list[Layer]:
        """Store the workspace's state; its layers, lowest first. Raises FileError, LayerTooLarge, SandboxFailure."""
        below = [await self._frozen_layer(workspace, name) for name in reversed(await workspace.layers())]
        return [*below, await self._layers.keep(workspace.snapshot(), self._limit)]

    def load(self, layer: Layer) -> AsyncIterator[bytes]:
        """A layer's tar in pieces. Raises RecordCorrupt, StorageError."""
        return self._layers.load(layer)

    async def _frozen_layer(self, workspace: Workspace, name: str) -> Layer:
        key = str(workspace.handle.get("bootId")), name
        standing = self._frozen.get(key)
        if standing is None or (standing.done() and (standing.cancelled() or standing.exception() is not None)):
            standing = asyncio.create_task(self._layers.keep(workspace.snapshot(name), self._limit))
            self._frozen[key] = standing
        # One impatient rollout must not end what others wait for.
        return await asyncio.shield(standing)


class Snapshots:
    """When a rollout's snapshots are due, and taking them.

    `every_turns` is None where only the agent asks for them; `recorded` tells of those that are taken already.
    """

    def __init__(self, store: SnapshotStore, every_turns: int | None, recorded: Sequence[Record]) -> None:
        self._store, self._every = store, every_turns
        self._taken = {record.turn for record in recorded if isinstance(record, SnapshotRecord)}

    def due(self, turn: int) -> bool:
        """Whether the state after that turn is to be kept."""
        return self._every is not None and (turn + 1) % self._every == 0 and self.lacks(turn)

    def lacks(self, turn: int) -> bool:
        """Whether there is a state after that turn, and it was not kept yet."""
        return turn >= 0 and turn not in self._taken

    async def take(self, workspace: Workspace, turn: int) -> SnapshotRecord:
        """Keep the state after that turn. What the policy can cause costs it nothing but the snapshot.

        Raises SandboxFailure when the workspace is lost, WorkspaceLimit, StorageError.
        """
        self._taken.add(turn)
        started = time.perf_counter()
        layers: list[Layer] = []
        message = ""
        try:
            layers = await self._store.chain(workspace)
        except (FileError, LayerTooLarge, SpoolFull) as error:
            message = str(error)
        except SandboxFailure as failure:
            await workspace.layers()  # a tar that breaks off says nothing of the sandbox; this does
            message = failure.message
        return SnapshotRecord(
            turn=turn,
            time=time.time(),
            layers=layers,
            mode=str(workspace.description.get("mode", "")),
            seconds=round(time.perf_counter() - started, 6),
            message=message,
        )


def snapshot_store(layers: Layers, template: SandboxTemplate) -> SnapshotStore:
    """The store of a job's snapshots."""
    return SnapshotStore(layers, int(quantity_value(template.snapshot_limit)))
