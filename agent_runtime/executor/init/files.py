"""File operations inside a workspace. Each runs in a child of init, with the rights of the workspace's default user.

With an `owner`, in `Overlay`, it has the rights of the workspace's root, and what it makes belongs to that user: so a
verifier is prepared where neither the agent's user nor its own may write.

The folder tree belongs to the tools, so it may hold anything: FIFOs (opening one to read waits for ever, so everything is
opened O_NONBLOCK and must be a regular file), links to anywhere, names that are not UTF-8, trees deeper than a path may
be long. A path is followed as the tools themselves would follow it; nothing here can reach more than they can.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Any, NoReturn

from agent_runtime.executor.init import archives, carrying, unpacking
from agent_runtime.executor.init.channel import Channel, Message
from agent_runtime.executor.init.commands import DEFAULT_PATH, Surroundings
from agent_runtime.executor.init.identity import Accounts, Refused, become
from agent_runtime.executor.init.trees import NO_WAIT, remove_entry

# `list` answers in one message; with the longest names and JSON escapes this stays below the channel's bound.
_MAX_ENTRIES = 5_000
_DEFAULT_MODE = 0o644

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def run(channel: Channel, number: int, request: Message, descriptors: list[int], where: Surroundings) -> NoReturn:
    """Run the operation of `request`, answer as request `number`, and exit."""
    arguments = request["arguments"]
    path = arguments.get("path", "/")
    stream = descriptors[0] if descriptors else -1
    try:
        if descriptors:
            os.set_blocking(stream, True)
        where.bound()
        os.umask(0o022)
        if not (where.layer and request["operation"] in _WHOLE_LAYER):
            accounts = Accounts((os.geteuid(), os.getegid()))
            # Carry with root's rights: in the grading's image, another user may own folders that the agent could write
            # to.
            owner = "" if request["operation"] == "carry" else arguments.get("owner")
            # Elsewhere the workspace's root would be root of the machine.
            if owner is None or not where.isolated:
                become(accounts.look_up(where.user))
            else:
                become(accounts.look_up(owner or where.user), keep_capabilities=True)
        reply = _OPERATIONS[request["operation"]](where, arguments, stream)
    except Refused as refusal:
        reply = {"errno": refusal.errno, "path": refusal.path, "error": refusal.message}
    except BrokenPipeError:
        reply = {"errno": errno.EPIPE, "path": path, "error": f"{path!r}: the reader of the stream has closed it"}
    except OSError as error:
        reply = {"errno": error.errno or errno.EINVAL, "path": path, "error": f"{path!r}: {error.strerror or error}"}
    except ValueError as error:
        reply = {"errno": errno.EINVAL, "path": path, "error": f"{path!r}: {error}"}
    except RecursionError:
        reply = {"errno": errno.ENAMETOOLONG, "path": path, "error": f"{path!r}: folders are nested too deep"}
    except MemoryError:
        reply = {"errno": errno.ENOMEM, "path": path, "error": f"{path!r}: the workspace's memory limit was reached"}
    channel.send(number, reply)
    os._exit(0)


def _refuse_unless_regular(path: str, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise Refused(errno.EISDIR, path, f"{path!r} is a folder; use tar or list")
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS[stat.S_IFMT(info.st_mode)]
        raise Refused(errno.EINVAL, path, f"{path!r} is a {kind}, not a regular file; remove it, or write with replace")


def _read(where: Surroundings, arguments: Message, stream: int) -> Message:
    path, offset, limit = arguments["path"], arguments.get("offset") or 0, arguments.get("limit")
    location = where.locate(path)
    # Checked before opening: opening a socket fails with an unspecific errno.
    _refuse_unless_regular(path, os.stat(location))
    source = os.open(location, os.O_RDONLY | NO_WAIT)
    info = os.fstat(source)
    _refuse_unless_regular(path, info)
    sent = 0
    while limit is None or sent < limit:
        wanted = archives.COPY_BYTES if limit is None else min(archives.COPY_BYTES, limit - sent)
        count = os.sendfile(stream, source, offset + sent, wanted)
        if count == 0:
            break
        sent += count
    return {"size": info.st_size, "sent": sent}


def _write(where: Surroundings, arguments: Message, stream: int) -> Message:
    path, mode = arguments["path"], arguments.get("mode")
    location = where.locate(path)
    standing: os.stat_result | None = None
    if arguments.get("replace"):
        folder, name = os.path.split(location)
        if not name:
            raise Refused(errno.EISDIR, path, f"{path!r} names a folder; give the name of a file")
    else:
        location = os.path.realpath(location)
        folder, name = os.path.split(location)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            standing = os.stat(location, follow_symlinks=False)
            _refuse_unless_regular(path, standing)
    os.makedirs(folder, exist_ok=True)
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # In the same folder, so that the rename is atomic; a name of 255 bytes leaves no room for a suffix.
    beside = f".{os.getpid()}.{os.urandom(6).hex()}.partial"
    target = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        size = archives.copy(stream, target, None)
        if standing is not None:
            with contextlib.suppress(PermissionError):
                os.fchown(target, standing.st_uid, standing.st_gid)
        kept = stat.S_IMODE(standing.st_mode) if standing is not None else _DEFAULT_MODE
        os.fchmod(target, kept if mode is None else mode)
        if arguments.get("replace"):
            remove_entry(parent, name, missing_ok=True)
        os.rename(beside, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        os.unlink(beside, dir_fd=parent)
        raise
    return {"size": size}


def _remove(where: Surroundings, arguments: Message, _stream: int) -> Message:
    path = arguments["path"]
    folder, name = os.path.split(where.locate(path).rstrip("/"))
    if name in ("", ".", ".."):
        raise Refused(errno.EINVAL, path, f"{path!r} cannot be removed; name a file or folder below the root")
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    remove_entry(parent, name, missing_ok=False)
    return {}


def _describe(info: os.stat_result, target: str | None) -> dict[str, Any]:
    return {
        "type": _KINDS.get(stat.S_IFMT(info.st_mode), "device"),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "modified": info.st_mtime,
        "target": target,
    }


def _stat(where: Surroundings, arguments: Message, _stream: int) -> Message:
    location = where.locate(arguments["path"])
    info = os.lstat(location)
    return _describe(info, os.readlink(location) if stat.S_ISLNK(info.st_mode) else None)


def _list(where: Surroundings, arguments: Message, _stream: int) -> Message:
    folder = os.open(where.locate(arguments["path"]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    limit = min(arguments.get("limit") or _MAX_ENTRIES, _MAX_ENTRIES)
    names = sorted(os.listdir(folder))
    entries = []
    for name in names[:limit]:
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(info.st_mode) else None
            entries.append({"name": name} | _describe(info, target))
    return {"entries": entries, "truncated": len(names) > limit}


def _tar(where: Surroundings, arguments: Message, stream: int) -> Message:
    location, parts = where.locate(arguments["path"]), arguments.get("parts")
    return archives.pack_parts(location, stream, tuple(parts)) if parts else archives.pack(location, stream)


def _untar(where: Surroundings, arguments: Message, stream: int) -> Message:
    location = where.locate(arguments["path"])
    os.makedirs(location, exist_ok=True)
    return unpacking.unpack(location, stream, arguments.get("ancestors") or "refuse")


def _carry(where: Surroundings, arguments: Message, stream: int) -> Message:
    location = os.path.normpath(where.locate(arguments["path"]))
    # An empty entry is the command's working folder.
    searched, programs = (
        [
            known
            for path in value.split(":")
            for known in (os.path.normpath(where.locate(path)), os.path.realpath(where.locate(path)))
        ]
        for value in (where.environment.get("PYTHONPATH", "."), where.environment.get("PATH", DEFAULT_PATH))
    )
    return carrying.carry(location, stream, searched, programs)


def _snapshot(where: Surroundings, arguments: Message, stream: int) -> Message:
    if where.layer:
        return archives.snapshot(where.layer, stream)
    paths = tuple(where.locate(path) for path in (".", *(arguments.get("paths") or ())))
    return archives.snapshot_folders(where.locate("/"), paths, stream)


def _restore(where: Surroundings, arguments: Message, stream: int) -> Message:
    return unpacking.restore("/" if where.layer else where.locate("/"), stream)


# A layer belongs to its workspace, so its root may read all of it. In `Plain` the files are the machine's.
_WHOLE_LAYER = frozenset({"snapshot", "restore"})
_OPERATIONS: dict[str, Callable[[Surroundings, Message, int], Message]] = {
    "read": _read,
    "write": _write,
    "remove": _remove,
    "stat": _stat,
    "list": _list,
    "tar": _tar,
    "untar": _untar,
    "carry": _carry,
    "snapshot": _snapshot,
    "restore": _restore,
}
