import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hack.cluster.harness.processes import Process, current, load, parse_stat, save, stop

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


@given(st.text(st.characters(exclude_characters="\n"), max_size=15), st.integers(0, 2**63))
def test_start_of_a_process_is_parsed_with_any_name(name: str, started: int) -> None:
    fields = ["S", *["0"] * 18, str(started), "0", "0"]
    assert parse_stat(f"42 ({name}) {' '.join(fields)}\n") == ("S", started)


def test_process_with_a_reused_id_is_not_stopped() -> None:
    ours = current(os.getpid())
    recycled = Process(ours.pid, ours.started - 1)
    assert ours.alive
    assert not recycled.alive
    stop(recycled, signal.SIGKILL, grace_seconds=1)  # if it waited, this would not return


def test_a_program_that_ignores_the_request_to_stop_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"deaf\n"
        process = current(program.pid)
        stop(process, signal.SIGTERM, grace_seconds=0.2)
        assert not process.alive
    assert program.returncode == -signal.SIGKILL


def test_stored_process_is_loaded_and_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "processes" / "x.json"
    assert load(file) is None
    save(current(os.getpid()), file)
    assert load(file) == current(os.getpid())
    file.write_text('{"pid": 1')
    assert load(file) is None
