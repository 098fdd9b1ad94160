"""The user of a command: names are looked up in the workspace's own /etc/passwd and /etc/group.

Not with the `pwd` module, which loads the image's name-service libraries into this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import NamedTuple

from agent_runtime.executor import kernel

_PASSWD, _GROUP = "/etc/passwd", "/etc/group"
# A larger file is not a user list. Tools can replace the file, and init's children read it.
_MAX_DATABASE_BYTES = 1024 * 1024
_MAX_ID = 2**32 - 2
# Linux allows 65,536 groups a process; real accounts have only a few.
_MAX_GROUPS = 256


class Refused(Exception):
    """An operation that cannot be done: `errno`, its path or name, and a message for the caller."""

    def __init__(self, number: int, path: str, message: str) -> None:
        super().__init__(message)
        self.errno, self.path, self.message = number, path, message


class Identity(NamedTuple):
    """Numeric user and group, supplementary groups, and the values of HOME and USER."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) <= _MAX_ID else None


def _rows(database: bytes, columns: int) -> list[list[str]]:
    lines = os.fsdecode(database).split("\n")
    return [row for row in (line.split(":") for line in lines) if len(row) >= columns and row[0]]


ROOT = (0, 0)


def resolve(user: str, passwd: bytes, group: bytes, own: tuple[int, int] = ROOT) -> Identity:
    """Resolve `user`, a name, a uid, or `uid:gid` (each may be a name). Raises Refused for an unknown name.

    `own` are uid and gid of this process.
    """
    wanted, _, wanted_group = user.partition(":")
    accounts = _rows(passwd, 6)
    uid = _number(wanted)
    account = next((row for row in accounts if (row[0] == wanted if uid is None else _number(row[2]) == uid)), None)
    if uid is None:
        uid = _number(account[2]) if account else None
    if uid is None:
        raise Refused(
            errno.EINVAL, user, f"user {wanted!r} is not in the workspace's /etc/passwd; give a name in it, or a uid"
        )
    name, home = (account[0], account[5]) if account else (str(uid), "/")
    groups = _rows(group, 4)
    # A uid without an account gets the group of the same number: where ids are not mapped, group 0 would be the
    # machine's. A process that already runs as that user, and is not root, keeps the group from the container runtime.
    gid = _number(account[3]) if account else own[1] if uid == own[0] != 0 else uid
    if wanted_group:
        named = next((row[2] for row in groups if row[0] == wanted_group), wanted_group)
        gid = _number(named)
    if gid is None:
        raise Refused(
            errno.EINVAL,
            user,
            f"group {wanted_group!r} is not in the workspace's /etc/group; give a name in it, or a gid",
        )
    memberships = {_number(row[2]) for row in groups if name in row[3].split(",")} - {None}
    supplementary = [gid, *sorted(member for member in memberships if member is not None and member != gid)]
    return Identity(uid, gid, tuple(supplementary[:_MAX_GROUPS]), name, home or "/")


def _signature(path: str) -> tuple[int, int, int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


class Accounts:
    """User lists of this process's root folder, read again when they have changed.

    `own` are uid and gid of this process when it was forked.
    """

    def __init__(self, own: tuple[int, int]) -> None:
        self._own = own
        self._seen: tuple[object, object] | None = None
        self._passwd = self._group = b""
        self._cache: dict[str, Identity] = {}

    def look_up(self, user: str) -> Identity:
        """Resolve a user with these lists."""
        seen = (_signature(_PASSWD), _signature(_GROUP))
        if seen != self._seen:
            self._seen, self._passwd, self._group = seen, _database(_PASSWD), _database(_GROUP)
            self._cache.clear()
        identity = self._cache.get(user)
        if identity is None:
            identity = self._cache[user] = resolve(user, self._passwd, self._group, self._own)
        return identity


def _database(path: str) -> bytes:
    """Return the content of a user list; empty if missing. Never blocks on a FIFO or reads a device."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as source:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return source.read(_MAX_DATABASE_BYTES)
    return b""


def become(identity: Identity, *, keep_capabilities: bool = False) -> None:
    """Take on that identity permanently. Raises Refused if this process may not.

    With `keep_capabilities`, which only root of a workspace may use, file permissions do not apply to this process, but
    files that it creates still belong to that identity.
    """
    try:
        if keep_capabilities:
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        if (os.geteuid(), os.getegid()) != (identity.uid, identity.gid) or os.geteuid() == 0:
            with contextlib.suppress(PermissionError):
                os.setgroups(identity.groups)
            os.setresgid(identity.gid, identity.gid, identity.gid)
            os.setresuid(identity.uid, identity.uid, identity.uid)
        if keep_capabilities:
            kernel.raise_container_capabilities()
    except OSError as error:
        raise Refused(
            error.errno or errno.EPERM,
            identity.name,
            f"cannot run as user {identity.name!r} ({identity.uid}:{identity.gid}) here: {error.strerror}; "
            f"this sandbox may only run commands as {os.geteuid()}:{os.getegid()}",
        ) from None
    kernel.hide_from_tools()
