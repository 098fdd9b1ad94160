"""A disk to which other programs write too, as in every pod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_runtime.executor.host import Limits, WorkspaceFailure
from agent_runtime.executor.overlay import open_host
from agent_runtime.executor.overlay.config import HostConfig
from tests.integration.executor_workspaces.helpers import Inside, read_all, run, start, write

LIMIT = 20_000_000


async def test_disk_writes_of_others_do_not_count_for_a_workspace(plain: Inside) -> None:
    root = Path(plain.host.config.root)
    (root / "of the image").write_bytes(b"x" * 3 * LIMIT)
    workspace = await plain.make(limits=Limits(disk_bytes=LIMIT))
    with tempfile.TemporaryDirectory() as elsewhere:
        working = asyncio.create_task(run(workspace, "echo some > own; sleep 1; cat own"))
        for number in range(10):
            (Path(elsewhere) / str(number)).write_bytes(b"x" * LIMIT)
            await asyncio.sleep(0.05)
        ended = await working
    assert (ended.exit.cause, ended.output) == (None, "some\n")
    assert workspace.usage()["diskBytes"] < LIMIT


async def test_workspace_ends_when_its_files_exceed_its_disk_limit(plain: Inside) -> None:
    workspace = await plain.make(limits=Limits(disk_bytes=LIMIT))
    fill = "mkdir deep; for i in $(seq 100); do head -c 1000000 /dev/zero > deep/$i; sleep 0.02; done; sleep 100"
    assert (await run(workspace, fill)).exit.cause == "Disk"
    assert workspace.usage()["diskBytes"] > LIMIT


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 MB and 4,000 files."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,nr_inodes=4000", "tmpfs", tmp_path], check=True)
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@contextlib.asynccontextmanager
async def overlay_on(disk: Path) -> AsyncIterator[Inside]:
    (disk / "state").mkdir()
    host, _ = await open_host(HostConfig(state_dir=str(disk / "state"), mode="Overlay", places=2))
    try:
        yield Inside(host)
    finally:
        await host.close()


async def test_command_that_fails_on_a_disk_filled_by_others_is_not_its_own_failure(small_disk: Path) -> None:
    async with overlay_on(small_disk) as overlay:
        workspace = await overlay.make()
        assert (await run(workspace, "echo some > own && cat own")).output == "some\n"
        with contextlib.suppress(OSError), (small_disk / "of others").open("wb", buffering=0) as hog:
            while hog.write(bytes(100_000)):
                pass
        assert (await run(workspace, "seq 100000 > numbers")).exit.cause == "DiskFull", (
            "a test would fail, with reward 0"
        )
        with pytest.raises(WorkspaceFailure) as failure:
            await write(workspace, "/hidden_test.py", bytes(1_000_000))
        assert failure.value.cause == "DiskFull"


async def test_workspace_that_filled_the_disk_has_used_it_up(small_disk: Path) -> None:
    async with overlay_on(small_disk) as overlay:
        workspace = await overlay.make()
        filled = await run(workspace, "cat /dev/zero > hog; echo done")
        assert filled.exit.cause == "Disk", "a policy could have itself masked"
        with pytest.raises(WorkspaceFailure) as failure:
            await write(workspace, "/answer", bytes(1_000_000))
        assert failure.value.cause == "Disk"


async def test_disk_that_a_joined_workspace_filled_is_used_up_by_all_that_share(small_disk: Path) -> None:
    async with overlay_on(small_disk) as overlay:
        leader = await overlay.make(shares=True)
        service = await overlay.make(joins=leader.spec.id)
        filling = asyncio.create_task(run(service, "cat /dev/zero > hog 2>/dev/null; sleep 100"))
        for _ in range(600):
            if overlay.host.is_disk_full:
                break
            await asyncio.sleep(0.05)
        ended = await run(leader, "echo some > own")
        assert ended.exit.cause == "Disk", "a policy could have itself masked through a database"
        assert (await filling).exit.cause == "Disk"


async def test_workspace_whose_files_cannot_be_counted_on_a_full_disk_is_lost(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def uncounted(*_: object, **__: object) -> int:
        raise WorkspaceFailure("CreateFailed", "measure: Too many open files")

    async with overlay_on(small_disk) as overlay:
        workspace = await overlay.make()
        monkeypatch.setattr(overlay.host, "measure_disk", uncounted)
        with contextlib.suppress(OSError), (small_disk / "hog").open("wb", buffering=0) as hog:
            while hog.write(bytes(100_000)):
                pass
        assert (await run(workspace, "true")).exit.cause == "WorkspaceEnded", "a policy could have itself masked"


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o400])
def test_files_in_folders_that_their_owner_may_not_list_are_counted(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "image" / "hidden"
    folder.mkdir(parents=True)
    (folder / "hog").write_bytes(bytes(1 << 20))
    folder.chmod(mode)
    count = "import sys; from agent_runtime.executor.init.trees import disk_use as count; "
    count += "print(count(sys.argv[1], since=0, makes_readable=True).bytes)"
    without_capabilities = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]  # root's, as in a Plain pod
    command = [*without_capabilities, sys.executable, "-c", count, str(folder.parent)]
    counted = subprocess.run(command, check=True, capture_output=True).stdout
    assert int(counted) >= 1 << 20, "a policy could fill the disk, and have itself masked"


# A file that has no name, and no descriptor in any process.
_HIDES_A_FILE = """
import ctypes, mmap, os, socket, sys, time
hog = os.open("hog", os.O_RDWR | os.O_CREAT)
os.unlink("hog")
os.write(hog, bytes(4096))
ours, theirs = socket.socketpair()
if sys.argv[1] == "mapped":  # by the C library: Python's own would keep a descriptor
    ctypes.CDLL(None).mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, hog, ctypes.c_long(0))
