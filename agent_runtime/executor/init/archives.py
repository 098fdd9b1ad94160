"""Pack files of a workspace, or its overlay layer, as tars; `unpacking.py` unpacks them.

A layer's tar uses the markers of OCI image layers: `.wh.NAME` means that NAME of the lower layer is deleted,
`.wh..wh..opq` that a folder hides the lower layer's entries. A real file with such a name has our PAX header
`ROLLOUT.ownName`. PAX headers keep times to the nanosecond.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterator

from agent_runtime.executor.init.channel import Message
from agent_runtime.executor.init.identity import Refused
from agent_runtime.executor.init.trees import NO_WAIT, make_writable, open_folder

COPY_BYTES = 1024 * 1024
DELETED = ".wh."
OPAQUE = ".wh..wh..opq"
OPAQUE_XATTR = "user.overlay.opaque"
OWN_NAME = "ROLLOUT.ownName"
# Extended attributes, as GNU tar and container tools write them.
ATTRIBUTE = "SCHILY.xattr."
SECOND = 1_000_000_000  # in nanoseconds
# The kernel's limit for a path. Each entry of a tar has its whole path, so without a limit thousands of nested folders
# would make a tar of gigabytes.
PATH_BYTES = 4096


def copy(source: int, target: int, limit: int | None) -> int:
    """Copy up to `limit` bytes (None: to the end) between descriptors; return their number."""
    copied = 0
    while limit is None or copied < limit:
        block = os.read(source, COPY_BYTES if limit is None else min(COPY_BYTES, limit - copied))
        if not block:
            break
        copied += len(block)
        view = memoryview(block)
        while view:
            view = view[os.write(target, view) :]
    return copied


def _set_time(member: tarfile.TarInfo, nanoseconds: int) -> None:
    """Set the time of a member. tarfile writes fractional times as floats, which cannot hold nanoseconds."""
    seconds, rest = divmod(abs(nanoseconds), SECOND)
    if rest:
        sign = "-" if nanoseconds < 0 else ""
        member.pax_headers = {**member.pax_headers, "mtime": f"{sign}{seconds}.{rest:09}"}
    else:
        member.mtime = nanoseconds // SECOND


def is_kept(attribute: str) -> bool:
    """Whether archives contain the extended attribute: those of users, and capabilities of programs.

    overlayfs keeps its own records in `user.overlay.`. The name is part of a tar's header, which has the form NAME=VALUE and
    is UTF-8.
    """
    is_users = attribute.startswith("user.") and not attribute.startswith("user.overlay.")
    fits = "=" not in attribute and attribute == attribute.encode(errors="ignore").decode()
    return (is_users and fits) or attribute == "security.capability"


def attributes_of(member: tarfile.TarInfo) -> dict[str, bytes]:
    """Return the extended attributes of a tar's member that archives contain, by name."""
    names = {header: header.removeprefix(ATTRIBUTE) for header in member.pax_headers if header.startswith(ATTRIBUTE)}
    return {name: os.fsencode(member.pax_headers[header]) for header, name in names.items() if is_kept(name)}


def _add_attributes(member: tarfile.TarInfo, place: int | str) -> None:
    """Add the extended attributes of a file or folder. Some file systems have none."""
    with contextlib.suppress(OSError):
        if kept := [name for name in os.listxattr(place, follow_symlinks=isinstance(place, int)) if is_kept(name)]:
            values = {f"{ATTRIBUTE}{name}": os.fsdecode(_attribute(place, name)) for name in kept}
            member.pax_headers = {**member.pax_headers, **values}


def _attribute(place: int | str, name: str) -> bytes:
    return os.getxattr(place, name, follow_symlinks=isinstance(place, int))


class _Exactly:
    """A file's bytes, exactly as many as its header says, even if the file changes meanwhile.

    Files of /proc and /sys yield fewer bytes or fail to be read. They use no disk blocks, so that is not a disk error.
    """

    def __init__(self, descriptor: int, info: os.stat_result) -> None:
        self._descriptor, self._left, self._is_on_disk = descriptor, info.st_size, info.st_blocks > 0

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        block = bytearray()
        while len(block) < wanted and (piece := self._piece(wanted - len(block))):
            block += piece
        self._left -= wanted
        return bytes(block.ljust(wanted, b"\0"))

    def _piece(self, size: int) -> bytes:
        try:
            return os.read(self._descriptor, size)
        except OSError:
            if self._is_on_disk:
                raise
            return b""


