"""Fetched weights: a folder is complete and checked or does not exist, whatever breaks off."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.serving.fetching import SENTINEL, SUMS, FetchError, RemoteFile, fetch_folder
from tests.support.full import examples


class Fake:
    """A source in memory that breaks off on request."""

    def __init__(self, files: dict[str, bytes], *, uri: str = "mem://a", sums: bool = False) -> None:
        self.uri = uri
        self.contents = dict(files)
        if sums:
            lines = [f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in files.items()]
            self.contents[SUMS] = "".join(lines).encode()
        self.read_paths: list[str] = []
        self.breaks_at: int | None = None

    async def files(self) -> Sequence[RemoteFile]:
        return [RemoteFile(path, len(data)) for path, data in self.contents.items()]

    async def read(self, path: str) -> AsyncIterator[bytes]:
        self.read_paths.append(path)
        for start in range(0, len(self.contents[path]), 3):
            if self.breaks_at is not None:
                self.breaks_at -= 1
                if self.breaks_at < 0:
                    raise ConnectionResetError("gone")
            yield self.contents[path][start : start + 3]
            await asyncio.sleep(0)

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.contents[SUMS]).hexdigest()}"


FILES = {"config.json": b"{}", "a/shard-1": b"0123456789", "a/shard-2": b"abc"}


def there(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != SENTINEL
    }


@pytest.mark.parametrize("sums", [False, True])
async def test_fetched_files_equal_the_source(tmp_path: Path, sums: bool) -> None:
    source = Fake(FILES, sums=sums)
    assert await fetch_folder(source, tmp_path / "m", writer="w")
    assert there(tmp_path / "m") == source.contents
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


async def test_existing_folder_is_not_fetched_again(tmp_path: Path) -> None:
    await fetch_folder(Fake(FILES), tmp_path / "m", writer="w")
    again = Fake(FILES)
    assert not await fetch_folder(again, tmp_path / "m", writer="other")
    assert again.read_paths == []


async def test_a_folder_of_another_source_is_replaced(tmp_path: Path) -> None:
    await fetch_folder(Fake(FILES), tmp_path / "m", writer="w")
    other = Fake({"only": b"this"}, uri="mem://b")
    await fetch_folder(other, tmp_path / "m", writer="w")
    assert there(tmp_path / "m") == {"only": b"this"}


@settings(max_examples=examples(40))
@given(breaks=st.lists(st.integers(0, 8), max_size=4), sums=st.booleans())
def test_interrupted_fetch_leaves_no_folder_and_resumes(
    tmp_path_factory: pytest.TempPathFactory, breaks: list[int], sums: bool
) -> None:
    folder = tmp_path_factory.mktemp("fetch") / "m"

    async def play() -> None:
        source = Fake(FILES, sums=sums)
        for pieces in breaks:
            source.breaks_at = pieces
            try:
                await fetch_folder(source, folder, writer="w")
            except ConnectionResetError:
                assert not folder.exists()
        source.breaks_at = None
        whole = {path for path in there(folder.parent) if not path.endswith(".unfinished")}
        source.read_paths.clear()
        await fetch_folder(source, folder, writer="w")
        assert there(folder) == source.contents
        fetched_again = {f".m.w/{path}" for path in source.read_paths if path != SUMS} & whole
        assert fetched_again == set()

    asyncio.run(play())


async def test_two_writers_at_once_end_with_one_whole_folder(tmp_path: Path) -> None:
    sources = [Fake(FILES), Fake(FILES)]
    await asyncio.gather(*(fetch_folder(s, tmp_path / "m", writer=str(i)) for i, s in enumerate(sources)))
    assert there(tmp_path / "m") == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def broken(change: str) -> Fake:
    source = Fake(FILES, sums=True)
    match change:
        case "content":
            source.contents["a/shard-1"] = b"X123456789"
        case "missing":
            del source.contents["a/shard-2"]
        case "unlisted":
            source.contents["extra"] = b"x"
        case "sums":
            source.contents[SUMS] = b"no sums\n"
    return source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("content", "a/shard-1 has SHA-256"),
        ("missing", "lacks a/shard-2"),
        ("unlisted", "does not list extra"),
        ("sums", "line 1 is not in the format of sha256sum"),
    ],
)
async def test_weights_with_wrong_checksums_are_never_used(tmp_path: Path, change: str, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        await fetch_folder(broken(change), tmp_path / "m", writer="w")
    assert not (tmp_path / "m").exists()


async def test_a_requested_digest_is_verified(tmp_path: Path) -> None:
    source = Fake(FILES, sums=True)
    with pytest.raises(FetchError, match=r"expected sha256:0000"):
        await fetch_folder(source, tmp_path / "m", writer="w", digest="sha256:" + "0" * 64)
    with pytest.raises(FetchError, match="its digest is required"):
        await fetch_folder(Fake(FILES), tmp_path / "m", writer="w", digest=source.digest)
    assert await fetch_folder(source, tmp_path / "m", writer="w", digest=source.digest)


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out", "a\\b"])
async def test_no_file_is_written_outside_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(FetchError, match="is not a valid path"):
        await fetch_folder(Fake({path: b"x"}), tmp_path / "m", writer="w")
    assert list(tmp_path.iterdir()) == []


async def test_source_without_files_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="has no files"):
        await fetch_folder(Fake({}), tmp_path / "m", writer="w")
