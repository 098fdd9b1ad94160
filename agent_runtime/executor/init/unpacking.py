"""Unpack tars into a workspace: plain ones, and layers with their deletions and owners.

Names in a tar are untrusted, and so is the existing tree. Paths are resolved from the target folder one name at a time,
without following links unless the caller requests it, so nothing is written outside the target.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from typing import IO, Literal

from agent_runtime.executor.init.archives import COPY_BYTES, DELETED, OPAQUE, OWN_NAME, SECOND, attributes_of
from agent_runtime.executor.init.channel import Message
from agent_runtime.executor.init.identity import Refused
from agent_runtime.executor.init.trees import make_writable, open_folder, remove_entry

Ancestors = Literal["refuse", "replace", "follow"]
"""Handling of a link or file in place of a member's folder. `follow` follows links and refuses files."""

_LATEST = (2**63 - 1) * SECOND
_ZEROS = bytes(4096)  # a block of common file systems


def _write_with_holes(target: int, block: bytes) -> None:
    """Write a block at the end of a file, with holes for pages of zeros. A tar has no holes, and a workspace may use less
    disk than the sizes of its files.
    """
    view, start = memoryview(block), 0
    while start < len(block):
        end = start
        while end < len(block) and block.startswith(_ZEROS[: len(block) - end], end):
            end = min(end + len(_ZEROS), len(block))
        if end > start:
            os.lseek(target, end - start, os.SEEK_CUR)
        else:
            hole = block.find(_ZEROS, start)
            # Holes begin at a page: a run of zeros that does not is written up to the next one.
            end = len(block) if hole < 0 else min(len(block), -(-max(hole, 1) // len(_ZEROS)) * len(_ZEROS))
            while start < end:
                start += os.write(target, view[start:end])
        start = end


def time_of(member: tarfile.TarInfo) -> int:
    """Return a member's time in nanoseconds, limited to what the kernel accepts. A tmpfs keeps any of those times."""
    written = member.pax_headers.get("mtime")
    if written is None:
        return max(-_LATEST, min(_LATEST, int(member.mtime) * SECOND))
    # Without Python's decimal, which the executor's bundle leaves out.
    found = re.fullmatch(r"(-?)(\d{1,100})(?:\.(\d+))?", written, re.ASCII)
    if found is None:
        raise Refused(
            errno.EINVAL,
            member.name,
            f"tar member {member.name!r}: the time {written[:60]!r} is not a number of seconds",
        )
    nanoseconds = min(_LATEST, int(found[2]) * SECOND + int((found[3] or "").ljust(9, "0")[:9]))
    return -nanoseconds if found[1] else nanoseconds


def members(file: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, list[str], IO[bytes] | None]]:
    """Yield (member, the parts of its name, its content) of a tar. Raises Refused for names that leave the target."""
    try:
        with tarfile.open(fileobj=file, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]
                yield member, parts_of(member.name), tar.extractfile(member) if member.isreg() else None
        while file.read(COPY_BYTES):
            pass  # read the padding after the end mark, so that the writer does not fail with EPIPE
    except (tarfile.TarError, EOFError, OverflowError, LookupError) as error:
        raise Refused(
            errno.EINVAL, "tar", f"the body is not a tar that can be read: {error}; send an uncompressed tar"
        ) from None


def parts_of(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Refused(
            errno.EINVAL, name, f"tar member {name!r} leaves the target folder; use relative names without '..'"
        )
    return parts


class Folders:
    """Paths, modes and times of folders, in 30 bytes and the name each: a tar may have hundreds of thousands, and the memory
    of a workspace may be small.
    """

    def __init__(self) -> None:
        self._above, self._modes, self._times = array("i"), array("H"), array("q")
        """By folder: the one that contains it, of those added before; -1 for none."""
        self._names, self._ends = bytearray(), array("q")
        """The names relative to it, and where each ends."""
        self._open: list[tuple[list[str], int]] = []
        """The folders that contain the last one, and itself."""

    def add(self, parts: list[str], mode: int, modified: int) -> None:
        while self._open and self._open[-1][0] != parts[: len(self._open[-1][0])]:
            self._open.pop()
        known, above = self._open[-1] if self._open else ([], -1)
        self._above.append(above)
        self._modes.append(mode)
        self._times.append(modified)
        self._names += "/".join(parts[len(known) :]).encode(errors="surrogateescape")
        self._ends.append(len(self._names))
        self._open.append((parts, len(self._above) - 1))

    def last_first(self) -> Iterator[tuple[list[str], int, int]]:
        """Yield (parts, mode, time)."""
        for number in reversed(range(len(self._above))):
            names, folder = list[str](), number
            while folder >= 0:
                name = self._names[self._ends[folder - 1] if folder else 0 : self._ends[folder]]
                names = [*filter(None, name.decode(errors="surrogateescape").split("/")), *names]
                folder = self._above[folder]
            yield names, self._modes[number], self._times[number]


class Target:
    """The folder into which a tar is unpacked."""

    def __init__(self, location: str, *, owners: bool = False, ancestors: Ancestors = "refuse") -> None:
        self.root = os.open(location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._owners, self._ancestors = owners, ancestors
        self._folders = Folders()
        self._last: tuple[list[str], int] = [], os.dup(self.root)
        """The last opened folder and its descriptor: the next member is usually in it or below it."""

    def parent(self, parts: list[str], *, is_made: bool = True) -> int:
        """Return a descriptor of the folder that contains `parts`; with `is_made`, create missing folders."""
        above, (opened, descriptor) = parts[:-1], self._last
        is_below = above[: len(opened)] == opened
        if above == opened[:-1] != opened and self._ancestors != "follow":
            here, opened, is_below = open_folder(descriptor, ".."), above, True
        else:
            here = os.dup(descriptor if is_below else self.root)
        for part in above[len(opened) if is_below else 0 :]:
            try:
                below = self._below(here, part) if is_made else open_folder(here, part)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                name = "/".join(parts)
                raise Refused(
                    errno.ELOOP, name, f"tar member {name!r}: {part!r} in its path is a link or not a folder"
                ) from None
            finally:
                os.close(here)
            here = below
        self._remember(above, here)
        return here

    def _remember(self, parts: list[str], folder: int) -> None:
        os.close(self._last[1])
        self._last = parts, os.dup(folder)

    def _below(self, here: int, part: str) -> int:
        try:
            if self._ancestors == "follow":
                # Not opened for reading, so that folders with only the search permission work.
                return os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
            if self._ancestors == "replace":
                standing = os.stat(part, dir_fd=here, follow_symlinks=False).st_mode
                if stat.S_ISDIR(standing):
                    make_writable(here, part, standing)
            return open_folder(here, part)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR) or self._ancestors != "replace":
                raise
            remove_entry(here, part, missing_ok=True)
        os.mkdir(part, 0o755, dir_fd=here)
        return open_folder(here, part)

    def put(self, member: tarfile.TarInfo, parts: list[str], content: IO[bytes] | None) -> None:
        """Write one member. An existing entry is removed first, except a folder that a folder replaces."""
        if not parts:
            if self._owners and member.isdir():
                self._folders.add(parts, member.mode & 0o7777, time_of(member))
                self._own(self.root, ".", member)
            return
        parent, name = self.parent(parts), parts[-1]
        try:
            self._put(parent, name, member, content, parts)
        finally:
            os.close(parent)

    def _put(
        self, parent: int, name: str, member: tarfile.TarInfo, content: IO[bytes] | None, parts: list[str]
    ) -> None:
        mode = member.mode & 0o7777
        if member.isdir():
            try:
                standing = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            except FileNotFoundError:
                standing = 0
            if not stat.S_ISDIR(standing):
                remove_entry(parent, name, missing_ok=True)
                os.mkdir(name, dir_fd=parent)
            else:
                make_writable(parent, name, standing)
            # Modes and times of folders come last: both would block or change while entries are added.
            self._folders.add(parts, mode, time_of(member))
            self._own(parent, name, member)
            self._set_attributes(f"/proc/self/fd/{parent}/{name}", member)
            return
        if member.islnk():
            self._link(parent, name, member)
            return
        remove_entry(parent, name, missing_ok=True)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            self._own(parent, name, member)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
            self._own(parent, name, member)
            os.chmod(name, mode, dir_fd=parent)
        elif content is not None:
            self._file(parent, name, member, content)
            return
        else:
            raise Refused(
                errno.EINVAL,
                member.name,
                f"tar member {member.name!r}: only files, folders, links and FIFOs can be unpacked",
            )
        os.utime(name, ns=(time_of(member),) * 2, dir_fd=parent, follow_symlinks=False)

    def _file(self, parent: int, name: str, member: tarfile.TarInfo, content: IO[bytes]) -> None:
        target = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        try:
            while block := content.read(COPY_BYTES):
                _write_with_holes(target, block)
            os.ftruncate(target, os.lseek(target, 0, os.SEEK_CUR))
            self._own(parent, name, member)
            os.fchmod(target, member.mode & 0o7777)
            # After the owner, because changing it removes capabilities.
            self._set_attributes(target, member)
            if self._ancestors == "refuse":
                os.utime(target, ns=(time_of(member),) * 2)
        finally:
            os.close(target)

    def _link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        source_parts = parts_of(member.linkname)
        if not source_parts:
            raise Refused(errno.EINVAL, member.name, f"tar member {member.name!r} is a hard link to the target folder")
        source = self.parent(source_parts)
        try:
            beside = f".{os.getpid()}.{os.urandom(6).hex()}.link"
            os.link(source_parts[-1], beside, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            remove_entry(parent, name, missing_ok=True)
            os.rename(beside, name, src_dir_fd=parent, dst_dir_fd=parent)
        finally:
            os.close(source)
            self._remember([], self.root)  # this entry may have replaced the remembered folder

    def _own(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        if not self._owners:
            return
        standing = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if (standing.st_uid, standing.st_gid) == (member.uid, member.gid):
            return  # a user without the right to change owners keeps its own file
        try:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        except PermissionError:
            raise Refused(
                errno.EPERM,
                member.name,
                f"{member.name!r} belongs to {member.uid}:{member.gid}, and uid {os.geteuid()} of this workspace may "
                "not give it to them; restore it where commands run as root, or as that user",
            ) from None

    def _set_attributes(self, place: int | str, member: tarfile.TarInfo) -> None:
        """Set the extended attributes of a layer's file or folder; those that the file system refuses are left out."""
        if not self._owners:
            return
        for name, value in attributes_of(member).items():
            with contextlib.suppress(OSError):
                os.setxattr(place, name, value, follow_symlinks=isinstance(place, int))

    def set_time(self, parts: list[str], modified: int) -> None:
        """Set the time of a file that was written, unless it was removed or replaced since."""
        with contextlib.suppress(OSError, Refused):
            parent = self.parent(parts, is_made=False)
            try:
                if stat.S_ISREG(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                    os.utime(parts[-1], ns=(modified, modified), dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(parent)

    def finish(self) -> None:
        """Set modes and times of folders, deepest first."""
        self._remember([], self.root)  # unpacked entries may have been removed since
        for parts, mode, modified in self._folders.last_first():
            try:
                parent = self.parent(parts, is_made=False) if parts else os.dup(self.root)
                try:
                    folder = open_folder(parent, parts[-1] if parts else ".")
                finally:
                    os.close(parent)
            except (OSError, Refused):
                continue  # a later member replaced it
            try:
                if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
                    os.fchmod(folder, mode)
                os.utime(folder, ns=(modified, modified))
            except PermissionError:
                if os.fstat(folder).st_uid == os.geteuid():
                    raise
                # A folder of another user, such as /tmp: users who may write into it cannot set its times.
            finally:
                os.close(folder)


def unpack(location: str, stream: int, ancestors: Ancestors) -> Message:
    """Unpack a tar below `location`, owned by this process's user. Existing entries are replaced."""
    return _unpack(Target(location, ancestors=ancestors), stream, of_layer=False)


_MOUNTED = ("dev", "proc", "sys")
"""Top-level folders of images that are mounts of the kernel in a workspace."""
_VOLUMES = ".volumes"
"""Folder of volumes in a workspace that others may join (overlay/view.py), which covers it by an empty one."""


def restore(location: str, stream: int) -> Message:
    """Apply a layer's tar below `location`, deletions and owners included, except in mounts of the kernel and over the
    volumes of a workspace that others may join.
    """
    left_out = (*_MOUNTED, *([_VOLUMES] if os.path.ismount(f"/{_VOLUMES}") else [])) if location == "/" else ()
    return _unpack(Target(location, owners=True), stream, of_layer=True, left_out=left_out)


def _unpack(target: Target, stream: int, *, of_layer: bool, left_out: Sequence[str] = ()) -> Message:
    entries = 0
    with open(stream, "rb", closefd=False) as file:
        for member, parts, content in members(file):
            if parts and parts[0] in left_out:
                continue
            entries += 1
            if of_layer and parts and parts[-1].startswith(DELETED) and OWN_NAME not in member.pax_headers:
                folder = target.parent(parts)
                # Our snapshots put OPAQUE before the folder's other entries, so all existing entries are the lower
                # layer's.
                for name in os.listdir(folder) if parts[-1] == OPAQUE else [parts[-1].removeprefix(DELETED)]:
                    remove_entry(folder, name, missing_ok=True)
                os.close(folder)
            else:
                target.put(member, parts, content)
    target.finish()
    return {"entries": entries}