class _Writer:
    """Writes a tar to a stream, keeping hard links."""

    def __init__(self, stream: int) -> None:
        self._file = open(stream, "wb", buffering=0, closefd=False)  # noqa: SIM115 (both live as long as the writer)
        self._tar = tarfile.open(  # noqa: SIM115
            fileobj=self._file, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        )
        self._first_names: dict[tuple[int, int], str] = {}
        self.entries = 0

    def begin_part(self) -> None:
        """Stop linking to earlier entries, so that each part can be unpacked separately."""
        self._first_names.clear()

    def close(self) -> Message:
        self._tar.close()
        return {"entries": self.entries}

    def add(self, folder: int, name: str, stored: str, info: os.stat_result) -> None:
        """Store the entry `name` of `folder` as `stored`. Sockets and devices are left out."""
        member = tarfile.TarInfo(stored)
        if name.startswith(DELETED):
            member.pax_headers = {OWN_NAME: "1"}
        member.mode, member.uid, member.gid = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
        _set_time(member, info.st_mtime_ns)
        if stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(info.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
        elif stat.S_ISFIFO(info.st_mode):
            member.type = tarfile.FIFOTYPE
        elif not stat.S_ISREG(info.st_mode):
            return
        if not stat.S_ISDIR(info.st_mode) and info.st_nlink > 1:
            first = self._first_names.setdefault((info.st_dev, info.st_ino), stored)
            if first != stored:
                member.type, member.linkname = tarfile.LNKTYPE, first
        if member.type == tarfile.REGTYPE:
            is_closed = _is_closed(info, stat.S_IRUSR)
            if is_closed:
                make_writable(folder, name)
            content = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | NO_WAIT, dir_fd=folder)
            try:
                if is_closed:
                    os.fchmod(content, member.mode)
                now = os.fstat(content)
                if not stat.S_ISREG(now.st_mode):
                    return
                member.size = now.st_size
                _add_attributes(member, content)
                self._store(member, _Exactly(content, now))
            finally:
                os.close(content)
        else:
            if member.type == tarfile.DIRTYPE:
                _add_attributes(member, f"/proc/self/fd/{folder}/{name}")
            self._store(member)

    def mark(self, stored: str) -> None:
        """Store an empty file that marks a deletion or an opaque folder."""
        self._store(tarfile.TarInfo(stored))

    def _store(self, member: tarfile.TarInfo, content: _Exactly | None = None) -> None:
        self._tar.addfile(member, content)
        # tarfile remembers every member, for indexing that a stream never needs.
        self._tar.members = []  # type: ignore[attr-defined]
        self.entries += 1


def _is_closed(info: os.stat_result, rights: int) -> bool:
    """Whether this process's user owns the entry but lacks these permissions. Root needs none."""
    return info.st_mode & rights != rights and info.st_uid == os.geteuid() != 0


def walk(
    folder: int, prefix: str, *, enters: Callable[[str], bool] | None = None
) -> Iterator[tuple[int, str, str, os.stat_result]]:
    """Yield (parent descriptor, name, name below `prefix`, lstat) of all entries below `folder`, parents first, names
    sorted.

    A folder that this process's user owns but may not read is made readable. `enters` decides, for each folder after it
    was yielded, whether to walk it; with `enters`, folders that this process may not read are skipped. Raises Refused
    for a path of `PATH_BYTES` or more, and when folders are nested deeper than the limit of open files.
    """
    levels = [(folder, prefix, iter(sorted(os.listdir(folder))))]
    try:
        while levels:
            parent, path, names = levels[-1]
            name = next(names, None)
            if name is None:
                levels.pop()
                if parent != folder:
                    os.close(parent)
                continue
            stored = f"{path}{name}"
            if len(os.fsencode(stored)) >= PATH_BYTES:
                problem = f"a path of {PATH_BYTES} bytes or more cannot be put in a tar"
                raise Refused(errno.ENAMETOOLONG, stored[:200], problem)
            try:
                info = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode) and _is_closed(info, stat.S_IRUSR | stat.S_IXUSR):
                    make_writable(parent, name)
                yield parent, name, stored, info
                if stat.S_ISDIR(info.st_mode) and (enters is None or enters(stored)):
                    inner = open_folder(parent, name)
                    levels.append((inner, f"{stored}/", iter(sorted(os.listdir(inner)))))
            except FileNotFoundError:
                continue
            except OSError as error:
                if enters is not None and error.errno == errno.EACCES:
                    continue
                if error.errno != errno.EMFILE:
                    raise
                raise Refused(
                    errno.ENAMETOOLONG, stored[:200], f"folders nested {len(levels)} deep cannot be put in a tar"
                ) from None
    finally:
        for parent, _, _ in levels:
            if parent != folder:
                os.close(parent)


