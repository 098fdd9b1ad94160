"""The workspace an agent is in, and the states of it that are kept: checkpoints for itself, snapshots for other jobs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.branching.snapshots import Checkpoints, Snapshots
from agent_runtime.sandboxes.base import Workspace
from rollout_api.records import AttemptRecord, CheckpointRecord, ReturnRecord


@dataclass(frozen=True)
class Keeping:
    """By what an attempt's states are kept."""

    snapshots: Snapshots
    checkpoints: Checkpoints
    moved: Callable[[Workspace], AttemptRecord]
    """Told of the workspace in which the agent goes on; gives the record that says so."""


class WorkspaceStates:
    """`keeping` is None where an agent's calls are only run again: no snapshot is taken then."""

    def __init__(self, workspace: Workspace, log: AttemptLog, clock: AgentClock, keeping: Keeping | None) -> None:
        self.workspace = workspace
        """Where the agent works now; going to a checkpoint changes it."""
        self._log, self._clock, self._keeping = log, clock, keeping

    @property
    def can_checkpoint(self) -> bool:
        """Whether checkpoints can be kept at all."""
        return self._keeping is not None

    async def checkpoint(self, turn: int) -> str:
        """Keep the state as a checkpoint; its name. Raises what `Checkpoints.keep` does."""
        checkpoints = self._given.checkpoints
        record = self._log.next(CheckpointRecord, turn)
        if record is None:
            following, record = await checkpoints.keep(self.workspace, turn)
            await self._move(following, record)
        else:
            checkpoints.replayed(record)
        return record.name

    async def go_back(self, name: str, turn: int) -> None:
        """Go on in the state of a checkpoint. Raises what `Checkpoints.go_back` does."""
        checkpoints = self._given.checkpoints
        if self._log.next(ReturnRecord, turn) is None:
            following = await checkpoints.go_back(self.workspace, name)
            await self._move(following, ReturnRecord(checkpoint=name, turn=turn, time=time.time()))
        else:
            checkpoints.replayed(None)

    async def snapshot(self, turn: int) -> None:
        """Keep the state after that turn, unless an earlier call has."""
        if self._keeping is not None and not self._log.replaying and self._keeping.snapshots.lacks(turn):
            await self._clock.untimed(self._take_snapshot(self._keeping.snapshots, turn))

    async def snapshot_if_due(self, turn: int) -> None:
        """Keep the state after that turn where the manifest says so."""
        if self._keeping is not None and self._keeping.snapshots.due(turn):
            await self.snapshot(turn)

    @property
    def _given(self) -> Keeping:
        assert self._keeping is not None, "see can_checkpoint"
        return self._keeping

    async def _take_snapshot(self, snapshots: Snapshots, turn: int) -> None:
        self._log.add(await snapshots.take(self.workspace, turn))

    async def _move(self, following: Workspace, why: CheckpointRecord | ReturnRecord) -> None:
        """Go on in another workspace once it is recorded: whoever takes over must know where."""
        before, self.workspace = self.workspace, following
        await self._clock.untimed(self._log.write(why, self._given.moved(following)))
        await self._given.checkpoints.left(before, following)
