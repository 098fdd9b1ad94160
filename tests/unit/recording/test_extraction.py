"""A hostile archive writes nothing outside its folder, on every supported Python."""

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime.recording.extraction import extract_all
from tests.support.full import examples


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, mode
    member.size = 4 if kind == tarfile.REGTYPE else 0
    return member


def unpack(folder: Path, *members: tarfile.TarInfo) -> list[str]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"evil") if member.isreg() else None)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        return extract_all(archive, folder)


def test_files_folders_and_links_are_unpacked(tmp_path: Path) -> None:
    members = [
        entry("./bin", tarfile.DIRTYPE),
        entry("./bin/tool", mode=0o4777),
        entry("link", tarfile.SYMTYPE, "bin/../bin/tool"),
        entry("copy", tarfile.LNKTYPE, "./bin/tool"),
    ]
    assert unpack(tmp_path, *members) == []
    assert (tmp_path / "bin/tool").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == (tmp_path / "copy").read_bytes() == b"evil"
    assert unpack(tmp_path, *members) == [], "again, over what is there"


@pytest.mark.parametrize(
    "members",
    [
        [entry("../out")],
        [entry("/tmp/agent-rollouts-test-out")],
        [entry("a/../../out")],
        [entry("up", tarfile.SYMTYPE, "..")],
        [entry("up", tarfile.SYMTYPE, "/etc/passwd")],
        [
            entry("d/e", tarfile.DIRTYPE),
            entry("d/e/M", tarfile.SYMTYPE, "L/.."),
            entry("d/e/L", tarfile.SYMTYPE, "../.."),
        ],
        [entry("up", tarfile.SYMTYPE, ".."), entry("up/out", tarfile.SYMTYPE, "good")],
        [entry("a", tarfile.LNKTYPE, "b"), entry("b", tarfile.LNKTYPE, "a")],
        [entry("pipe", tarfile.FIFOTYPE)],
        [entry("device", tarfile.CHRTYPE)],
        [entry("hard", tarfile.LNKTYPE, "/etc/passwd")],
    ],
    ids=lambda members: members[0].name + members[0].linkname,
)
def test_outside_entry_and_device_are_left_out(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert unpack(folder, *members, entry("good"))
    assert os.listdir(tmp_path) == ["folder"]
    assert (folder / "good").read_bytes() == b"evil", "the rest is unpacked"
    assert not any(path.is_symlink() and not path.resolve().is_relative_to(folder) for path in folder.rglob("*"))


def test_long_chain_of_links_ends_no_unpacking(tmp_path: Path) -> None:
    chain = [entry(f"l{number}", tarfile.SYMTYPE, f"l{number - 1}" if number else "good") for number in range(1100)]
    assert unpack(tmp_path, *chain, entry("good")), "no system follows it to its end"
    assert (tmp_path / "l9").read_bytes() == b"evil"


def test_folders_above_a_file_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Path] = []
    is_link = Path.is_symlink

    def look(path: Path) -> bool:
        looked_at.append(path)
        return is_link(path)

    monkeypatch.setattr(Path, "is_symlink", look)
    deep = "/".join("d" * 50)
    assert unpack(tmp_path, *(entry(f"{deep}/{number}") for number in range(20))) == []
    assert len(looked_at) <= 2 * 50


def test_existing_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("../outside")
    assert unpack(folder, entry("link/file"))
    assert list((tmp_path / "outside").iterdir()) == []


kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
names = st.lists(st.sampled_from(["a", "b", "..", "."]), min_size=1, max_size=4).map("/".join)
members = st.builds(
    entry, names, st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]), names
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(150))
@given(st.lists(st.builds(entry, names, kinds, names), max_size=6))
def test_no_archive_writes_outside_its_folder(
    tmp_path_factory: pytest.TempPathFactory, found: list[tarfile.TarInfo]
) -> None:
    parent = tmp_path_factory.mktemp("parent")
    folder = parent / "x" / "folder"
    folder.mkdir(parents=True)
    unpack(folder, *found)
    assert [path for path in parent.rglob("*") if not path.is_relative_to(folder)] == [parent / "x"]
    for path in folder.rglob("*"):
        assert path.parent.resolve().is_relative_to(folder)
        assert Path(os.path.realpath(path)).is_relative_to(folder)
