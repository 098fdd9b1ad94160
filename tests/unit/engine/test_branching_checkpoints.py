"""Checkpoints: each path begins in the same state, what is left goes, and nothing else does."""

from pathlib import Path

import pytest
from obstore.store import MemoryStore

from agent_runtime.engine.attempt.snapshots import Checkpoints, NoSuchCheckpoint, SnapshotStore
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, WorkspaceSpec
from tests.support.dummy_sandboxes import DummyProvider, DummyWorkspace


async def begun(world: Path) -> tuple[DummyProvider, DummyWorkspace, Checkpoints]:
    provider = DummyProvider(str(world))
    workspace = await provider.acquire(WorkspaceSpec("g0", "/w"), attempt="0-0", fence=Fence(1, "a"), name="agent")
    store = Store("memory:", MemoryStore())
    return provider, workspace, Checkpoints(SnapshotStore(Layers(store, store.below("run")), 10**6))


async def test_each_path_begins_as_the_checkpoint_was_and_only_what_is_kept_stays(tmp_path: Path) -> None:
    provider, workspace, checkpoints = await begun(tmp_path)
    await workspace.write("f", b"start", key="1:a")
    here, record = await checkpoints.keep(workspace, 0)
    await checkpoints.left(workspace, here)
    for _ in range(3):
        assert await here.read("f") == b"start"
        await here.write("f", b"changed", key="2:a")
        back = await checkpoints.go_back(here, record.name)
        await checkpoints.left(here, back)
        here = back
    assert sorted(provider.world.workspaces) == ["0-0.agent", "0-0.agent.4"]
    await here.release()
    assert not provider.world.workspaces


async def test_after_a_crash_the_same_calls_give_the_same_workspaces(tmp_path: Path) -> None:
    provider, workspace, checkpoints = await begun(tmp_path)
    await workspace.write("f", b"start", key="1:a")
    here, record = await checkpoints.keep(workspace, 0)
    # Not recorded: the next runner does it again, from the workspace that it knows.
    again = Checkpoints(checkpoints._store)
    same, twice = await again.keep(workspace, 0)
    assert (same.handle, twice.name) == (here.handle, record.name)
    # Recorded: it is replayed, and the next call makes what it would have made.
    replayed = Checkpoints(checkpoints._store)
    replayed.replayed(record)
    back = await replayed.go_back(here, record.name)
    assert back.handle["workspace"] == "0-0.agent.2"
    await back.release()
    assert not provider.world.workspaces


async def test_a_checkpoint_that_was_never_kept_is_refused_by_its_name(tmp_path: Path) -> None:
    _, workspace, checkpoints = await begun(tmp_path)
    await checkpoints.keep(workspace, 0)
    with pytest.raises(NoSuchCheckpoint, match="no checkpoint 'other' in this rollout: checkpoint-0"):
        await checkpoints.go_back(workspace, "other")