def pack(location: str, stream: int) -> Message:
    """Write the file or folder at `location` as a tar with relative names; a single file has its own name."""
    writer = _Writer(stream)
    info = os.stat(location)
    if not stat.S_ISDIR(info.st_mode):
        parent = os.open(os.path.dirname(location), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        writer.add(parent, os.path.basename(location), os.path.basename(location), os.lstat(location))
        return writer.close()
    _add_below(writer, os.open(location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), "", of_layer=False)
    return writer.close()


def pack_parts(location: str, stream: int, parts: tuple[str, ...]) -> Message:
    """Write the files and folders at these paths below `location` as a tar, with names relative to `location`.

    A part that is a link is stored as its target; a missing part adds nothing. Files and folders that this process may
    not read are left out.
    """
    writer = _Writer(stream)
    os.stat(location)
    for part in map(os.path.normpath, parts):
        place = os.path.realpath(os.path.join(location, part))
        prefix = "" if part == "." else f"{part}/"
        writer.begin_part()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            parent = os.open(os.path.dirname(place), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            info = os.lstat(place)
            if prefix:
                writer.add(parent, os.path.basename(place), part, info)
            if not stat.S_ISDIR(info.st_mode):
                continue
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for above, name, stored, entry in walk(folder, prefix, enters=lambda _: True):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    writer.add(above, name, stored, entry)
    return writer.close()


def snapshot(parts: tuple[tuple[str, int], ...], stream: int) -> Message:
    """Write a layer as a tar. `parts` are its upper folders, each with its workspace path (`""` or `usr/`, …) and a
    descriptor.
    """
    writer = _Writer(stream)
    for prefix, upper in parts:
        folder = os.dup(upper)
        writer.add(folder, ".", prefix.rstrip("/") or ".", os.fstat(folder))
        _add_below(writer, folder, prefix, of_layer=True)
    return writer.close()


def snapshot_folders(root: str, paths: tuple[str, ...], stream: int) -> Message:
    """Write whole folders as a layer's tar, with names relative to `root`. Each hides the folder at its path in lower
    layers.

    `paths` are absolute, below `root`; one that does not exist, or is inside another one, adds nothing.
    """
    writer = _Writer(stream)
    done: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}):
        stored = os.path.relpath(path, root)
        if any(path.startswith(f"{above}/") for above in done) or not os.path.isdir(path):
            continue
        done.append(path)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        writer.add(folder, ".", stored, os.fstat(folder))
        prefix = "" if stored == "." else f"{stored}/"
        writer.mark(f"{prefix}{OPAQUE}")
        _add_below(writer, folder, prefix, of_layer=False)
    return writer.close()


def _add_below(writer: _Writer, folder: int, prefix: str, *, of_layer: bool) -> None:
    """Add everything below a folder; for an overlay layer also its deletion markers."""
    for parent, name, stored, info in walk(folder, prefix):
        if of_layer and stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            writer.mark(f"{stored[: len(stored) - len(name)]}{DELETED}{name}")
            continue
        with contextlib.suppress(FileNotFoundError):
            writer.add(parent, name, stored, info)
            if of_layer and stat.S_ISDIR(info.st_mode) and _is_opaque(parent, name):
                writer.mark(f"{stored}/{OPAQUE}")


def _is_opaque(parent: int, name: str) -> bool:
    folder = open_folder(parent, name)
    try:
        return os.getxattr(folder, OPAQUE_XATTR) == b"y"
    except OSError:
        return False
    finally:
        os.close(folder)
