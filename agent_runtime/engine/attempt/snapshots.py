"""Saved states of a workspace: snapshots for other rollouts, checkpoints for the agent itself (docs/branching.md).

A snapshot is the chain of layers above the image. In `Overlay`, a checkpoint is the frozen workspace, and returning to
it forks it. In `Plain`, a checkpoint is a snapshot in object storage, which is restored in place.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.recording.layers import Layers, LayerTooLarge
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import SpoolFull
from agent_runtime.sandboxes.base import FileError, SandboxFailure, Workspace
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN
from agent_runtime.wall_clock import unix_time
from rollout_api.records import AttemptRecord, CheckpointRecord, Layer, Record, ReturnRecord, SnapshotRecord


class SnapshotStore:
    """Store for the snapshots of one run."""

    def __init__(self, layers: Layers, limit: int) -> None:
        self.layers, self._limit = layers, limit
        self._frozen: dict[tuple[str, str], asyncio.Task[Layer]] = {}

    async def chain(self, workspace: Workspace) -> list[Layer]:
        """Store the workspace's state; return its layers, lowest first. Raises FileError, LayerTooLarge, SpoolFull,
        SandboxFailure, StorageError.
        """
        return [*await self._below(workspace), await self.layers.keep(workspace.snapshot(), self._limit)]

    async def chains(self, workspace: Workspace) -> tuple[list[Layer], dict[str, list[Layer]]]:
        """Store the state of the workspace and its services at one moment; return its layers and those of each service.
        Raises as `chain`.
        """
        services = workspace.services
        every = [workspace, *services.values()]
        below = [await self._below(member) for member in every]
        async with contextlib.AsyncExitStack() as spools:
            # A database writes all the time. What was read of one moment is like the files after a power cut.
            async with workspace.paused():
                own = [
                    await spools.enter_async_context(self.layers.read(member.snapshot(), self._limit))
                    for member in every
                ]
            chains = [[*lower, await self.layers.store(read)] for lower, read in zip(below, own, strict=True)]
        return chains[0], dict(zip(services, chains[1:], strict=True))

    async def _below(self, workspace: Workspace) -> list[Layer]:
        return [await self._frozen_layer(workspace, name) for name in reversed(await workspace.layers())]

    async def _frozen_layer(self, workspace: Workspace, name: str) -> Layer:
        key = str(workspace.handle.get("bootId")), name
        standing = self._frozen.get(key)
        if standing is None or (standing.done() and (standing.cancelled() or standing.exception() is not None)):
            standing = asyncio.create_task(self.layers.keep(workspace.snapshot(name), self._limit))
            self._frozen[key] = standing
        # A cancelled rollout must not end the work that other rollouts wait for.
        return await asyncio.shield(standing)


class Snapshots:
    """Takes a rollout's snapshots when they are due.

    `every_turns` is None if only the agent requests them; `recorded` has those already taken.
    """

    def __init__(self, store: SnapshotStore, every_turns: int | None, recorded: Sequence[Record]) -> None:
        self._store, self._every = store, every_turns
        self._taken = {record.turn for record in recorded if isinstance(record, SnapshotRecord)}

    def due(self, turn: int) -> bool:
        """Whether the state after that turn must be saved."""
        return self._every is not None and (turn + 1) % self._every == 0 and self.lacks(turn)

    def lacks(self, turn: int) -> bool:
        """Whether there is a state after that turn that was not saved yet."""
        return turn >= 0 and turn not in self._taken

    async def take(self, workspace: Workspace, turn: int) -> SnapshotRecord:
        """Save the state after that turn. Failures that the policy can cause only skip the snapshot.

        Raises SandboxFailure if the workspace is lost, WorkspaceLimit, StorageError.
        """
        self._taken.add(turn)
        started = time.perf_counter()
        layers: list[Layer] = []
        services: dict[str, list[Layer]] = {}
        message = ""
        try:
            layers, services = await self._store.chains(workspace)
        except (FileError, LayerTooLarge, SpoolFull) as error:
            message = str(error)
        except SandboxFailure as failure:
            await workspace.layers()  # raises if the sandbox is lost, which an incomplete tar does not prove
            message = failure.message
        return SnapshotRecord(
            turn=turn,
            time=unix_time(),
            layers=layers,
            services=services,
            mode=str(workspace.description.get("mode", "")),
            seconds=round(time.perf_counter() - started, 6),
            message=message,
        )


async def restore_layers(workspace: Workspace, chain: Sequence[Layer], layers: Layers, what: str) -> None:
    """Restore a snapshot's layers into a workspace, the lowest first. Raises SandboxFailure and the errors of
    `Workspace.restore`.
    """
    for number, layer in enumerate(chain):
        try:
            await workspace.restore(layers.load(layer), key=f"{LIFECYCLE_TURN}:{what}-{number}")
        except RecordCorrupt as error:
            raise SandboxFailure("SnapshotLost", str(error)) from error


MOST_NESTED = 256
"""Most checkpoints of which each is based on the one before. Linux stacks 500 layers, and an image may have 128 of them."""


class NoSuchCheckpoint(Exception):
    """The agent requested a checkpoint that it never saved."""


class Checkpoints:
    """Checkpoints of one attempt. Calls have the same effect after a crash if the agent repeats them."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._kept: dict[str, CheckpointRecord] = {}
        self._moves = 0
        """Number of calls so far, including replayed ones. It is part of workspace names and keys."""
        self._nested = 0
        """Number of checkpoints on which the current workspace is based."""
        self._nested_at: dict[str, int] = {}
        """The same number when a checkpoint was saved, by name."""

    def replayed(self, record: CheckpointRecord | ReturnRecord) -> None:
        """Record that a call was answered from the journal."""
        self._moves += 1
        if not record.error:
            self._done(record)

    def require(self, name: str) -> CheckpointRecord:
        """Return the checkpoint with that name. Raises NoSuchCheckpoint."""
        if (record := self._kept.get(name)) is None:
            known = ", ".join(self._kept) or "none was kept"
            raise NoSuchCheckpoint(f"there is no checkpoint {name!r} in this rollout: {known}")
        return record

    def _done(self, record: CheckpointRecord | ReturnRecord) -> None:
        if isinstance(record, CheckpointRecord):
            self._kept[record.name] = record
            self._nested_at[record.name] = self._nested
            self._nested += 1
        else:
            self._nested = self._nested_at[record.checkpoint] + 1

    async def keep(self, workspace: Workspace, turn: int) -> tuple[Workspace, CheckpointRecord]:
        """Save the workspace's state; return the workspace to continue in, and the record. Processes in it are ended.

        Raises SandboxFailure, WorkspaceLimit, FileError; in `Plain` also LayerTooLarge.
        """
        self._moves += 1
        layers: list[Layer] = []
        going_on = workspace
        if _is_plain(workspace):
            await workspace.kill_all(key=f"{LIFECYCLE_TURN}:checkpoint-{self._moves}")
            layers = await self._store.chain(workspace)
        else:
            if self._nested >= MOST_NESTED:
                raise FileError(
                    workspace.working_dir,
                    f"the workspace is based on {MOST_NESTED} checkpoints, which is the maximum; go back to an earlier one",
                )
            await workspace.freeze()
            going_on = await self._forked(workspace, None)
        record = CheckpointRecord(
            name=f"checkpoint-{len(self._kept)}",
            turn=turn,
            time=unix_time(),
            workspace=str(workspace.handle["workspace"]),
            layers=layers,
        )
        self._done(record)
        return going_on, record

    async def go_back(self, workspace: Workspace, returning: ReturnRecord) -> Workspace:
        """Return a workspace in the state of that checkpoint, and end the current one. Raises NoSuchCheckpoint and the
        errors of `keep`.
        """
        record = self.require(returning.checkpoint)
        self._moves += 1
        following = workspace
        if _is_plain(workspace):
            await workspace.kill_all(key=f"{LIFECYCLE_TURN}:end-{self._moves}")
            await restore_layers(workspace, record.layers, self._store.layers, f"go-back-{self._moves}")
        else:
            # Freezing releases the workspace's place, which its successor needs.
            await workspace.freeze()
            following = await self._forked(workspace, record.workspace)
        self._done(returning)
        return following

    async def left(self, workspace: Workspace, following: Workspace) -> None:
        """Release the previous workspace unless it is saved. Called after the change of workspace is recorded."""
        kept = {record.workspace for record in self._kept.values()}
        if workspace is not following and workspace.handle["workspace"] not in kept:
            await following.discard(str(workspace.handle["workspace"]))

    async def _forked(self, workspace: Workspace, of: str | None) -> Workspace:
        fork = await workspace.fork(f"agent.{self._moves}", of=of)
        await fork.enter("agent", key="0:enter-agent")
        return fork


