"""One layer of an image, unpacked into a folder that overlayfs accepts as a lower layer.

A layer's tar marks deletions: `.wh.NAME` deletes NAME, `.wh..wh..opq` everything that lower layers have in a folder
(https://github.com/opencontainers/image-spec/blob/v1.1.0/layer.md). overlayfs uses other markers: a character device
0:0, and the attribute `user.overlay.opaque` (https://docs.kernel.org/filesystems/overlayfs.html, mounted with
`userxattr`).

A tar is untrusted. Names are resolved one part at a time within the folder, and links as a container would resolve
them, so nothing is written outside. Devices are left out: workspaces have their own /dev, and must not reach the
machine's. No other process writes to the folder meanwhile, so a check cannot be outdated.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from agent_runtime.executor.init.archives import COPY_BYTES, DELETED, OPAQUE, OPAQUE_XATTR, attributes_of
from agent_runtime.sandboxes.images.files import ImageError

# The number of links that Linux follows.
_MOST_LINKS = 40


class _Refused(Exception):
    """An invalid member of the tar."""


def unpack_layer(
    tar: IO[bytes], folder: Path, below: Sequence[Path], *, owners: bool, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Unpack an uncompressed tar into `folder`, which must exist and be empty. Raises ImageError, OSError.

    `below` are the unpacked layers under it, the topmost first: a folder that the tar does not describe gets owner and
    mode from them. Without `owners` everything belongs to this process's user, which is all that is possible without
    root. `stopped` is called before each member.
    """
    target = _Target(folder, below, owners=owners)
    try:
        with tarfile.open(
            fileobj=tar, mode="r|", bufsize=COPY_BYTES, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (member := archive.next()) is not None:
                if stopped():
                    raise ImageError("unpacking was stopped")
                # tarfile remembers every member, for an index that a stream never needs.
                archive.members = []  # type: ignore[attr-defined]
                try:
                    target.put(member, archive)
                except _Refused as refused:
                    raise ImageError(f"{member.name!r} {refused}; rebuild the image with a container tool") from None
                except OSError as error:
                    raise ImageError(f"{member.name!r} cannot be written to {folder}: {error.strerror}") from error
    except tarfile.TarError as error:
        raise ImageError(f"its tar cannot be read: {error}") from error
    target.finish()


class _Target:
    def __init__(self, root: Path, below: Sequence[Path], *, owners: bool) -> None:
        self._root, self._below, self._owners = str(root), [str(folder) for folder in below], owners
        # Modes and times of folders come last: both would change, or block, while entries are added.
        self._folders: dict[str, tuple[int, float]] = {}

    def put(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        parts = _parts(member.name)
        if not parts:
            if member.isdir():
                self._describe(self._root, member)
            return
        parent, name = self._folder(parts[:-1]), parts[-1]
        if name == OPAQUE:
            os.setxattr(parent, OPAQUE_XATTR, b"y")
        elif name.startswith(DELETED):
            self._delete(parent, name.removeprefix(DELETED))
        else:
            self._write(f"{parent}/{name}", member, archive)

    def finish(self) -> None:
        for path in sorted(self._folders, key=lambda path: path.count("/"), reverse=True):
            mode, modified = self._folders[path]
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (modified, modified), follow_symlinks=False)
                os.chmod(path, mode)

    def _delete(self, parent: str, name: str) -> None:
        if name in ("", ".", ".."):
            raise _Refused("is a deletion marker without a name")
        path = f"{parent}/{name}"
        kind = _kind(path)
        if kind is None:
            os.mknod(path, stat.S_IFCHR, 0)
        elif kind == stat.S_IFDIR:
            # Deleted below, and created again in this layer, in either order of the tar.
            os.setxattr(path, OPAQUE_XATTR, b"y")

    def _write(self, path: str, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        if member.isdir():
            if _kind(path) != stat.S_IFDIR:
                self._new_folder(path)
            self._describe(path, member)
            return
        if member.ischr() or member.isblk():
            return
        if member.islnk():
            self._link(path, member)
            return
        self._remove(path)
        if member.issym():
            os.symlink(member.linkname, path)
        elif member.isfifo():
            os.mkfifo(path, 0o600)
        elif member.isreg():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                content = archive.extractfile(member)
                assert content is not None  # a regular file always has content
                shutil.copyfileobj(content, file, COPY_BYTES)
        else:
            raise _Refused(f"is of type {member.type!r}, which is not a file, folder, link or FIFO")
        self._describe(path, member)

    def _link(self, path: str, member: tarfile.TarInfo) -> None:
        parts = _parts(member.linkname)
        if not parts:
            raise _Refused(f"is a hard link to {member.linkname!r}")
        source = f"{self._folder(parts[:-1])}/{parts[-1]}"
        if source == path:
            return
        kind = _kind(source)
        if kind is None:
            self._copy_up(source, parts)
        elif kind in (stat.S_IFDIR, stat.S_IFCHR):
            raise _Refused(f"is a hard link to {member.linkname!r}, which is not a file")
        self._remove(path)
        os.link(source, path, follow_symlinks=False)

    def _copy_up(self, path: str, parts: Sequence[str]) -> None:
        """Copy a lower layer's file to which this layer links without repeating it: overlayfs needs both names in one
        layer.
        """
        found = self._find_below(parts)
        if found is None or _kind(found) != stat.S_IFREG:
            raise _Refused(f"is a hard link to {'/'.join(parts)!r}, which no layer has")
        shutil.copy2(found, path, follow_symlinks=False)
        if self._owners:
            info = os.lstat(found)
            os.chown(path, info.st_uid, info.st_gid)
            os.chmod(path, stat.S_IMODE(info.st_mode))

    def _describe(self, path: str, member: tarfile.TarInfo) -> None:
        """Set owner, attributes, mode and time, in an order in which none resets another."""
        if self._owners:
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        for name, value in attributes_of(member).items():
            # Links and some file systems do not support them, and without root a process may not set capabilities.
            with contextlib.suppress(OSError):
                os.setxattr(path, name, value, follow_symlinks=False)
        mode = member.mode & 0o7777
        if member.isdir():
            self._folders[path] = mode, member.mtime
            return
        if not member.issym():
            os.chmod(path, mode)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _folder(self, parts: Sequence[str]) -> str:
        """Return the folder at `parts` inside the layer, created if missing."""
        here, left, links = "", list(reversed(parts)), 0
        while left:
            part = left.pop()
            if part == "..":
                here = here.rpartition("/")[0]
                continue
            path = f"{self._root}{here}/{part}"
            kind = _kind(path)
            if kind == stat.S_IFLNK:
                links += 1
                if links > _MOST_LINKS:
                    raise _Refused("is behind a loop of links")
                leads_to = os.readlink(path)
                here = "" if leads_to.startswith("/") else here
                left += [name for name in reversed(leads_to.split("/")) if name not in ("", ".")]
                continue
            if kind != stat.S_IFDIR:
                if kind not in (None, stat.S_IFCHR):
                    raise _Refused(f"is below {here + '/' + part!r}, which is not a folder")
                self._make_folder(path, f"{here}/{part}", was_deleted=kind is not None)
            here = f"{here}/{part}"
        return f"{self._root}{here}"

    def _make_folder(self, path: str, name: str, *, was_deleted: bool) -> None:
        """Create a folder that the tar does not describe, as in the layers below, or 0755 of root."""
        found = None if was_deleted else self._find_below(name.split("/")[1:])
        self._new_folder(path)
        info = os.lstat(found) if found is not None and _kind(found) == stat.S_IFDIR else None
        if info is not None and self._owners:
            os.chown(path, info.st_uid, info.st_gid)
        self._folders[path] = (stat.S_IMODE(info.st_mode), info.st_mtime) if info else (0o755, 0.0)

    def _find_below(self, parts: Sequence[str]) -> str | None:
        """Return the entry of the layers below at a path; None if there is none, or if it is deleted."""
        for layer in self._below:
            path = layer
            for depth, part in enumerate(parts):
                path = f"{path}/{part}"
                kind = _kind(path)
                is_last = depth == len(parts) - 1
                if kind is None:
                    if _is_opaque(os.path.dirname(path)):
                        return None
                    break
                if kind == stat.S_IFCHR or (not is_last and kind != stat.S_IFDIR):
                    return None
                if is_last:
                    return path
        return None

    def _new_folder(self, path: str) -> None:
        """Create an empty folder in place of any entry. One that this layer has deleted hides those of the layers below."""
        was_deleted = _kind(path) == stat.S_IFCHR
        self._remove(path)
        os.mkdir(path, 0o700)
        if was_deleted:
            os.setxattr(path, OPAQUE_XATTR, b"y")

    def _remove(self, path: str) -> None:
        kind = _kind(path)
        if kind == stat.S_IFDIR:
            shutil.rmtree(path)
            for folder in [folder for folder in self._folders if folder == path or folder.startswith(f"{path}/")]:
                del self._folders[folder]
        elif kind is not None:
            os.unlink(path)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise _Refused("leaves the image's root")
    return parts


def _kind(path: str) -> int | None:
    """Return the type of an entry without following links; None if there is none."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return None


def _is_opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, OPAQUE_XATTR) == b"y"
    except OSError:
        return False
