"""Remove and measure hostile folder trees without following links, at any depth.

All operations use descriptors of folders, one name at a time. A tree may be deeper than the longest path and than the
limit of open folders. So no function here recurses, and none but `disk_use` holds more than a few descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
from collections.abc import Generator, Iterator
from typing import NamedTuple

_LISTED = stat.S_IRUSR | stat.S_IXUSR
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Flags for opening untrusted paths: no wait on FIFOs, no controlling terminal.
NO_WAIT = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# Limit of searches for a renamed entry. Only a program that renames it without pause exceeds this.
_SEARCHES = 64
# The kernel's limit of followed links.
_MOST_LINKS = 40
# Numbers of temporary names. An interrupted removal may leave such names, so a name can already exist.
_lifted = itertools.count()

# Of one system call, which cannot be interrupted.
_COPY_BYTES = 16 * 1024 * 1024


def open_folder(parent: int, name: str) -> int:
    """Open the folder `name` in `parent`. Raises OSError (ENOTDIR or ELOOP) if it is a link or not a folder."""
    return os.open(name, _FOLDER, dir_fd=parent)


def remove_entry(parent: int, name: str, *, missing_ok: bool) -> None:
    """Remove a file, or a folder with its contents. Raises OSError."""
    for _ in removal(parent, name, missing_ok=missing_ok):
        pass


def remove(path: str | os.PathLike[str]) -> None:
    """Like `remove_entry`, by path, for an entry that may be missing. Raises OSError."""
    place, name = os.path.split(path)
    try:
        parent = os.open(place or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_entry(parent, name, missing_ok=True)
    finally:
        os.close(parent)


def removal(parent: int, name: str, *, missing_ok: bool) -> Generator[None, None, None]:
    """Like `remove_entry`, in steps, two for each file, so that the caller can interleave other work."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        if missing_ok:
            return
        raise
    except (IsADirectoryError, PermissionError) as error:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise error
    yield from _folder_removal(parent, name)


def _folder_removal(parent: int, name: str) -> Generator[None, None, None]:
    """Empty the folder breadth first: subfolders are moved up into it, so that there is only one level."""
    top = _open_for_removal(parent, name)
    try:
        while True:
            folders = yield from _unlink_files(top)
            if not folders:
                break
            for folder in folders:
                inner = _open_for_removal(top, folder)
                try:
                    for below in (yield from _unlink_files(inner)):
                        yield from _lift(inner, below, top, f".removed.{os.getpid()}.{next(_lifted)}")
                finally:
                    os.close(inner)
                os.rmdir(folder, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _lift(source: int, name: str, destination: int, new_name: str) -> Generator[None, None, None]:
    try:
        try:
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=destination)
        except PermissionError:
            # Moving a folder changes its `..` entry, so a user other than root needs write permission for the folder
            # itself.
            make_writable(source, name)
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=destination)
    except OSError as error:
        # An overlay cannot rename folders that come from a lower layer.
        if error.errno != errno.EXDEV:
            raise
        yield from _folder_removal(source, name)


def _open_for_removal(parent: int, name: str) -> int:
    """Open the folder, after making it writable for its owner if necessary."""
    make_writable(parent, name, os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    return open_folder(parent, name)


def make_writable(parent: int, name: str, mode: int = 0) -> None:
    """Give the owner of a file or folder all permissions if its `mode` lacks some. Links, and entries that this process
    may not change, stay as they are.
    """
    if mode & stat.S_IRWXU == stat.S_IRWXU:
        return
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with contextlib.suppress(PermissionError):
            os.chmod(f"/proc/self/fd/{place}", 0o700)
    finally:
        os.close(place)


def _unlink_files(folder: int) -> Generator[None, None, list[str]]:
    """Unlink all entries except folders; return the names of the folders."""
    folders: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
            yield
    for name in others:
        os.unlink(name, dir_fd=folder)
        yield
    return folders


def copy_contents(source: str, target: str) -> None:
    """Copy all entries of a folder into another one, with owners, modes, and the times of files. Nothing else writes to
    either. Devices, sockets and FIFOs are left out.
    """
    folders = [(source, target)]
    while folders:
        here, there = folders.pop()
        for entry in list(os.scandir(here)):
            copy = f"{there}/{entry.name}"
            info = entry.stat(follow_symlinks=False)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), copy)
            elif entry.is_dir():
                os.mkdir(copy)
                folders.append((entry.path, copy))
            elif entry.is_file():
                with open(entry.path, "rb") as file, open(copy, "xb") as new:
                    while os.sendfile(new.fileno(), file.fileno(), None, _COPY_BYTES):
                        pass
            else:
                continue
            os.chown(copy, info.st_uid, info.st_gid, follow_symlinks=False)
            if not entry.is_symlink():
                os.chmod(copy, stat.S_IMODE(info.st_mode))
            if not entry.is_dir(follow_symlinks=False):
                os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)


