"""The supervisor with real child processes: engines that are killed, crash, end, and leave orphans."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_runtime.runner.supervisor import DECISIONS, Exit

REPOSITORY = Path(__file__).parents[4]

# As PID 1 does, it becomes the parent of what its descendants leave behind: PR_SET_CHILD_SUBREAPER is 36.
SUPERVISOR = """
import ctypes, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
from agent_runtime.runner import supervisor
supervisor.FIRST_PAUSE_SECONDS = float(sys.argv[1])
from agent_runtime.runner.supervisor import supervise
sys.exit(supervise(sys.argv[2:]))
"""

# Start of all engines in these tests; the file `lives` counts them.
ENGINE = """
import os, signal, subprocess, sys, time
with open("lives", "a") as lives:
    lives.write(f"{os.getpid()}\\n")
life = len(open("lives").readlines())
def seal():
    os.write(int(os.environ["ROLLOUT_PROGRESS_FD"]), b".")
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Supervised:
    def __init__(self, folder: Path, engine: str, first_pause: float) -> None:
        self.folder = folder
        command = [sys.executable, "-c", SUPERVISOR, str(first_pause), sys.executable, "-c", ENGINE + engine]
        environ = dict(os.environ, PYTHONPATH=str(REPOSITORY))
        self.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)

    @property
    def lives(self) -> int:
        path = self.folder / "lives"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def end(self) -> tuple[int, str]:
        """Return the exit code and the log."""
        log, _ = self.process.communicate(timeout=60)
        return self.process.returncode, log


Supervise = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Supervise:
    def start(engine: str, first_pause: float = 0.0) -> Supervised:
        return Supervised(tmp_path, engine, first_pause)

    return start


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def test_every_engine_gets_the_start_time_of_the_first(supervise: Supervise) -> None:
    """Otherwise an engine after a killed one would wait for a dead predecessor for the whole time again."""
    before = time.monotonic()
    run = supervise("print(os.environ['ROLLOUT_SINCE'], flush=True)\nif life == 1: die()")
    code, log = run.end()
    first, second = (float(line) for line in log.splitlines() if line[0].isdigit())
    assert code == Exit.REPORTED
    assert before < first == second < time.monotonic()


def test_engine_killed_ten_times_completes_its_shard(supervise: Supervise) -> None:
    run = supervise("seal()\nif life <= 10: die()", first_pause=5)
    assert run.end()[0] == Exit.REPORTED
    assert run.lives == 11


def test_engine_that_dies_repeatedly_fails_the_pod_with_a_message(supervise: Supervise) -> None:
    run = supervise("die()")
    code, log = run.end()
    assert (code, run.lives) == (Exit.CRASHED, 10)
    assert "died 10 times in a row without sealing a rollout" in log
    assert "SIGKILL" in log


def test_a_seal_resets_the_count_of_deaths(supervise: Supervise) -> None:
    run = supervise("if life == 9: seal()\ndie()")
    assert run.end()[0] == Exit.CRASHED
    assert run.lives == 9 + 9, (
        "the ninth had sealed: nine more make ten in a row without a seal, its own death included"
    )


@pytest.mark.parametrize("code", sorted(DECISIONS))
def test_pod_ends_with_the_exit_code_of_the_engine(supervise: Supervise, code: Exit) -> None:
    run = supervise(f"os._exit({code:d})")
    assert run.end()[0] == code
    assert run.lives == 1


def test_a_bug_is_tried_again_like_a_kill(supervise: Supervise) -> None:
    run = supervise("if life == 1: raise RuntimeError('bug')\nif life == 2: os._exit(42)")
    assert run.end()[0] == Exit.REPORTED
    assert run.lives == 3


def test_sigterm_reaches_the_engine_and_its_exit_code_is_the_pods(supervise: Supervise) -> None:
    engine = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(10))\nopen('ready', 'w').close()\nwhile True: time.sleep(60)"
    )
    run = supervise(engine)
    wait_for((run.folder / "ready").exists)
    run.process.terminate()
    assert run.end()[0] == Exit.CANCELLED
    assert run.lives == 1


def test_an_engine_that_dies_while_the_pod_is_to_go_is_not_started_again(supervise: Supervise) -> None:
    engine = "signal.signal(signal.SIGTERM, lambda *_: die())\nopen('ready', 'w').close()\nwhile True: time.sleep(60)"
    run = supervise(engine)
    wait_for((run.folder / "ready").exists)
    run.process.terminate()
    assert run.end()[0] == Exit.DRAINED
    assert run.lives == 1


def test_sigterm_ends_the_pause_between_two_starts(supervise: Supervise) -> None:
    run = supervise("die()", first_pause=1000)
    wait_for(lambda: run.lives == 2)
    time.sleep(0.3)
    run.process.terminate()
    assert run.end()[0] == Exit.DRAINED
    assert run.lives == 2


def test_orphans_are_reaped_so_that_no_zombies_fill_the_process_table(supervise: Supervise) -> None:
    engine = """
for _ in range(20):
    subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.1 & exit"])
def children():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getppid() and int(pid) != os.getpid():
            found.append(state)
    return found
reading, writing = os.pipe()
subprocess.run(["sh", "-c", f"cat <&{reading} & exit"], pass_fds=[reading])
seen = bool(children())
os.close(writing)
deadline = time.monotonic() + 20
while children() and time.monotonic() < deadline:
    time.sleep(0.05)
os._exit(0 if seen and not children() else 5)
"""
    assert supervise(engine).end()[0] == 0


def test_leftovers_of_a_dead_engine_are_killed_before_the_next_starts(supervise: Supervise) -> None:
    engine = """
if life == 1:
    left = subprocess.Popen(["sleep", "300"])
    open("left", "w").write(str(left.pid))
    die()
left = open("left").read()
deadline = time.monotonic() + 20
while os.path.exists(f"/proc/{left}") and time.monotonic() < deadline:
    time.sleep(0.05)
os._exit(5 if os.path.exists(f"/proc/{left}") else 0)
"""
    assert supervise(engine).end()[0] == 0


def test_supervisor_imports_nothing_of_the_engine(tmp_path: Path) -> None:
    """The supervisor must stay when the engine is killed for memory, and must not fail with a library of the user's
    image.
    """
    program = (
        "import sys, agent_runtime.runner.supervisor\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('aiohttp', 'pydantic', 'obstore', 'asyncio', 'kubernetes')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_signal_numbers_are_shown_by_name(supervise: Supervise) -> None:
    run = supervise("if life == 1: os.kill(os.getpid(), signal.SIGSEGV)")
    code, log = run.end()
    assert code == 0
    assert signal.SIGSEGV.name in log
