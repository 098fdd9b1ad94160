"""Snapshots during a rollout: taken when due, stored once if shared, and never at the expense of the rollout."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from obstore.store import MemoryStore

from agent_runtime.engine.attempt.snapshots import Snapshots, SnapshotStore
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import FileError, SandboxFailure, Workspace
from rollout_api.records import SnapshotRecord


class Place:
    """A workspace over one frozen layer, and what was done in it in which order."""

    handle = {"bootId": "b", "workspace": "0-0.agent"}
    description = {"mode": "Overlay"}

    def __init__(
        self, fails: Exception | None = None, *, lost: bool = False, services: Mapping[str, "Place"] = {}
    ) -> None:
        self.fails, self.lost, self.services = fails, lost, services
        self.read: list[str | None] = []
        self.is_paused = False

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        every = [self, *self.services.values()]
        for place in every:
            place.is_paused = True
        yield
        for place in every:
            place.is_paused = False

    async def layers(self) -> Sequence[str]:
        if self.lost:
            raise SandboxFailure("NodeLost", "its node is gone")
        return ["prepared-1"]

    async def snapshot(self, layer: str | None = None) -> AsyncIterator[bytes]:
        assert self.is_paused is (layer is None), "frozen layers never change, so nothing waits until they are stored"
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
    kept, other = snapshots(), Place()
    one = Place(services={"db": Place(), "web": Place()})
    first = await kept.take(cast(Workspace, one), 1)
    second = await kept.take(cast(Workspace, other), 3)
    assert (one.read, other.read) == (["prepared-1", None], [None])
    assert [place.read for place in one.services.values()] == [[None], [None]]
    assert first.layers == second.layers
    assert first.services == {"db": first.layers, "web": first.layers}
    assert first.all_layers == first.layers * 3
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


async def test_snapshot_lacks_no_service() -> None:
    place = Place(services={"db": Place(), "web": Place(FileError("/x", "folders nested too deep"))})
    record = await snapshots().take(cast(Workspace, place), 1)
    assert (record.layers, record.services, record.message) == ([], {}, "folders nested too deep")


def test_snapshot_of_an_earlier_version_is_readable() -> None:
    written = {"type": "snapshot", "turn": 1, "time": 0, "layers": [{"digest": "0" * 64, "bytes": 1}]}
    record = SnapshotRecord.model_validate(written)
    assert (record.services, record.all_layers) == ({}, record.layers)


async def test_lost_sandbox_is_not_a_missing_snapshot() -> None:
    with pytest.raises(SandboxFailure, match="NodeLost"):
        await snapshots().take(cast(Workspace, Place(lost=True)), 1)