def resolve_below(root: str, path: str) -> str:
    """Resolve `path`, following links as a process whose root is `root` would; the result is relative to `root`."""
    here, left, links = "/", list(reversed(path.split("/"))), 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, part)
        try:
            leads_to = os.readlink(root.rstrip("/") + step)
        except OSError:
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        here = "/" if leads_to.startswith("/") else here
        left += reversed(leads_to.split("/"))
    return here


class DiskUse(NamedTuple):
    """A lower bound of the disk space that a tree uses, in bytes."""

    bytes: int
    is_disturbed: bool = False
    """Whether an entry left its folder before it was counted: it was deleted or moved."""
    is_evaded: bool = False
    """Whether the tree cannot be counted, because names change faster than they can be looked up or it has too many
    levels.
    """


def disk_use(
    root: str, *, least: int = 0, since: int | None = None, makes_readable: bool = False, enough: int = sys.maxsize
) -> DiskUse:
    """Count the disk blocks used below `root`; each file and folder counts as `least` bytes or more. The count stops when
    it exceeds `enough`.

    With `since`, in nanoseconds since 1970, count only later writes and skip other mounts below. With `makes_readable`,
    make folders readable that their owner may not list. The tree may change during the walk. Each level with uncounted
    folders stays open, so that moving a folder does not end the count.
    """
    total = 0
    is_disturbed = False
    hard_linked: set[int] = set()
    current: int | None = os.open(root, _FOLDER)
    mount = os.stat(root).st_dev
    levels: list[tuple[int, dict[int, str]]] = []
    try:
        while current is not None:
            folders: dict[int, str] = {}
            for name, info in _entries(current):
                if info is None:
                    is_disturbed = True
                    continue
                is_folder = stat.S_ISDIR(info.st_mode)
                if is_folder:
                    if since is not None and info.st_dev != mount:
                        continue
                    if makes_readable and info.st_mode & _LISTED != _LISTED:
                        with contextlib.suppress(OSError):
                            make_writable(current, name)
                    folders[info.st_ino] = name
                # Tools cannot set the time of the last status change.
                if since is not None and info.st_ctime_ns < since:
                    continue
                if not is_folder and info.st_nlink > 1:
                    if info.st_ino in hard_linked:
                        continue
                    hard_linked.add(info.st_ino)
                total += max(info.st_blocks * 512, least)
                if total > enough:
                    return DiskUse(total)
            levels.append((current, folders))
            current = None
            while levels and current is None:
                level, folders = levels[-1]
                if folders:
                    inode, name = folders.popitem()
                    # Otherwise a tool could hide a folder from this count until the disk is full.
                    with contextlib.suppress(PermissionError):
                        current = _open_inode(level, inode, name)
                        is_disturbed |= current is None
                if not folders:
                    os.close(level)
                    levels.pop()
        return DiskUse(total, is_disturbed)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.EMFILE):
            raise
        return DiskUse(total, is_evaded=True)
    finally:
        for level, _ in levels:
            os.close(level)
        if current is not None:
            os.close(current)


def _entries(folder: int) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield the entries with their states, even if they are renamed meanwhile. The state is None if the entry has left
    the folder.

    Raises OSError (ESTALE) if an entry is renamed again and again.
    """
    unseen: dict[int, str] = {}
    for search in range(_SEARCHES):
        is_renamed = False
        with os.scandir(folder) as entries:
            for entry in entries:
                if search and entry.inode() not in unseen:
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    unseen[entry.inode()] = entry.name
                    is_renamed = True
                except OSError:
                    continue
                else:
                    unseen.pop(entry.inode(), None)
                    yield entry.name, info
        if not is_renamed:
            yield from ((name, None) for name in unseen.values())
            return
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _open_inode(parent: int, inode: int, name: str) -> int | None:
    """Open a folder that was called `name` and may have been renamed; None if it has left `parent`.

    Raises OSError (ESTALE) if it is renamed again and again.
    """
    for _ in range(_SEARCHES):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = _open_quietly(parent, name)
            if os.fstat(found).st_ino == inode:
                return found
            os.close(found)
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if entry.inode() == inode]
        if not names:
            return None
        name = names[0]
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _open_quietly(parent: int, name: str) -> int:
    """Open a folder without changing its access time if the kernel allows it: a tool could time its moves by that."""
    try:
        return os.open(name, _FOLDER | os.O_NOATIME, dir_fd=parent)
    except PermissionError:
        return open_folder(parent, name)
