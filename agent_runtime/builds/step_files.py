"""File operations of a build step in its workspace: copies, mounts, and the files that other steps copy from it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import IO, Any

from agent_runtime.builds.trees import MOST_LINKS, Placing, Taken, cleaned, write_copy
from agent_runtime.dockerfiles.instructions import Mount
from agent_runtime.dockerfiles.patterns import has_wildcards, matches
from agent_runtime.dockerfiles.plan import CopyStep, Folder
from agent_runtime.sandboxes.base import FileError, FileStat, Workspace

SPOOL_BYTES = 8 << 20
"""Copied files up to this size stay in memory."""
CHUNK_BYTES = 1 << 20
ROOT = "0:0"
_KERNEL_FOLDERS = ("proc", "sys", "dev")
_SECRETS = "/run/secrets"


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk


class StepFiles:
    """File operations of a step in its workspace."""

    def __init__(self, workspace: Workspace, has_one_user: bool) -> None:
        self.workspace = workspace
        self._has_one_user = has_one_user
        self._count = 0

    def _key(self, what: str) -> str:
        self._count += 1
        return f"2:{what}-{self._count}"

    async def _resolved(self, path: str) -> tuple[str, FileStat | None]:
        """Return a path without links, and its entry; None if it, or a folder above it, does not exist."""
        left, here, links = [part for part in reversed(path.split("/")) if part], "", 0
        entry: FileStat | None = None
        is_missing = False
        while left:
            part = left.pop()
            if part in (".", ".."):
                here = here if part == "." else posixpath.dirname(here).rstrip("/")
                continue
            entry = None if is_missing else await self.workspace.stat(f"{here}/{part}", owner=ROOT)
            if entry is not None and entry.type == "link" and entry.target is not None:
                links += 1
                if links > MOST_LINKS:
                    raise FileError(path, f"{path!r} is behind a loop of links")
                here = "" if entry.target.startswith("/") else here
                left += [name for name in reversed(entry.target.split("/")) if name]
                continue
            is_missing = entry is None
            here = f"{here}/{part}"
        if not here:
            entry = FileStat("/", "folder", 0, 0o755, 0.0)
        return here or "/", entry

    async def make_folders(self, folders: Sequence[Folder], default_user: str | None) -> None:
        for folder in folders:
            path, entry = await self._resolved(folder.path)
            if entry is None:
                owner = await self._owner(folder.user or default_user, "USER ")
                missing = await self._missing(path)
                placing = Placing(path, (0, 0) if self._has_one_user else owner, missing=missing)
                await self._apply(partial(write_copy, taken=(), placing=placing))

    async def _apply(self, write: Callable[[IO[bytes]], None]) -> None:
        with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as spool:
            await asyncio.to_thread(write, spool)
            spool.seek(0)
            await self.workspace.restore(_chunks(spool), key=self._key("files"))

    async def copy(self, step: CopyStep, taken: Sequence[Taken]) -> None:
        if not taken:
            return  # a pattern that matches nothing
        path, entry = await self._resolved(step.destination)
        is_folder = step.destination.endswith("/") or (entry is not None and entry.type == "folder")
        if not is_folder and len(taken) > 1:
            raise FileError(
                step.destination, f"{len(taken)} files cannot be copied to {step.destination!r}; end it with a slash"
            )
        owner = await self._owner(step.owner)
        if self._has_one_user:
            owner = (0, 0)
        is_folder = is_folder or taken[0].is_folder
        missing = await self._missing(path if is_folder else posixpath.dirname(path))
        placing = Placing(
            destination=path,
            is_folder=is_folder or step.keeps_parents,
            owner=owner,
            missing=missing,
            mode=step.mode,
            excludes=step.excludes,
            keeps_parents=step.keeps_parents,
        )
        await self._apply(lambda target: write_copy(target, taken, placing, unpacks=step.unpacks))

    async def _owner(self, written: str | None, option: str = "--chown=") -> tuple[int, int] | None:
        """Return (uid, gid) of `--chown` or USER, looked up in the image's accounts."""
        if written is None:
            return None
        user, _, group = written.partition(":")
        uid, gid = 0, 0
        if user.isdigit():
            uid = gid = int(user)
            primary = await self._account("/etc/passwd", 2, user)
        else:
            primary = await self._account("/etc/passwd", 0, user)
            if user and primary is None:
                raise FileError("/etc/passwd", f"{option}{written}: the image has no user {user!r}")
        if primary is not None:
            uid, gid = int(primary[2]), int(primary[3])
        if group.isdigit():
            gid = int(group)
        elif group:
            found = await self._account("/etc/group", 0, group)
            if found is None:
                raise FileError("/etc/group", f"{option}{written}: the image has no group {group!r}")
            gid = int(found[2])
        return uid, gid

    async def _account(self, path: str, column: int, wanted: str) -> list[str] | None:
        try:
            text = (await self.workspace.read(path, owner=ROOT)).decode(errors="replace")
        except FileError:
            return None
        rows = (line.split(":") for line in text.splitlines())
        return next((row for row in rows if len(row) > 3 and row[column] == wanted), None)

    async def mount(self, mount: Mount, files: Sequence[Taken], secret: bytes | None) -> Callable[[], Any]:
        """Put the content of a mount at its place; return a function that restores what was there before.

        Docker mounts a file system there. Here the entry is replaced while the command runs, and a cache begins empty.
        """
        default = f"{_SECRETS}/{mount.id or posixpath.basename(mount.source or '')}" if mount.type == "secret" else "/"
        path, entry = await self._resolved(mount.target or default)
        if path == "/":
            raise FileError(path, "a mount at the root is not supported; name a folder below it")
        created = await self._missing(path)
        before = None if entry is None else await self._saved(path)
        if entry is not None:
            await self.workspace.remove(path, key=self._key("hide"), owner=ROOT)
        if files:
            exact = Placing(path, (0, 0) if self._has_one_user else None, is_exact=True)
            await self._apply(lambda target: write_copy(target, files, exact))
        else:
            mode = 0o755 if secret is None else 0o400
            mode, owner = mode if mount.mode is None else mount.mode, (mount.uid or 0, mount.gid or 0)
            await self._apply(lambda target: _entry_tar(target, path, secret, mode, owner))

        async def undo() -> None:
            await self.workspace.remove(path, key=self._key("unmount"), owner=ROOT)
            # The command may have written beside the mount.
            for folder in reversed(created[:-1]):
                if not await self._is_empty(folder):
                    break
                await self.workspace.remove(folder, key=self._key("unmount"), owner=ROOT)
            if before is not None:
                with before:
                    await self.workspace.restore(_chunks(before), key=self._key("show"))

        return undo

    async def _is_empty(self, path: str) -> bool:
        """Return whether a path is a folder without entries."""
        entry = await self.workspace.stat(path, owner=ROOT)
        return entry is not None and entry.type == "folder" and not await self.workspace.list(path)

    async def _missing(self, path: str) -> list[str]:
        """Return the path and the folders above it that do not exist, the topmost first."""
        found: list[str] = []
        while path != "/" and await self.workspace.stat(path, owner=ROOT) is None:
            found.insert(0, path)
            path = posixpath.dirname(path)
        return found

    async def _saved(self, path: str) -> IO[bytes]:
        """Return a tar of an entry that `restore` puts back to its place."""
        with contextlib.ExitStack() as stack:
            taken = await self.take(path, stack)
            kept = tempfile.SpooledTemporaryFile[bytes](max_size=SPOOL_BYTES)
            await asyncio.to_thread(write_copy, kept, [taken], Placing(path, is_exact=True))
            kept.seek(0)
            return kept

    async def found(self, pattern: str) -> list[tuple[str, str]]:
        """Return (name, path without links) of what a source of `COPY --from` names in the workspace."""
        path = cleaned(pattern)
        if not has_wildcards(path):
            real, entry = await self._resolved(f"/{path}")
            if entry is None:
                raise FileError(f"/{path}", f"{pattern!r} is not in the stage or image that is copied from")
            return [(f"/{path}", real)]
        paths = [""]
        for part in path.split("/"):
            if not has_wildcards(part):
                paths = [f"{above}/{part}" for above in paths]
                continue
            matched = []
            for above in paths:
                with contextlib.suppress(FileError):
                    matched += [
                        f"{above}/{entry.name}"
                        for entry in await self.workspace.list(above or "/")
                        if matches(part, entry.name)
                    ]
            paths = matched
        existing = [await self._resolved(name) for name in paths]
        return [(name, real) for name, (real, entry) in zip(paths, existing, strict=True) if entry is not None]

    async def take(self, path: str, stack: contextlib.ExitStack, name: str | None = None) -> Taken:
        """Return a file or folder of the workspace, with another name if given; `stack` closes its copy."""
        entry = await self.workspace.stat(path, owner=ROOT) if path != "/" else None
        spool = tempfile.SpooledTemporaryFile[bytes](max_size=SPOOL_BYTES)
        stack.enter_context(spool)
        above, last = posixpath.split(path)
        parts = [last]
        if not last:
            parts = [found.name for found in await self.workspace.list("/") if found.name not in _KERNEL_FOLDERS]
        # As a part of the folder above, so that the tar has the folder itself.
        async for chunk in self.workspace.tar(above, parts=parts):
            spool.write(chunk)

        def again() -> IO[bytes]:
            spool.seek(0)
            return spool

        return Taken((name or path).lstrip("/"), entry is None or entry.type == "folder", again, below=last)


def _entry_tar(target: IO[bytes], path: str, data: bytes | None, mode: int, owner: tuple[int, int]) -> None:
    """Write a tar of a file with this content, or without content of a folder."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(path.lstrip("/"))
        member.mode, member.mtime = mode, int(time.time())
        member.uid, member.gid = owner
        if data is None:
            member.type = tarfile.DIRTYPE
        else:
            member.size = len(data)
        tar.addfile(member, None if data is None else io.BytesIO(data))
