"""File operations inside a workspace. Each runs in a child of init, with the rights of the workspace's default user.

With an `owner`, in `Overlay`, an operation has the rights of the workspace's root, and new files belong to that user.
So a verifier can be prepared in folders where neither the agent's user nor its own may write.

Tools control the folder tree, so it may have anything: FIFOs, links to anywhere, names that are not UTF-8, trees deeper
than the longest path. Files are opened with O_NONBLOCK and must be regular, because opening a FIFO to read would block.
Paths are resolved as for the tools themselves, so an operation reaches no more than they do.
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
from agent_runtime.executor.init.commands import DEFAULT_PATH, WorkspaceSettings
from agent_runtime.executor.init.identity import Accounts, Refused, become
from agent_runtime.executor.init.trees import NO_WAIT, remove_entry

# `list` answers in one message. With this limit it stays below MAX_MESSAGE_BYTES, even with the longest names.
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


def run(
    channel: Channel, number: int, request: Message, descriptors: list[int], workspace: WorkspaceSettings
) -> NoReturn:
    """Run the operation of `request`, answer as request `number`, and exit."""
    arguments = request["arguments"]
    path = arguments.get("path", "/")
    stream = descriptors[0] if descriptors else -1
    try:
        if descriptors:
            os.set_blocking(stream, True)
        workspace.apply_limits()
        os.umask(0o022)
        if not (workspace.layer and request["operation"] in _WHOLE_LAYER):
            accounts = Accounts((os.geteuid(), os.getegid()))
            # Carry with root's rights: in the grading's image, another user may own folders that the agent could write
            # to.
            owner = "" if request["operation"] == "carry" else arguments.get("owner")
            # In `Plain`, the workspace's root would be the machine's root.
            if owner is None or not workspace.isolated:
                become(accounts.look_up(workspace.user))
            else:
                become(accounts.look_up(owner or workspace.user), keep_capabilities=True)
        reply = _OPERATIONS[request["operation"]](workspace, arguments, stream)
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


def _read(workspace: WorkspaceSettings, arguments: Message, stream: int) -> Message:
    path, offset, limit = arguments["path"], arguments.get("offset") or 0, arguments.get("limit")
    location = workspace.locate(path)
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


def _write(workspace: WorkspaceSettings, arguments: Message, stream: int) -> Message:
    path, mode = arguments["path"], arguments.get("mode")
    location = workspace.locate(path)
    existing: os.stat_result | None = None
    if arguments.get("replace"):
        folder, name = os.path.split(location)
        if not name:
            raise Refused(errno.EISDIR, path, f"{path!r} names a folder; give the name of a file")
    else:
        location = os.path.realpath(location)
        folder, name = os.path.split(location)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            existing = os.stat(location, follow_symlinks=False)
            _refuse_unless_regular(path, existing)
    os.makedirs(folder, exist_ok=True)
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # In the same folder, so that the rename is atomic. Not the name with a suffix: it may already have 255 bytes.
    temporary = f".{os.getpid()}.{os.urandom(6).hex()}.partial"
    target = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
    )
    try:
        try:
            size = archives.copy(stream, target, None)
            if existing is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(target, existing.st_uid, existing.st_gid)
            kept = stat.S_IMODE(existing.st_mode) if existing is not None else _DEFAULT_MODE
            os.fchmod(target, kept if mode is None else mode)
        finally:
            # Before the reply: the kernel executes no file that is open for writing.
            os.close(target)
        if arguments.get("replace"):
            remove_entry(parent, name, missing_ok=True)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        os.unlink(temporary, dir_fd=parent)
        raise
    return {"size": size}


def _remove(workspace: WorkspaceSettings, arguments: Message, _stream: int) -> Message:
    path = arguments["path"]
    folder, name = os.path.split(workspace.locate(path).rstrip("/"))
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


def _stat(workspace: WorkspaceSettings, arguments: Message, _stream: int) -> Message:
    location = workspace.locate(arguments["path"])
    info = os.lstat(location)
    return _describe(info, os.readlink(location) if stat.S_ISLNK(info.st_mode) else None)


def _list(workspace: WorkspaceSettings, arguments: Message, _stream: int) -> Message:
    folder = os.open(workspace.locate(arguments["path"]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    limit = min(arguments.get("limit") or _MAX_ENTRIES, _MAX_ENTRIES)
    names = sorted(os.listdir(folder))
    entries = []
    for name in names[:limit]:
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(info.st_mode) else None
            entries.append({"name": name} | _describe(info, target))
    return {"entries": entries, "truncated": len(names) > limit}


def _tar(workspace: WorkspaceSettings, arguments: Message, stream: int) -> Message:
    location, parts = workspace.locate(arguments["path"]), arguments.get("parts")
    return archives.pack_parts(location, stream, tuple(parts)) if parts else archives.pack(location, stream)


def _untar(workspace: WorkspaceSettings, arguments: Message, stream: int) -> Message:
    location = workspace.locate(arguments["path"])
    os.makedirs(location, exist_ok=True)
    return unpacking.unpack(location, stream, arguments.get("ancestors") or "refuse")


def _carry(workspace: WorkspaceSettings, arguments: Message, stream: int) -> Message:
    location = os.path.normpath(workspace.locate(arguments["path"]))
    # An empty entry means the command's working folder.
    searched, programs = (
        [
            known
            for path in value.split(":")
            for known in (os.path.normpath(workspace.locate(path)), os.path.realpath(workspace.locate(path)))
        ]
        for value in (workspace.environment.get("PYTHONPATH", "."), workspace.environment.get("PATH", DEFAULT_PATH))
    )
    return carrying.carry(location, stream, searched, programs)


def _snapshot(workspace: WorkspaceSettings, arguments: Message, stream: int) -> Message:
    if workspace.layer:
        return archives.snapshot(workspace.layer, stream)
    paths = tuple(workspace.locate(path) for path in (".", *(arguments.get("paths") or ())))
    return archives.snapshot_folders(workspace.locate("/"), paths, stream)


def _restore(workspace: WorkspaceSettings, arguments: Message, stream: int) -> Message:
    return unpacking.restore("/" if workspace.layer else workspace.locate("/"), stream)


# A layer belongs to its workspace, so its root may read all of it. In `Plain` the files are the machine's.
_WHOLE_LAYER = frozenset({"snapshot", "restore"})
_OPERATIONS: dict[str, Callable[[WorkspaceSettings, Message, int], Message]] = {
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
