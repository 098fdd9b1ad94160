"""Folder trees that hostile tools have made: removed and measured without following a link, at any depth.

Everything goes through descriptors of folders, one name at a time. A tree may be deeper than a path may be long, and than
a process may hold folders open; so no function here recurses, and none holds more than a few descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Generator

_LISTED = stat.S_IRUSR | stat.S_IXUSR
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# How anything is opened that might not be what it should be: no wait on FIFOs, no terminal acquired.
NO_WAIT = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# As many as the kernel follows.
_MOST_LINKS = 40
# A removal that was broken off has left names that the next one meets.
_lifted = itertools.count()


def open_folder(parent: int, name: str) -> int:
    """The folder `name` in `parent`; raises OSError (ENOTDIR or ELOOP) when it is a link or no folder."""
    return os.open(name, _FOLDER, dir_fd=parent)


def remove_entry(parent: int, name: str, *, missing_ok: bool) -> None:
    """Remove a file, or a folder with all below it. Raises OSError."""
    for _ in removal(parent, name, missing_ok=missing_ok):
        pass


def remove(path: str | os.PathLike[str]) -> None:
    """`remove_entry`, of what may be missing, by its path. Raises OSError."""
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
    """`remove_entry` in steps, two a file, for whoever has other things to do in between."""
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
    """Empty the folder breadth first: subfolders are lifted up into it, so that one level is all there ever is."""
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
            # Its `..` changes with the move, so whoever is not root must be able to write to the folder itself.
            make_writable(source, name)
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=destination)
    except OSError as error:
        # An overlay cannot rename folders that come from a lower layer.
        if error.errno != errno.EXDEV:
            raise
        yield from _folder_removal(source, name)


def _open_for_removal(parent: int, name: str) -> int:
    """The folder, made writable for its owner first where it is not."""
    make_writable(parent, name, os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    return open_folder(parent, name)


def make_writable(parent: int, name: str, mode: int = 0) -> None:
    """Give the owner of a file or folder all rights, where its `mode` lacks some and this process may; not for a link."""
    if mode & stat.S_IRWXU == stat.S_IRWXU:
        return
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with contextlib.suppress(PermissionError):
            os.chmod(f"/proc/self/fd/{place}", 0o700)
    finally:
        os.close(place)


def _unlink_files(folder: int) -> Generator[None, None, list[str]]:
    """Unlink all that is no folder; the names of the folders that remain."""
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


def resolve_below(root: str, path: str) -> str:
    """The path, from `root` on, that `path` leads to with links followed as a process whose root that is would."""
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


def disk_bytes(root: str, *, least: int = 0, since: int | None = None, makes_readable: bool = False) -> int:
    """Bytes of the file system's blocks in use below `root`; each file and folder counts as `least` bytes or more.

    With `since`, in nanoseconds since 1970, only what was written from then on, and not in other mounts below. With
    `makes_readable`, folders that their owner may not list are made so. The tree may change meanwhile. When a folder was
    moved while it was counted, the rest is left for the next count.
    """
    total = 0
    hard_linked: set[int] = set()
    current = os.open(root, _FOLDER)
    mount = os.fstat(current).st_dev
    levels: list[tuple[int, list[str]]] = []
    try:
        while True:
            folders: list[str] = []
            with os.scandir(current) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(info.st_mode):
                            if since is not None and info.st_dev != mount:
                                continue
                            if makes_readable and info.st_mode & _LISTED != _LISTED:
                                make_writable(current, entry.name)
                            folders.append(entry.name)
                        # The time of the last change, which no tool can set.
                        if since is not None and info.st_ctime_ns < since:
                            continue
                        if not stat.S_ISDIR(info.st_mode) and info.st_nlink > 1:
                            if info.st_ino in hard_linked:
                                continue
                            hard_linked.add(info.st_ino)
                        total += max(info.st_blocks * 512, least)
            levels.append((os.fstat(current).st_ino, folders))
            following = _next_folder(current, levels)
            if following is None:
                return total
            os.close(current)
            current = following
    finally:
        os.close(current)


def _next_folder(current: int, levels: list[tuple[int, list[str]]]) -> int | None:
    """The next folder of a walk in depth that stands at `current`; `levels` holds what is left to visit on each level."""
    here = os.dup(current)
    try:
        while True:
            inode, folders = levels[-1]
            if os.fstat(here).st_ino != inode:
                return None
            while folders:
                # A tool that takes our descriptors (prlimit) makes the count fail, not the folder empty.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    return open_folder(here, folders.pop())
            levels.pop()
            if not levels:
                return None
            above = os.open("..", _FOLDER, dir_fd=here)
            os.close(here)
            here = above
    finally:
        os.close(here)
