"""An agent's own branches: a state of its workspace that it keeps, and goes back to as often as it likes.

In `Overlay` a checkpoint is the frozen workspace, and going on or back is a fork of it: milliseconds, whatever lies in it.
In `Plain` it is a snapshot in object storage, and going back restores it in place.
"""

import time
from collections.abc import Mapping

from agent_runtime.engine.branching_snapshots import SnapshotStore
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.sandboxes.base import SandboxFailure, Workspace
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN
from rollout_api.records import CheckpointRecord, Layer


class NoSuchCheckpoint(Exception):
    """The agent goes back to a checkpoint that it never kept."""


class Checkpoints:
    """Those of one attempt. Every call is the same again after a crash, as long as the agent makes the same calls."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._kept: dict[str, CheckpointRecord] = {}
        self._moves = 0
        """Calls so far, replayed ones included: they name the workspaces and keys that each makes."""

    def replayed(self, record: CheckpointRecord | None) -> None:
        """A call was answered from the journal; `record` where it kept a checkpoint."""
        self._moves += 1
        if record is not None:
            self._kept[record.name] = record

    async def keep(self, workspace: Workspace, turn: int) -> tuple[Workspace, CheckpointRecord]:
        """Keep the workspace's state; the workspace to go on in, and the record. What runs in it ends.

        Raises SandboxFailure, WorkspaceLimit; in `Plain` FileError and LayerTooLarge.
        """
        self._moves += 1
        layers: list[Layer] = []
        going_on = workspace
        if _is_plain(workspace):
            await workspace.kill_all(key=f"{LIFECYCLE_TURN}:checkpoint-{self._moves}")
            layers = await self._store.chain(workspace)
        else:
            await workspace.freeze()
            going_on = await self._forked(workspace, None)
        record = CheckpointRecord(
            name=f"checkpoint-{len(self._kept)}",
            turn=turn,
            time=time.time(),
            workspace=str(workspace.handle["workspace"]),
            layers=layers,
        )
        self._kept[record.name] = record
        return going_on, record

    async def go_back(self, workspace: Workspace, name: str) -> Workspace:
        """A workspace in the state of that checkpoint. The one so far ends. Raises NoSuchCheckpoint and as `keep`."""
        self._moves += 1
        if (record := self._kept.get(name)) is None:
            known = ", ".join(self._kept) or "none was kept"
            raise NoSuchCheckpoint(f"there is no checkpoint {name!r} in this rollout: {known}")
        if _is_plain(workspace):
            await workspace.kill_all(key=f"{LIFECYCLE_TURN}:end-{self._moves}")
            for number, layer in enumerate(record.layers):
                key = f"{LIFECYCLE_TURN}:go-back-{self._moves}-{number}"
                try:
                    await workspace.restore(self._store.load(layer), key=key)
                except RecordCorrupt as error:
                    raise SandboxFailure("SnapshotLost", str(error)) from error
            return workspace
        # Frozen it has no place any more, so that there is one for what takes it.
        await workspace.freeze()
        return await self._forked(workspace, record.workspace)

    async def left(self, workspace: Workspace, following: Workspace) -> None:
        """The attempt goes on in another workspace, and that is recorded: the one before may go unless it is kept."""
        kept = {record.workspace for record in self._kept.values()}
        if workspace is not following and workspace.handle["workspace"] not in kept:
            await following.discard(str(workspace.handle["workspace"]))

    async def end(self, workspace: Workspace) -> None:
        """The attempt ends: what it kept beside `workspace` goes."""
        for name in {record.workspace for record in self._kept.values()} - {str(workspace.handle.get("workspace"))}:
            await workspace.discard(name)
        self._kept.clear()

    async def _forked(self, workspace: Workspace, of: str | None) -> Workspace:
        fork = await workspace.fork(f"agent.{self._moves}", of=of)
        await fork.enter("agent", key="0:enter-agent")
        return fork


def _is_plain(workspace: Workspace) -> bool:
    description: Mapping[str, object] = workspace.description
    return description.get("mode") == "Plain"
