"""Checkpoints: each path begins in the same state. Unused states are deleted, and no others."""

from pathlib import Path

import pytest
from obstore.store import MemoryStore

from agent_runtime.engine.attempt import snapshots
from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.attempt.snapshots import (
    Checkpoints,
    Keeping,
    NoSuchCheckpoint,
    Snapshots,
    SnapshotStore,
    WorkspaceStates,
)
from agent_runtime.recording.layers import Layers, LayerTooLarge
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, FileError, Workspace, WorkspaceSpec
from rollout_api.records import AttemptRecord, IntentRecord, Layer, ReturnRecord
from tests.support.dummy_sandboxes import DummyProvider, DummyWorkspace
from tests.unit.engine.test_turns import MemoryJournal


def back_to(name: str) -> ReturnRecord:
    return ReturnRecord(checkpoint=name, turn=0, time=0.0)


async def begun(world: Path) -> tuple[DummyProvider, DummyWorkspace, Checkpoints]:
    provider = DummyProvider(str(world))
    workspace = await provider.acquire(WorkspaceSpec("g0", "/w"), attempt="0-0", fence=Fence(1, "a"), name="agent")
    store = Store("memory:", MemoryStore())
    return provider, workspace, Checkpoints(SnapshotStore(Layers(store, store.below("run")), 10**6))


async def test_each_path_starts_from_its_checkpoint_and_only_kept_changes_remain(tmp_path: Path) -> None:
    provider, workspace, checkpoints = await begun(tmp_path)
    await workspace.write("f", b"start", key="1:a")
    here, record = await checkpoints.keep(workspace, 0)
    await checkpoints.left(workspace, here)
    for _ in range(3):
        assert await here.read("f") == b"start"
        await here.write("f", b"changed", key="2:a")
        back = await checkpoints.go_back(here, back_to(record.name))
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
    back = await replayed.go_back(here, back_to(record.name))
    assert back.handle["workspace"] == "0-0.agent.2"
    await back.release()
    assert not provider.world.workspaces


async def test_a_checkpoint_that_was_never_kept_is_refused_by_its_name(tmp_path: Path) -> None:
    _, workspace, checkpoints = await begun(tmp_path)
    await checkpoints.keep(workspace, 0)
    with pytest.raises(NoSuchCheckpoint, match="no checkpoint 'other' in this rollout: checkpoint-0"):
        await checkpoints.go_back(workspace, back_to("other"))


def states(checkpoints: Checkpoints, workspace: DummyWorkspace, log: AttemptLog) -> WorkspaceStates:
    def moved(following: Workspace) -> AttemptRecord:
        return AttemptRecord(time=0.0, runner="r", workspace=dict(following.handle))

    keeping = Keeping(Snapshots(checkpoints._store, None, ()), checkpoints, moved)
    return WorkspaceStates(workspace, log, AgentClock(60.0), keeping)


async def calls(own: WorkspaceStates) -> list[str]:
    """Makes checkpoints, and handles the errors of calls that fail."""
    found = []
    for number in range(4):
        try:
            if number == 1:
                await own.go_back("other", 0)
            found.append(await own.checkpoint(0))
        except (FileError, NoSuchCheckpoint) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("is_plain", [False, True])
async def test_error_of_a_checkpoint_that_an_agent_handled_is_the_same_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    async def chain(store: SnapshotStore, workspace: Workspace) -> list[Layer]:
        if workspace.handle["workspace"] == "0-0.agent" and kept:
            raise LayerTooLarge("too large")
        kept.append("a")
        return []

    kept = list[str]()
    monkeypatch.setattr(snapshots, "MOST_NESTED", 2)
    monkeypatch.setattr(snapshots, "_is_plain", lambda workspace: is_plain)
    monkeypatch.setattr(SnapshotStore, "chain", chain)
    _, workspace, checkpoints = await begun(tmp_path)
    journal = MemoryJournal()
    log = AttemptLog(journal)
    first = states(checkpoints, workspace, log)
    found = await calls(first)
    unknown = "there is no checkpoint 'other' in this rollout: checkpoint-0"
    nested = "the workspace is based on 2 checkpoints, which is the maximum; go back to an earlier one"
    rest = ["too large", "too large"] if is_plain else ["checkpoint-1", nested]
    assert found == ["checkpoint-0", unknown, *rest]
    await first.workspace.write("f", b"written after the errors", key="2:a")
    await log.write(IntentRecord(turn=1, time=0.0, keep=0, messages=[]))

    again = AttemptLog(journal, journal.records)
    assert await calls(states(Checkpoints(checkpoints._store), workspace, again)) == found
    assert again.next(IntentRecord, 1) is not None, "all calls were answered from the journal"
