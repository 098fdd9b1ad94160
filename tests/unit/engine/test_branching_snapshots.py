"""Snapshots during a rollout: taken when due, stored once if shared, and never at the expense of the rollout."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from obstore.store import MemoryStore

from agent_runtime.engine.attempt.snapshots import Snapshots, SnapshotStore
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import FileError, SandboxFailure, Workspace
from rollout_api.records import SnapshotRecord


class Place:
    """A workspace over one frozen layer."""

    handle = {"bootId": "b", "workspace": "0-0.agent"}
    description = {"mode": "Overlay"}

    def __init__(self, fails: Exception | None = None, *, lost: bool = False) -> None:
        self.fails, self.lost = fails, lost
        self.read: list[str | None] = []

    async def layers(self) -> Sequence[str]:
        if self.lost:
            raise SandboxFailure("NodeLost", "its node is gone")
        return ["prepared-1"]

    async def snapshot(self, layer: str | None = None) -> AsyncIterator[bytes]:
        self.read.append(layer)
        yield b"shared" if layer else b"own"
        if layer is None and self.fails is not None:
            raise self.fails


def snapshots(limit: int = 100, recorded: Sequence[Any] = (), every: int = 2) -> Snapshots:
    store = Store("memory:", MemoryStore())
    return Snapshots(SnapshotStore(Layers(store, store.below("run")), limit), every, recorded)


def test_a_snapshot_is_due_after_every_so_many_turns_unless_it_is_recorded() -> None:
    taken = SnapshotRecord(turn=3, time=0)
    assert [turn for turn in range(-1, 8) if snapshots(recorded=[taken]).due(turn)] == [1, 5, 7]


async def test_a_frozen_layer_is_stored_once_for_all_workspaces_on_it() -> None:
    kept, one, other = snapshots(), Place(), Place()
    first = await kept.take(cast(Workspace, one), 1)
    second = await kept.take(cast(Workspace, other), 3)
    assert (one.read, other.read) == (["prepared-1", None], [None])
    assert first.layers == second.layers
    assert (first.mode, len(first.layers), first.message) == ("Overlay", 2, "")


@pytest.mark.parametrize(
    ("place", "limit", "message"),
    [
        (Place(FileError("/x", "folders nested too deep")), 100, "folders nested too deep"),
        (Place(SandboxFailure("Unreachable", "the stream broke off")), 100, "the stream broke off"),
        (Place(), 4, "a layer takes more than sandbox.snapshotLimit, 4 bytes"),
    ],
)
async def test_snapshot_that_the_policy_makes_fail_is_only_left_out(place: Place, limit: int, message: str) -> None:
    record = await snapshots(limit).take(cast(Workspace, place), 1)
    assert (record.layers, record.message) == ([], message)


async def test_lost_sandbox_is_not_a_missing_snapshot() -> None:
    with pytest.raises(SandboxFailure, match="NodeLost"):
        await snapshots().take(cast(Workspace, Place(lost=True)), 1)
