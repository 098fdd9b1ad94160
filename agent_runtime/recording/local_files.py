"""Create-only writes of small files in a local folder, on the caller's thread, and deletions in it.

obstore writes the same files, but hands each write to another thread and waits for it, which takes three times as long
as the write itself. Its deletions follow links.
"""

import array
import contextlib
import errno
import fcntl
import itertools
import os
import re
import struct
import sys
from typing import Final

_PLAIN: Final = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)

# linux/fs.h: FS_IOC_GETFLAGS and FS_IOC_SETFLAGS, which have the size of a C long in them, and FS_TOPDIR_FL.
GET_FLAGS: Final = 0x8000_6601 | struct.calcsize("l") << 16
_SET_FLAGS: Final = 0x4000_6602 | struct.calcsize("l") << 16
TOP_FOLDER: Final = 0x0002_0000

_REAL_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_plain(key: str) -> bool:
    """Whether the key equals the file's path. obstore escapes other characters, and refuses `..`."""
    return _PLAIN.fullmatch(key) is not None


def create(path: str, data: bytes) -> None:
    """Create a file, completely or not at all, with its parents. Raises FileExistsError, OSError.

    It is not synced to the disk, so it may be lost in a power failure. If several writers create the same path, exactly
    one succeeds: the file is written under another name, and then hard-linked, which never replaces an existing file.
    """
    staging = _written(path, data)
    try:
        os.link(staging, path)
    finally:
        os.unlink(staging)


def delete(folder: str, key: str) -> None:
    """Remove a file below a folder, and its parents that become empty.

    Raises NotADirectoryError for a path through a link: others may write to the folder, and their links can point
    anywhere.
    """
    *above, name = key.split("/")
    with contextlib.ExitStack() as stack:
        opened = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        for part in above:
            stack.callback(os.close, opened[-1])
            opened.append(os.open(part, _REAL_FOLDER, dir_fd=opened[-1]))
        stack.callback(os.close, opened[-1])
        os.unlink(name, dir_fd=opened[-1])
        with contextlib.suppress(OSError):  # one that is not empty
            for parent, part in zip(opened[-2::-1], above[::-1], strict=True):
                os.rmdir(part, dir_fd=parent)


def _written(path: str, data: bytes) -> str:
    """Return the path of a new file with the data, in the same folder. It is named as obstore names its own, so that
    obstore's listings skip it.
    """
    for number in itertools.count(1):
        staging = f"{path}#{number}"
        try:
            file = _opened(staging)
        except FileExistsError:
            continue  # another process writes the same key, or died while writing it
        try:
            _write(file, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(staging)
            raise
        return staging
    raise AssertionError


def _opened(path: str) -> int:
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            _make_folders(os.path.dirname(path))  # repeated if another process removes the empty folders


def _make_folders(path: str) -> None:
    try:
        os.mkdir(path)
    except FileNotFoundError:
        above = os.path.dirname(path)
        _make_folders(above)
        _spread(above)
        _make_folders(path)
    except FileExistsError as error:
        if not os.path.isdir(path):  # a broken link or a file, for which FileExistsError would be misleading
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error


def _spread(folder: str) -> None:
    """Ask ext4 to put the subfolders into separate block groups, if possible (chattr(1), `T`).

    Otherwise all share one block group. If many files were deleted there recently, ext4 examines them all for each new
    file, which takes 0.2 to 0.5 ms instead of 0.04 (`recently_deleted` in fs/ext4/ialloc.c).
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # another file system, which does not support or need this
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = array.array("I", [0])
            fcntl.ioctl(file, GET_FLAGS, flags)
            flags[0] |= TOP_FOLDER
            fcntl.ioctl(file, _SET_FLAGS, flags)
        finally:
            os.close(file)


def _write(file: int, data: bytes) -> None:
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]
    finally:
        os.close(file)
