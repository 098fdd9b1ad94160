"""Segments in a folder: created completely or not at all, once, and under the key where readers look for them."""

import array
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording import local_files
from agent_runtime.recording.store import StorageError, Store

KEYS = st.text(st.sampled_from("ab0.-_/#%* ?ü~"), min_size=1, max_size=12)


@given(KEYS)
def test_a_plain_key_has_no_folder_that_leads_out_of_the_store(key: str) -> None:
    inside = os.path.normpath(key) == key and not key.startswith(("/", "."))
    assert inside or not local_files.is_plain(key)


@pytest.mark.parametrize("key", ["a/b.json", "groups/a b", "ü", "50%", "~x/y*", ".probe-1"])
async def test_object_is_found_under_any_key(tmp_path: Path, key: str) -> None:
    store = Store.open(str(tmp_path), {})
    assert await store.create(key, b"mine")
    assert not await store.create(key, b"yours")
    assert await store.get(key) == b"mine"


def test_of_many_threads_that_create_one_file_one_succeeds_and_its_data_is_kept(tmp_path: Path) -> None:
    path, won = tmp_path / "sessions/x/1-0", list[int]()
    ready = threading.Barrier(8)

    def create(number: int) -> None:
        ready.wait()
        try:
            local_files.create(str(path), bytes([number]) * 100_000)
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert path.read_bytes() == bytes(won) * 100_000
    assert [file.name for file in path.parent.iterdir()] == ["1-0"]


async def test_leftover_of_a_killed_writer_is_not_an_object(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path), {})
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1-0.zst#1").write_bytes(b"ha")
    assert await store.list("a") == []
    assert await store.create("a/1-0.zst", b"whole")
    assert await store.get("a/1-0.zst") == b"whole"


def test_killed_writer_leaves_only_complete_files(tmp_path: Path) -> None:
    endless = (
        "import itertools, sys\n"
        "from agent_runtime.recording import local_files\n"
        "for number in itertools.count():\n"
        "    local_files.create(f'{sys.argv[1]}/{number % 7}/{number}', b'x' * 300_000)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", endless, str(tmp_path)])
    while not (tmp_path / "6").exists():
        time.sleep(0.001)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    sizes = {file.stat().st_size for file in tmp_path.glob("*/*") if "#" not in file.name}
    assert sizes == {300_000}


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            local_files.create(str(tmp_path / "a"), b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


async def test_broken_link_in_place_of_a_folder_is_refused_immediately(tmp_path: Path) -> None:
    (tmp_path / "seals").symlink_to("nowhere")
    with pytest.raises(StorageError, match="the folder refuses it"):
        await Store.open(str(tmp_path), {}).create("seals/0.json", b"{}")


def test_deleting_many_sessions_does_not_slow_down_others(tmp_path: Path) -> None:
    by_hand = tmp_path / "by-hand"
    by_hand.mkdir()
    told = subprocess.run(["chattr", "+T", str(by_hand)], capture_output=True, check=False).returncode == 0
    local_files.create(str(tmp_path / "sessions/x/1-0"), b"")
    assert _is_top(tmp_path / "sessions") is told
    assert not _is_top(tmp_path / "sessions/x")


def _is_top(folder: Path) -> bool:
    file = os.open(folder, os.O_RDONLY)
    flags = array.array("I", [0])
    try:
        fcntl.ioctl(file, local_files.GET_FLAGS, flags)
    except OSError:
        return False
    finally:
        os.close(file)
    return bool(flags[0] & local_files.TOP_FOLDER)
