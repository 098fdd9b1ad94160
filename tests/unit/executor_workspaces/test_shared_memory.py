"""Memory that processes share is measured also where no process has it mapped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime.executor.init.processes import all_processes
from agent_runtime.executor.overlay import usage
from agent_runtime.executor.overlay.usage import KernelKills, OwnGroup, shared_mappings

MB = 1 << 20
HOLDS = """
import ctypes, mmap, os, sys
library = ctypes.CDLL(None, use_errno=True)
size = 8 << 20
if sys.argv[1] == "sysv":
    library.shmat.restype = ctypes.c_void_p
    segment = library.shmget(0, size, 0o1600)
    start = library.shmat(segment, None, 0)
    library.shmctl(segment, 0, None)
else:
    memfd = os.memfd_create("x") if sys.argv[1] == "memfd" else -1
    if memfd >= 0:
        os.ftruncate(memfd, size)
    shared = mmap.mmap(memfd, size, mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if memfd < 0 else 0))
    if memfd >= 0:
        os.close(memfd)
    start = ctypes.addressof(ctypes.c_char.from_buffer(shared))
ctypes.memset(start, 1, size)
if library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 4):
    sys.exit("madvise")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def proc() -> Iterator[int]:
    folder = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    yield folder
    os.close(folder)


def device() -> int:
    with open(os.memfd_create("device"), "rb") as probe:
        return os.fstat(probe.fileno()).st_dev


@pytest.mark.parametrize("kind", ["anonymous", "memfd", "sysv"])
def test_pages_that_a_program_has_removed_from_its_page_table_count(kind: str, proc: int) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, kind], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        own = [process for process in all_processes(proc) if process.pid == holder.pid]
        found = shared_mappings(proc, own, device(), {})
        if os.geteuid() == 0:
            assert found is not None
            assert sum(found.values()) == 8 * MB
        else:
            assert found is None
        holder.stdin.close()


def test_mapping_that_moves_keeps_its_bytes(proc: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"7f00-8f00 rw-s 00000000 {os.major(device()):02x}:{os.minor(device()):02x} 77    /dev/zero (deleted)"
    monkeypatch.setattr(usage, "read_entry", lambda proc, path: line.encode())
    own = [process for process in all_processes(proc) if process.pid == os.getpid()]
    assert shared_mappings(proc, own, device(), {77: 5}) == {77: 5}
    assert shared_mappings(proc, own, device(), {}) == {77: 0}


@pytest.mark.parametrize(
    ("files", "used"),
    [
        (
            {
                "memory.max": str(500 * MB),
                "memory.stat": f"anon {300 * MB}\nshmem {100 * MB}\n"
                f"kernel {60 * MB}\nsock {7 * MB}\nslab_reclaimable {50 * MB}\n",
            },
            317,
        ),
        ({"memory.max": str(500 * MB), "memory.stat": f"anon {300 * MB}\nfile {900 * MB}\nshmem {250 * MB}\n"}, 450),
        ({"memory/memory.limit_in_bytes": str(500 * MB), "memory/memory.stat": f"rss {10 * MB}\nshmem {MB}\n"}, 0),
        ({"memory.max": "max", "memory.stat": f"anon {300 * MB}\nshmem 0\n"}, 0),
        ({"memory.max": str(1 << 60), "memory.stat": f"anon {300 * MB}\nshmem 0\n"}, 0),
        ({"memory.max": str(100 * MB), "memory.stat": f"anon {300 * MB}\nshmem 0\n"}, 0),
        ({"memory.max": str(500 * MB), "memory.stat": "nothing"}, 0),
        ({}, 0),
    ],
)
def test_use_of_the_containers_own_control_group(files: dict[str, str], used: int, tmp_path: Path) -> None:
    """Of a sandbox of 400 MB, whose container has 100 MB for the executor."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert OwnGroup(400 * MB, str(tmp_path)).used()[0] == used * MB


CONTAINERS = "4:memory:/kubepods/pod1\n0::/kubepods/pod1\n"


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ("memory.events", "low 0\noom 7\noom_kill {}\n"),
        ("kubepods/pod1/memory.events", "oom_kill {}\n"),
        ("memory/memory.oom_control", "oom_kill_disable 0\noom_kill {}\n"),
        ("memory/kubepods/pod1/memory.oom_control", "oom_kill {}\n"),
    ],
)
def test_processes_that_the_kernel_has_ended(events: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / events
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.format(3))
    kills = KernelKills(str(tmp_path), CONTAINERS)
    assert not kills.look(), "before the executor's start"
    file.write_text(text.format(4))
    assert kills.look()
    assert not kills.look()


@pytest.mark.parametrize("text", ["", "nothing", "oom_kill_disable 0\nunder_oom 0\n"])
def test_without_a_count_of_the_kernel_there_are_no_kills(text: str, tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text(text)
    assert not KernelKills(str(tmp_path), CONTAINERS).look()
