"""A second start does not disturb a live run, and a run that ended leaves nothing behind."""

import os
import threading
from pathlib import Path

import pytest

from agent_runtime.engine.run_folder import RunInProgress, process_lock, run_folder, run_lock

UID = "0d5c1c36-87a2-4f0e-9a53-1f3f6f2c7d11"


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_refused_start_leaves_the_folder_of_the_live_run_alone(tmp_path: Path) -> None:
    with run_lock(UID, 0, "fix-0d5c1c36"):
        (run_folder(UID) / "sandboxes").mkdir()
        with (
            pytest.raises(RunInProgress, match=r"fix-0d5c1c36 is already running \(pid"),
            run_lock(UID, 0, "fix-0d5c1c36"),
        ):
            pass
        with run_lock(UID, 1, "fix-0d5c1c36"):
            """Another shard is another runner's."""
        (run_folder(UID) / "sandboxes" / "record").write_text("live")
    assert (run_folder(UID) / "sandboxes" / "record").exists(), "live sandboxes stay for the next process"


def test_start_while_a_loop_of_this_process_holds_the_run_does_not_advise_to_kill_it() -> None:
    with (
        run_lock(UID, 0, "fix"),
        pytest.raises(RunInProgress, match=r"contextlib\.aclosing") as caught,
        run_lock(UID, 0, "fix"),
    ):
        pass
    assert "kill" not in str(caught.value)


def test_lock_has_one_holder_while_others_end_and_start() -> None:
    holders, most = 0, 0
    counting = threading.Lock()

    def start_and_end() -> None:
        nonlocal holders, most
        for _ in range(50):
            try:
                with run_lock(UID, 0, "run"):
                    with counting:
                        holders += 1
                        most = max(most, holders)
                    with counting:
                        holders -= 1
            except RunInProgress:
                continue

    threads = [threading.Thread(target=start_and_end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_lock_is_free_when_its_process_ends_before_a_forked_child(tmp_path: Path) -> None:
    is_forked, tell_forked = os.pipe()
    is_over, tell_over = os.pipe()
    with (tmp_path / "lock").open("w") as file, process_lock(file.fileno()):
        if (child := os.fork()) == 0:
            os.close(tell_over)
            os.write(tell_forked, b"x")
            os.read(is_over, 1)
            os._exit(0)
        os.read(is_forked, 1)
    try:
        with (tmp_path / "lock").open("w") as file, process_lock(file.fileno()):
            pass
    finally:
        os.close(tell_over)
        os.waitpid(child, 0)
        for descriptor in (is_forked, tell_forked, is_over):
            os.close(descriptor)
