"""A task's folder that a client uploads."""

import gzip
import random
import tarfile
from pathlib import Path

import pytest

from agent_runtime.integrations.harbor_server.archive import BadArchive, pack, unpack


def test_archive_that_was_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    folder, numbers = tmp_path / "task", random.Random(1)
    folder.mkdir()
    for number in range(4):
        (folder / f"hidden_{number}.json").write_bytes(numbers.randbytes(300))
    whole, archive = pack(folder), tmp_path / "task.tar.gz"
    for length in range(0, len(whole), 3):
        archive.write_bytes(whole[:length])
        with pytest.raises(BadArchive):
            unpack(archive, tmp_path / "unpacked")


def test_archive_that_was_damaged_is_refused(tmp_path: Path) -> None:
    folder, archive = tmp_path / "task", tmp_path / "task.tar.gz"
    folder.mkdir()
    (folder / "hidden.json").write_bytes(random.Random(1).randbytes(3000))
    damaged = bytearray(pack(folder))
    damaged[len(damaged) // 2] ^= 1
    archive.write_bytes(damaged)
    with pytest.raises(BadArchive):
        unpack(archive, tmp_path / "unpacked")


def test_header_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    archive, header = tmp_path / "task.tar.gz", tarfile.TarInfo("large")
    header.type, header.size = tarfile.XHDTYPE, 1 << 30
    with gzip.open(archive, "wb", compresslevel=1) as file:
        file.write(header.tobuf() + bytes(4 << 20))
    with pytest.raises(BadArchive, match="outside of files"):
        unpack(archive, tmp_path / "unpacked")


@pytest.mark.parametrize(("name", "seconds"), [("d/" * 600 + "file", 0), ("file", 2**64)])
def test_entry_that_python_cannot_make_or_remove_is_refused(tmp_path: Path, name: str, seconds: int) -> None:
    archive, entry = tmp_path / "task.tar.gz", tarfile.TarInfo(name)
    entry.mtime = seconds
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(entry)
    with pytest.raises(BadArchive):
        unpack(archive, tmp_path / "unpacked")