def _is_plain(workspace: Workspace) -> bool:
    return workspace.description.get("mode") == "Plain"


@dataclass(frozen=True)
class Keeping:
    """How an attempt's states are saved."""

    snapshots: Snapshots
    checkpoints: Checkpoints
    moved: Callable[[Workspace], AttemptRecord]
    """Called with the workspace in which the agent continues; returns the record of it."""


class WorkspaceStates:
    """The states of an agent's workspace. `keeping` is None in a rerun, which takes no snapshots."""

    def __init__(self, workspace: Workspace, log: AttemptLog, clock: AgentClock, keeping: Keeping | None) -> None:
        self.workspace = workspace
        """The agent's current workspace. Returning to a checkpoint changes it."""
        self.keeping = keeping
        self._log, self._clock = log, clock

    async def checkpoint(self, turn: int) -> str:
        """Save the state as a checkpoint; return its name. Raises the errors of `Checkpoints.keep`, FileError instead of
        LayerTooLarge.
        """
        checkpoints = self._given.checkpoints
        record = self._log.next(CheckpointRecord, turn)
        if record is not None:
            checkpoints.replayed(record)
        else:
            try:
                following, record = await checkpoints.keep(self.workspace, turn)
            except (FileError, LayerTooLarge) as error:
                record = CheckpointRecord(name="", turn=turn, time=unix_time(), workspace="", error=str(error))
                await self._clock.untimed(self._log.write(record))
            else:
                await self._move(following, record)
        self._raise_if_failed(record)
        return record.name

    async def go_back(self, name: str, turn: int) -> None:
        """Return to a checkpoint. Raises the errors of `Checkpoints.go_back`."""
        checkpoints = self._given.checkpoints
        checkpoints.require(name)  # a call that fails here is not recorded, and fails in a replay too
        record = self._log.next(ReturnRecord, turn)
        if record is not None:
            checkpoints.replayed(record)
        else:
            record = ReturnRecord(checkpoint=name, turn=turn, time=unix_time())
            try:
                following = await checkpoints.go_back(self.workspace, record)
            except FileError as error:
                record = record.model_copy(update={"error": str(error)})
                await self._clock.untimed(self._log.write(record))
            else:
                await self._move(following, record)
        self._raise_if_failed(record)

    def _raise_if_failed(self, record: CheckpointRecord | ReturnRecord) -> None:
        """Raise the recorded error, in a replay the same as before."""
        if record.error:
            raise FileError(self.workspace.working_dir, record.error)

    async def snapshot(self, turn: int) -> None:
        """Save the state after that turn, unless an earlier call has."""
        if self.keeping is not None and not self._log.replaying and self.keeping.snapshots.lacks(turn):
            self._log.add(await self._clock.untimed(self.keeping.snapshots.take(self.workspace, turn)))

    async def snapshot_if_due(self, turn: int) -> None:
        """Save the state after that turn if the manifest requires it."""
        if self.keeping is not None and self.keeping.snapshots.due(turn):
            await self.snapshot(turn)

    @property
    def _given(self) -> Keeping:
        assert self.keeping is not None, "an agent that cannot keep states is refused earlier"
        return self.keeping

    async def _move(self, following: Workspace, why: CheckpointRecord | ReturnRecord) -> None:
        """Continue in another workspace after that is recorded, so that the next runner finds it."""
        before, self.workspace = self.workspace, following
        await self._clock.untimed(self._log.write(why, self._given.moved(following)))
        await self._given.checkpoints.left(before, following)
