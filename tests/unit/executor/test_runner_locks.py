"""An executor on a machine of its runner ends some time after it."""

from __future__ import annotations

import fcntl
from pathlib import Path

from agent_runtime.executor.runner_locks import ABANDONED_SECONDS, RunnerLocks


def test_executor_is_abandoned_only_after_no_process_held_a_lock_for_a_minute(tmp_path: Path) -> None:
    locks = RunnerLocks(str(tmp_path))
    assert not locks.is_abandoned(0)
    dead = tmp_path / "shard-0.lock"
    dead.touch()
    assert not locks.is_abandoned(100)
    assert not locks.is_abandoned(100 + ABANDONED_SECONDS - 1)
    with (tmp_path / "shard-1.lock").open("w") as resumed:
        fcntl.flock(resumed, fcntl.LOCK_EX)
        assert not locks.is_abandoned(100 + ABANDONED_SECONDS)
    assert not locks.is_abandoned(200), "it was in use since"
    assert locks.is_abandoned(200 + ABANDONED_SECONDS)
    for file in tmp_path.iterdir():
        file.unlink()
    assert not locks.is_abandoned(300 + ABANDONED_SECONDS), "its last process ended regularly"
    assert not RunnerLocks(str(tmp_path / "missing")).is_abandoned(0)
