"""Unpack untrusted tar archives.

`tarfile`'s own filters need Python 3.11.4, but Debian 12 has 3.11.2.
"""

import os
import shutil
import tarfile
from itertools import islice, takewhile
from pathlib import Path, PurePosixPath


class UnsafeMember(ValueError):
    """An archive entry that must not be unpacked; the message says why."""


def extract_member(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, real: set[Path]) -> None:
    """Write a file, with its hard links as copies, or a folder below `folder`. Raises UnsafeMember, OSError.

    Nothing is written through a symbolic link; special mode bits and owners are ignored. `real` caches the folders that
    were already checked; at first it has only `folder`.
    """
    path = _inside(member, folder, real)
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    if not (member.isreg() or member.islnk()):
        raise UnsafeMember(f"{member.name!r} is neither a file nor a folder")
    try:
        content = archive.extractfile(member)
    except (KeyError, RecursionError):  # a hard link to an entry that the archive does not have, or to itself
        content = None
    if content is None:
        raise UnsafeMember(f"{member.name!r} is a link to {member.linkname!r}, which is not a file")
    _make_place(path)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file)
    path.chmod((member.mode & 0o755) | 0o600)
    os.utime(path, (member.mtime, member.mtime))


def extract_all(archive: tarfile.TarFile, folder: Path) -> list[str]:
    """Write files, folders and symbolic links below `folder`; return why each other entry was left out."""
    refused: list[str] = []
    real = {folder}
    later: list[tarfile.TarInfo] = []
    for member in archive:
        if member.issym():
            later.append(member)
            continue
        try:
            extract_member(archive, member, folder, real)
        except (UnsafeMember, OSError) as error:
            refused.append(str(error))
    links: list[tuple[tarfile.TarInfo, Path]] = []
    for member in later:
        try:
            path = _inside(member, folder, real)  # checked now: an earlier member may be a link
            _make_place(path)
            path.symlink_to(member.linkname)
            links.append((member, path))
        except (OSError, ValueError) as error:
            refused.append(str(error))
    # The target of a link depends on the other links, so links are checked after all of them exist.
    root = os.path.realpath(folder)
    for member, path in links:
        if path.is_symlink() and not _stays_inside(path, root):
            path.unlink()
            refused.append(f"{member.name!r} is a link to {member.linkname!r}, outside the folder")
    return refused


def _stays_inside(link: Path, root: str) -> bool:
    try:
        return os.path.commonpath([root, os.path.realpath(link)]) == root
    except RecursionError:  # a chain of links that is longer than the system follows
        return False


def _inside(member: tarfile.TarInfo, folder: Path, real: set[Path]) -> Path:
    """Return the path of an entry. Raises UnsafeMember unless all its parents are real folders."""
    parts = PurePosixPath(member.name).parts
    if member.name.startswith("/") or ".." in parts or "\0" in member.name:
        raise UnsafeMember(f"{member.name!r} leads out of the folder")
    path = folder.joinpath(*parts)
    unknown = list(takewhile(lambda parent: parent not in real, islice(path.parents, len(parts))))
    if any(parent.is_symlink() for parent in unknown):
        raise UnsafeMember(f"{member.name!r} is behind a symbolic link")
    if unknown and path.parent.is_dir():
        real.update(unknown)
    return path


def _make_place(path: Path) -> None:
    """Create a file's parents, and remove an existing file or link at its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
