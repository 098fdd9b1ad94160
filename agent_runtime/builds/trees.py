"""Files that a COPY or ADD takes, and the tar that puts them at their destination. Pure but for temporary files.

Names, owners and modes follow Docker: the contents of a folder are copied, not the folder itself; files of the build
context belong to root, those of another stage keep their owners.
"""

from __future__ import annotations

import io
import lzma
import posixpath
import re
import stat
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import zstandard

from agent_runtime.dockerfiles.patterns import Ignore, has_wildcards, matches
from agent_runtime.executor.init.archives import DELETED, OWN_NAME

MOST_LINKS = 40
"""The number of links that Linux follows."""
_ZSTD = b"\x28\xb5\x2f\xfd"
# What tarfile and the decompressors raise for damaged archives.
_DAMAGED = (tarfile.TarError, zstandard.ZstdError, zlib.error, lzma.LZMAError, EOFError, ValueError, OverflowError)
# A time that a workspace can set.
_TIME = re.compile(r"-?\d{1,18}(?:\.\d+)?", re.ASCII)
UNPACKED_BYTES = 16 << 30
"""Limit of the files in an archive that ADD unpacks: a small archive may contain more than any disk holds."""


class CopyProblem(Exception):
    """A COPY or ADD that cannot be carried out; the message names the source."""


@dataclass(frozen=True)
class File:
    """A file of the build context."""

    data: bytes
    mode: int
    link: str | None = None
    """Target of a symbolic link, which has no data."""


@dataclass(frozen=True)
class Context:
    """A build context: its files by path, and the folders that contain them."""

    files: Mapping[str, File]
    folders: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, files: Mapping[str, File], ignored: Ignore) -> Context:
        kept = {path: file for path, file in files.items() if not ignored.excludes(path)}
        folders = {""}
        for path in kept:
            while path := posixpath.dirname(path):
                folders.add(path)
        return cls(dict(sorted(kept.items())), frozenset(folders))

    def found(self, pattern: str) -> list[tuple[str, str]]:
        """Return (name, path without links) of the files and folders that a source of COPY names.

        None if only a pattern matches nothing. Raises CopyProblem.
        """
        path = cleaned(pattern)
        real = self._resolved(path)
        if real is not None:
            return [(path, real)]
        if not has_wildcards(path):
            raise CopyProblem(f"{pattern!r} is not in the build context, or .dockerignore excludes it")
        found: list[tuple[str, str]] = []
        for known in sorted({*self.files, *self.folders}):
            if matches(path, known):
                real = self._resolved(known)
                if real is None:
                    raise CopyProblem(f"{known!r} is a link to a file that is not in the build context")
                found.append((known, real))
        return found

    def _resolved(self, path: str) -> str | None:
        """Return the path without links; None if it does not exist. As in Docker, links cannot leave the context."""
        left, here, links = path.split("/")[::-1], "", 0
        while left:
            part = left.pop()
            if part in ("", ".", ".."):
                here = posixpath.dirname(here) if part == ".." else here
                continue
            here = posixpath.join(here, part)
            file = self.files.get(here)
            if file is not None and file.link is not None:
                links += 1
                if links > MOST_LINKS:
                    return None
                here = "" if file.link.startswith("/") else posixpath.dirname(here)
                left += file.link.split("/")[::-1]
        return here if here in self.files or here in self.folders else None

    def tree(self, path: str) -> list[tuple[str, File | None]]:
        """Return (relative name, file; None for a folder) of a file or of everything below a folder."""
        if path in self.files:
            return [("", self.files[path])]
        prefix = f"{path}/" if path else ""
        below: list[tuple[str, File | None]] = [
            (name[len(prefix) :], None) for name in self.folders if name.startswith(prefix) and name != path
        ]
        below += [(name[len(prefix) :], file) for name, file in self.files.items() if name.startswith(prefix)]
        return [("", None), *sorted(below, key=lambda entry: entry[0].split("/"))]


def cleaned(pattern: str) -> str:
    """Return a source relative to the root of the context or stage."""
    return posixpath.normpath(f"/{pattern}").lstrip("/")


@dataclass(frozen=True)
class Taken:
    """One source of a COPY: a file, or a folder with its contents, as a tar with names relative to it."""

    name: str
    """Path in its context or stage."""
    is_folder: bool
    tar: Callable[[], IO[bytes]]
    """Returns it from its beginning. Its owner closes it."""
    below: str = ""
    """First part of the names in the tar, which belongs to the source itself."""


@dataclass(frozen=True)
class Placing:
    """Where and how the files of a COPY are written."""

    destination: str
    """Real path, absolute."""
    owner: tuple[int, int] | None = None
    """None: as in the tar."""
    is_folder: bool = False
    """Whether files are placed into the destination rather than becoming it."""
    is_exact: bool = False
    """Whether the destination becomes the source itself, also if that is a folder."""
    missing: Sequence[str] = ()
    """Folders that are created, the topmost first."""
    mode: int | None = None
    excludes: Sequence[str] = ()
    keeps_parents: bool = False


