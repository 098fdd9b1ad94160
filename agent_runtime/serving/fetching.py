"""Fetch a folder of files. The folder exists only if it is complete and verified.

Files are written into a temporary folder, which is renamed in one step when everything is checked. An interrupted fetch
continues with its complete files. No locks are used: they may have no effect on network file systems, which has
silently corrupted model caches (huggingface_hub issue 4306).
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Final, Protocol

SENTINEL: Final = ".complete.json"
"""File in a complete folder with its source."""
SUMS: Final = "SHA256SUMS"
"""A file in the format of `sha256sum`. If a folder has one, it must list all other files."""
FILES_AT_ONCE: Final = 8
"""Files of a model that are fetched concurrently, each in pieces of 8 MiB."""
MOST_SUMS: Final = 16 * 2**20
"""Most bytes of SHA256SUMS, enough for some hundred thousand files."""
_SUM_LINE: Final = re.compile(r"^([0-9a-fA-F]{64}) [ *](.+)$")


class FetchError(Exception):
    """The requested files are missing or differ from their digests; the message has the file and the expectation."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a source."""

    path: str
    """Path relative to the folder, with slashes."""
    size: int | None = None
    """Size, if the source reports it."""
    sha256: str | None = None
    """Hexadecimal digest, if the source reports it."""


class Source(Protocol):
    """A remote folder."""

    uri: str
    """URI of the source, including its revision."""

    async def files(self) -> Sequence[RemoteFile]:
        """Return all files, at any depth."""

    def read(self, path: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes in pieces."""


async def fetch_folder(source: Source, folder: Path, *, writer: str, digest: str | None = None) -> bool:
    """Make `folder`, whose parent exists, contain the source's files. Returns whether anything was fetched.

    `writer` distinguishes processes that may fetch into one parent at the same time. `digest` is `sha256:` and the
    digest of the source's SHA256SUMS, if it is required. Raises FetchError for a source that is empty or has other
    content.
    """
    origin = {"uri": source.uri, "digest": digest}
    if _is_from(folder, origin):
        return False
    files = await _listed(source, digest)
    staging = folder.with_name(f".{folder.name}.{writer}")
    staging.mkdir(exist_ok=True)
    turns = asyncio.Semaphore(FILES_AT_ONCE)

    async def fetch_file(file: RemoteFile) -> None:
        async with turns:
            await _fetch_file(source, file, staging / file.path)

    try:
        async with asyncio.TaskGroup() as group:
            for file in files:
                group.create_task(fetch_file(file))
    except ExceptionGroup as failed:  # raise only the first error, which ended the other fetches
        raise failed.exceptions[0] from None
    await asyncio.to_thread(_finish, staging, folder, origin, {file.path for file in files})
    return True


async def _listed(source: Source, digest: str | None) -> list[RemoteFile]:
    # Skip the sentinel of a source that was itself fetched by this program.
    files = {file.path: file for file in await source.files() if file.path != SENTINEL}
    if not files:
        raise FetchError(f"{source.uri} has no files; check the address")
    for path in files:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\\" in path:
            raise FetchError(f"{source.uri} has a file {path!r}, which is not a valid path; rename it")
    if SUMS not in files:
        if digest is not None:
            raise FetchError(f"{source.uri} has no {SUMS}, but its digest is required; write one with sha256sum")
        return list(files.values())
    data = b"".join([piece async for piece in source.read(SUMS)])
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if digest is not None and digest != found:
        raise FetchError(f"{source.uri}/{SUMS} has digest {found}, expected {digest}")
    sums = _parse_sums(source.uri, data)
    if missing := sorted(sums.keys() - files.keys()):
        raise FetchError(f"{source.uri} lacks {missing[0]}, which its {SUMS} lists")
    if unlisted := sorted(files.keys() - sums.keys() - {SUMS}):
        raise FetchError(f"{source.uri}/{SUMS} does not list {unlisted[0]}; create it again, or remove the file")
    sums[SUMS] = found.removeprefix("sha256:")
    return [replace(file, sha256=sums[path]) for path, file in files.items()]


def _parse_sums(uri: str, data: bytes) -> dict[str, str]:
    sums = {}
    for number, line in enumerate(data[:MOST_SUMS].decode(errors="replace").splitlines(), start=1):
        match = _SUM_LINE.match(line)
        if match is None:
            raise FetchError(f"{uri}/{SUMS}: line {number} is not in the format of sha256sum")
        sums[match[2].removeprefix("./")] = match[1].lower()
    return sums


async def _fetch_file(source: Source, file: RemoteFile, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and await asyncio.to_thread(_is_whole, target, file):
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    digest = hashlib.sha256()
    size = 0
    with unfinished.open("wb") as out:
        async for piece in source.read(file.path):
            # In a thread, so that the gateway keeps answering runners.
            await asyncio.to_thread(_put, out, digest, piece)
            size += len(piece)
        await asyncio.to_thread(_to_disk, out)
    if file.size is not None and size != file.size:
        raise FetchError(f"{source.uri}/{file.path} has {size} bytes, expected {file.size}")
    if file.sha256 is not None and digest.hexdigest() != file.sha256:
        raise FetchError(f"{source.uri}/{file.path} has SHA-256 {digest.hexdigest()}, expected {file.sha256}")
    unfinished.rename(target)


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _put(out: IO[bytes], digest: _Digest, piece: bytes) -> None:
    out.write(piece)
    digest.update(piece)


def _to_disk(out: IO[bytes]) -> None:
    """Flush a file to disk, before the folder gets its final name."""
    out.flush()
    os.fsync(out.fileno())


def _is_whole(path: Path, file: RemoteFile) -> bool:
    """Whether a file exists with the right content. Existing files are complete, but may be from another version of the
    source.
    """
    if file.size is not None and path.stat().st_size != file.size:
        return False
    if file.sha256 is None:
        return file.size is not None
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest() == file.sha256


def _finish(staging: Path, folder: Path, origin: Mapping[str, str | None], expected: set[str]) -> None:
    for path in staging.rglob("*"):
        # It remains from another or an interrupted fetch.
        if path.is_file() and path.relative_to(staging).as_posix() not in expected:
            path.unlink()
    (staging / SENTINEL).write_text(json.dumps(origin))
    if folder.exists() and not _is_from(folder, origin):
        shutil.rmtree(folder)
    try:
        staging.rename(folder)
    except OSError:
        if not _is_from(folder, origin):
            raise
        shutil.rmtree(staging)  # another writer has written the same folder


def _is_from(folder: Path, origin: Mapping[str, str | None]) -> bool:
    try:
        return bool(json.loads((folder / SENTINEL).read_text()) == origin)
    except (OSError, ValueError):
        return False