else:
    socket.send_fds(ours, [b"."], [hog])
try:
    while True:
        os.write(hog, bytes(1 << 20))
except OSError:
    os.close(hog)
print("full", flush=True)
os.dup2(os.open(os.devnull, os.O_RDWR), 1)
os.dup2(1, 2)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["mapped", "sent"])
async def test_workspace_that_filled_the_disk_with_a_hidden_file_is_lost(small_disk: Path, how: str) -> None:
    async with overlay_on(small_disk) as overlay:
        workspace = await overlay.make()
        hiding, output = await start(workspace, ["/usr/bin/python3", "-c", _HIDES_A_FILE, how])
        assert await read_all(output) == b"full\n"
        await asyncio.sleep(1)  # until the count no longer finds it open
        with pytest.raises(WorkspaceFailure) as failure:
            await write(workspace, "/answer", bytes(1_000_000))
        assert failure.value.cause == "WorkspaceEnded", "a policy could have itself masked"
        await hiding.exited


async def test_workspace_has_not_used_up_a_disk_that_a_neighbour_filled_and_freed(small_disk: Path) -> None:
    async with overlay_on(small_disk) as overlay:
        neighbour, workspace = await overlay.make(), await overlay.make()
        freeing, output = await start(neighbour, "cat /dev/zero > hog; echo full; sleep 1; rm hog")
        while b"full" not in await asyncio.to_thread(os.read, output, 1000):
            pass  # cat says that it found no room
        cause = (await run(workspace, "true")).exit.cause
        # Which one depends on whether the neighbour has freed the disk when the files are counted. Both give a new attempt.
        assert cause in ("WorkspaceEnded", "DiskFull"), "a right answer would get reward 0"
        await freeing.exited
        os.close(output)


async def test_workspace_that_made_all_files_of_the_disk_has_used_it_up_alone(small_disk: Path) -> None:
    async with overlay_on(small_disk) as overlay:
        workspace, neighbour = await overlay.make(), await overlay.make()
        filled = await run(workspace, "for i in $(seq 5000); do : > /tmp/$i || exit; done")
        assert filled.exit.cause == "Disk", "a policy could have itself masked"
        assert (await run(neighbour, "echo some > made")).exit.cause == "DiskFull", "a test would fail, with reward 0"