def context_tar(context: Context, path: str) -> IO[bytes]:
    """Return a tar of a file or folder of the context; a single file has its own name."""
    target = io.BytesIO()
    now = int(time.time())
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in context.tree(path):
            member = tarfile.TarInfo(name or (posixpath.basename(path) if file is not None else "."))
            member.mtime = now
            if file is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            elif file.link is not None:
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, file.link, 0o777
                tar.addfile(member)
            else:
                member.size, member.mode = len(file.data), file.mode
                tar.addfile(member, io.BytesIO(file.data))
    target.seek(0)
    return target


def write_copy(target: IO[bytes], taken: Sequence[Taken], placing: Placing, *, unpacks: bool = False) -> None:
    """Write the tar that a COPY applies to the root. Raises CopyProblem."""
    with tarfile.open(
        fileobj=target, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for path in placing.missing:
            tar.addfile(_folder(path, placing))
        for source in taken:
            try:
                _write_source(tar, source, placing, unpacks=unpacks)
            except (*_DAMAGED, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # of the target, such as a full disk
                raise CopyProblem(f"the archive {source.name!r} cannot be read: {error}") from error


def _write_source(tar: tarfile.TarFile, source: Taken, placing: Placing, *, unpacks: bool) -> None:
    base, ignored = placing.destination, Ignore.of(placing.excludes)
    if placing.keeps_parents:
        base = posixpath.join(base, source.name if source.is_folder else posixpath.dirname(source.name))
    if unpacks and not source.is_folder:
        archive = _archive_in(source.tar())
        if archive is not None:
            unpacked = 0
            for member, content in _members(archive):
                unpacked += member.size
                if unpacked > UNPACKED_BYTES:
                    raise CopyProblem(f"the archive {source.name!r} has more than {UNPACKED_BYTES} bytes of files")
                # As in Docker, an absolute name is below the destination too.
                _put(tar, member, posixpath.join(base, member.name.lstrip("/")), base, placing, content)
            return
    for member, content in _members(source.tar()):
        name = posixpath.normpath(member.name)
        if source.below:
            name = name[len(source.below) + 1 :] or "."
        if name == "." and source.is_folder:
            # As in Docker, only the contents are copied; the destination keeps its own mode and owner.
            if not placing.is_exact and not placing.keeps_parents:
                continue
            path = base
        elif source.is_folder:
            path = posixpath.join(base, name)
        else:
            path = posixpath.join(base, posixpath.basename(source.name)) if placing.is_folder else base
        if source.is_folder and name != "." and ignored.excludes(name):
            continue
        _put(tar, member, path, base, placing, content, source.below)


def _folder(path: str, placing: Placing) -> tarfile.TarInfo:
    member = tarfile.TarInfo(_stored(path))
    member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
    member.uid, member.gid = placing.owner or (0, 0)
    return member


def _put(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: str,
    base: str,
    placing: Placing,
    content: IO[bytes] | None,
    below: str = "",
) -> None:
    if member.ischr() or member.isblk():
        return
    if member.islnk():
        linked = posixpath.normpath(member.linkname).lstrip("/").removeprefix(f"{below}/" if below else "")
        member.linkname = _stored(posixpath.join(base, linked))
    member.name = _stored(path)
    if placing.owner is not None:
        member.uid, member.gid = placing.owner
    if placing.mode is not None and not member.issym():
        # As in Docker, the mode is for files and folders alike.
        member.mode = placing.mode
    if member.isreg():
        # A sparse file is written with all its bytes.
        member.type = tarfile.REGTYPE
    headers = {
        name: value
        for name, value in member.pax_headers.items()
        if name not in ("path", "linkpath", "size") and not name.startswith("GNU.sparse.")
    }
    if not _TIME.fullmatch(headers.get("mtime", "0")):
        del headers["mtime"]
        member.mtime = 0
    if posixpath.basename(member.name).startswith(DELETED):
        headers[OWN_NAME] = "1"
    member.pax_headers = headers
    tar.addfile(member, content)


def _stored(path: str) -> str:
    return posixpath.normpath(path).lstrip("/") or "."


def _members(packed: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    with _opened_tar(packed) as tar:
        for member in tar:
            if ".." in member.name.split("/"):
                raise CopyProblem(f"member {member.name!r} of the archive leaves the destination")
            yield member, tar.extractfile(member) if member.isreg() else None


def _archive_in(packed: IO[bytes]) -> IO[bytes] | None:
    """Return the tar in a tar's only file, uncompressed if it is zstd; None if that file is no archive."""
    found = next(iter(_members(packed)), None)
    if found is None or found[1] is None:
        return None
    data = found[1].read()

    def opened() -> IO[bytes]:
        packed = io.BytesIO(data)
        if not data.startswith(_ZSTD):
            return packed
        return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)

    try:
        # Empty data is a file, although tarfile would accept it.
        with _opened_tar(opened()) as tar:
            if tar.next() is None:
                return None
    except (*_DAMAGED, OSError):
        return None
    return opened()


def _opened_tar(packed: IO[bytes]) -> tarfile.TarFile:
    # zstd's reader cannot seek, which `r:*` needs.
    mode: Any = "r|" if isinstance(packed, zstandard.ZstdDecompressionReader) else "r:*"
    return tarfile.open(fileobj=packed, mode=mode, encoding="utf-8", errors="surrogateescape")


def mode_of(written: str) -> int:
    """Return a file's mode from the octal text of a task's file."""
    return stat.S_IMODE(int(written, 8))
