"""The lowest layers of all workspaces of a host. The zygote prepares them once, before the first workspace.

They are in the folder `layers` of the state folder, and visible only in the zygote's mount namespace:

    s0 s1 …      the image's folders as lower layers, one for each part: the root, or it and /usr
    i0 i1 …      instead of those, an image's unpacked layers, the topmost first
    image        the same as one folder, to be looked up in
    nothing      an empty file system, where one of these has to be told apart from the rest
    base/u0 …    the lowest layer of our own: masks, mount points, /etc/hosts and the like
    dev          a read-only /dev, cloned into each workspace
    bind0 …      the binds
    m            where a workspace's root is mounted before it is moved
    N/u0 N/w0 …  one folder for each workspace and spare: upper and work folders of each part
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Sequence
from typing import NamedTuple

from agent_runtime.executor import kernel
from agent_runtime.executor.init.archives import OPAQUE_XATTR
from agent_runtime.executor.init.trees import remove_entry, resolve_below

# These are created from the workspace's own parts.
OWN_FOLDERS = ("/proc", "/sys", "/dev", "/tmp")
_PROGRAMS = "/usr"


class Impossible(Exception):
    """Overlay is unavailable here; the message has the reason."""


def mounts() -> list[tuple[str, str]]:
    """Return (mount point, file system type) of every visible mount, in mount order."""
    with open("/proc/self/mountinfo", "rb") as file:
        rows = [line.split(b" ") for line in file.read().rstrip(b"\n").split(b"\n")]
    return [(_unescaped(row[4]), os.fsdecode(row[row.index(b"-") + 1])) for row in rows]


def _unescaped(point: bytes) -> str:
    """Return a path of mountinfo, in which the kernel writes white space and backslashes as octal numbers."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), point))


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def refuse_overlay_on_overlay(layers: str) -> None:
    point, kind = max(
        ((point, kind) for point, kind in mounts() if is_below(layers, point)), key=lambda row: len(row[0])
    )
    if kind in ("overlay", "fuse.fuse-overlayfs"):
        raise Impossible(
            f"stateDir is on {kind} (mounted at {point}), which cannot hold writable layers; "
            "put it on a separate volume, such as an emptyDir"
        )


def mount_root(
    root: str, namespace: int, layers: str, *, split: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Mount the lower layers; return the workspace paths of the parts, and the names of each part's lower layers."""
    os.mkdir("s0")
    parts = ["/"]
    if not split:
        _mount_lower(root, "s0", namespace)
        if _is_refused("s0", root, layers):
            # `/usr` is its own part: starting a program through the overlay that replaces the root is a third slower.
            programs = root.rstrip("/") + _PROGRAMS
            if _is_plain_folder(programs) and not is_below(layers, programs):
                os.mkdir("s1")
                _mount_lower(programs, "s1", namespace)
                parts.append(_PROGRAMS)
            _separate("s0")
        return tuple(parts), tuple((f"s{index}",) for index in range(len(parts)))
    # In a namespace with fewer rights, submounts are locked to their parents, so only folders without submounts can be
    # lower layers.
    points = [point for point, _ in mounts()]
    for path in _folders_without_mounts(root, points):
        name = f"s{len(parts)}"
        os.mkdir(name)
        try:
            kernel.mount(path, name, flags=kernel.MS_BIND)
        except OSError:
            os.rmdir(name)
            continue
        parts.append(path[len(root.rstrip("/")) :])
        if _is_refused(name, path, layers):
            _separate(name)
    if len(parts) == 1:
        return ("/",), (("s0",),)
    return tuple(parts), ((), *((f"s{index}",) for index in range(1, len(parts))))


def _is_plain_folder(path: str) -> bool:
    """Whether the path is a folder and not a link, without mounts."""
    is_folder = os.path.isdir(path) and not os.path.islink(path)
    return is_folder and not any(is_below(point, path) for point, _ in mounts())


def _mount_lower(source: str, target: str, namespace: int) -> None:
    if namespace < 0:
        kernel.mount(source, target, flags=kernel.MS_BIND)
        return
    try:
        kernel.idmapped_clone(source, target, namespace)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.ENOSYS):
            raise
        kind = max((row for row in mounts() if is_below(source, row[0])), key=lambda row: len(row[0]))[1]
        raise Impossible(
            f"root {source!r} is on {kind}, which this kernel cannot mount with mapped ids ({error.strerror}), "
            "and this process is root of the machine itself; run it in a pod with hostUsers: false"
        ) from None


def mount_image(folders: Sequence[str], namespace: int) -> tuple[str, ...]:
    """Mount an image's layers, and all of them as one at `image`; return the names of the lower layers."""
    names = tuple(f"i{index}" for index in range(len(folders)))
    for folder, name in zip(folders, names, strict=True):
        os.mkdir(name)
        _mount_lower(folder, name, namespace)
    # An overlay needs at least two layers.
    os.mkdir("image")
    os.mkdir("nothing")
    kernel.mount("overlay", "image", "overlay", kernel.MS_RDONLY, f"lowerdir={':'.join((*names, 'nothing'))},userxattr")
    return names


def _is_refused(name: str, folder: str, layers: str) -> bool:
    """Whether overlay would refuse lower layer `name`, which is `folder`, because it contains another layer on the same
    file system. That is the case if stateDir is in a folder of the image.
    """
    return is_below(layers, folder) and os.stat(name).st_dev == os.stat(layers).st_dev


def _separate(name: str) -> None:
    """Mount an overlay of that layer and an empty one, which counts as another file system."""
    os.makedirs("nothing", exist_ok=True)
    kernel.mount("tmpfs", "nothing", "tmpfs", kernel.MS_RDONLY, "size=4k")
    kernel.mount("overlay", name, "overlay", 0, f"lowerdir={name}:nothing,userxattr")


def _folders_without_mounts(folder: str, points: list[str]) -> list[str]:
    found: list[str] = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not stat.S_ISDIR(os.lstat(path).st_mode) or f"/{name}" in OWN_FOLDERS or path in points:
            continue
        if any(is_below(point, path) for point in points):
            with contextlib.suppress(PermissionError):
                found += _folders_without_mounts(path, points)
        else:
            found.append(path)
    return found


HOSTNAME = "workspace"
_ALL_IDS = 4294967295
_IDS = 65536
# On a bare machine workspaces use an otherwise unused range of ids: above those of systemd-nspawn, below systemd's
# "foreign" range. Each executor takes one of 2,048 such ranges.
_FIRST_ID = 2_000_000_000
_RANGES = 2048
# The creator of a user namespace has all capabilities in it. If another user created it, these are needed to kill
# processes, inspect them and set nice values.
_OWNERS_CAPABILITIES = 1 << kernel.CAP_KILL | 1 << kernel.CAP_SYS_PTRACE | 1 << kernel.CAP_SYS_NICE
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ETC = {
    "hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n",
    "hostname": f"{HOSTNAME}\n",
    # No resolver listens there, so a look-up fails immediately instead of after five seconds.
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
}
# In a user namespace, a new /proc or /sys can be mounted only if an existing one is fully visible.
_KEPT_MOUNTS = ("/", "/proc", "/sys")


class BaseLayers(NamedTuple):
    """The lowest layers of all workspaces, and the mapping of ids.

    `parts[i]` is the workspace path of part i, `lower[i]` are its lowest layers, the topmost first. `several_ids`:
    workspaces have users other than root. `own_creators`: another user creates each workspace's user namespace.
    """

    parts: tuple[str, ...]
    lower: tuple[tuple[str, ...], ...]
    uid_map: str
    gid_map: str
    first_id: int
    binds: tuple[str, ...]
    several_ids: bool
    own_creators: bool


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def write(path: str, content: str) -> None:
    """Write to a file in /proc with one call. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)


def write_maps(pid: int, uid_map: str, gid_map: str) -> None:
    """Map the ids of the user namespace of process `pid`."""
    write(f"/proc/{pid}/uid_map", uid_map)
    write(f"/proc/{pid}/gid_map", gid_map)


def identity_map(own: str) -> str:
    """Return the map of a nested user namespace that has all ids of `own` (a /proc/self/uid_map) unchanged."""
    rows = [line.split() for line in own.splitlines() if line.strip()]
    return "".join(f"{first} {first} {count}\n" for first, _, count in rows)


def _user_namespace(uid_map: str) -> int:
    """Return a descriptor of a new user namespace with that map and without processes."""
    ready_read, ready_write = os.pipe()
    hold_read, hold_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hold_write)
            kernel.unshare(kernel.CLONE_NEWUSER, "user")
            os.write(ready_write, b".")
            os.read(hold_read, 1)
        finally:
            os._exit(0)
    try:
        os.close(ready_write)
        os.close(hold_read)
        if not os.read(ready_read, 1):
            raise Impossible(
                "a user namespace cannot be created (user.max_user_namespaces is 0, or a security module refuses)"
            )
        write_maps(pid, uid_map, uid_map)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(hold_write)
        os.waitpid(pid, 0)


def enter_own_user_namespace() -> None:
    """For an executor without rights: become root in a user namespace of one id. Raises Impossible."""
    uid, gid = os.geteuid(), os.getegid()
    # The id maps of a non-dumpable process belong to root, so make it dumpable. Tools cannot see it: it is outside
    # their namespaces.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    try:
        kernel.unshare(kernel.CLONE_NEWUSER, "user")
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            write(f"/proc/self/{name}", content)
    except OSError as error:
        raise Impossible(f"not root, and a user namespace cannot be created: {error}") from None


def prepare(
    layers: str, root: str, root_layers: Sequence[str], masks: Sequence[str], binds: Sequence[Sequence[object]]
) -> BaseLayers:
    """Mount and write the layers described above, in a new mount namespace. Raises Impossible, or OSError with the
    step.

    `root_layers`, the topmost first, form the root, instead of `root`.
    """
    capable = os.geteuid() == 0 and kernel.effective_capabilities() >> kernel.CAP_SYS_ADMIN & 1
    if not capable:
        enter_own_user_namespace()
    own_map = _read("/proc/self/uid_map")
    bare = [int(field) for field in own_map.split()] == [0, 0, _ALL_IDS]
    first_id = _FIRST_ID + os.getpid() % _RANGES * _IDS if bare else 0
    uid_map = f"0 {first_id} {_IDS}\n" if bare else identity_map(own_map)
    gid_map = uid_map if bare else identity_map(_read("/proc/self/gid_map"))
    kernel.unshare(kernel.CLONE_NEWNS, "mount")
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    _empty(layers)
    os.chdir(layers)
    refuse_overlay_on_overlay(layers)
    for name in ("base", "dev", "m"):
        os.mkdir(name)
    namespace = _user_namespace(uid_map) if bare else -1
    parts: tuple[str, ...]
    lower: tuple[tuple[str, ...], ...]
    if root_layers:
        parts, lower = ("/",), (mount_image(root_layers, namespace),)
        root = f"{layers}/image"
    else:
        parts, lower = mount_root(root, namespace, layers, split=not capable)
    base = _Base(parts, root, first_id, chown=bool(capable), shift=first_id if root_layers else 0)
    if not lower[0]:
        base.copy_top()
    for mask in [*OWN_FOLDERS, os.path.dirname(layers), *masks]:
        base.mask(mask)
    base.etc()
    for path, mode in (("/proc", 0o555), ("/sys", 0o555), ("/dev", 0o755), ("/tmp", 0o1777)):
        base.folder(path, mode)
    targets = []
    for index, (source, target, read_only) in enumerate(binds):
        targets.append(base.bind_target(str(target), is_folder=os.path.isdir(str(source))))
        _mount_bind(f"bind{index}", str(source), bool(read_only), namespace)
    _make_dev(first_id)
    if capable:
        _detach_others(layers)
    several_ids = sum(int(line.split()[2]) for line in gid_map.splitlines()) >= _IDS
    own_creators = bare and kernel.effective_capabilities() & _OWNERS_CAPABILITIES == _OWNERS_CAPABILITIES
    return BaseLayers(parts, lower, uid_map, gid_map, first_id, tuple(targets), several_ids, own_creators)


def _empty(layers: str) -> None:
    """Remove the files that a killed executor left, and spread layers over regions of the disk.

    Otherwise all layers share the inodes of one region. There, ext4 without a journal examines every recently freed
    inode for each new file. With many short-lived workspaces, a fork took 1.7 times as long.
    """
    os.makedirs(layers, mode=0o700, exist_ok=True)
    folder = os.open(layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in os.listdir(folder):
        remove_entry(folder, name, missing_ok=True)
    with contextlib.suppress(OSError):  # for file systems without this flag
        kernel.spread_subfolders(folder)
    os.close(folder)


def _mount_bind(name: str, source: str, read_only: bool, namespace: int) -> None:
    if os.path.isdir(source):
        os.mkdir(name)
    else:
        os.close(os.open(name, os.O_CREAT | os.O_CLOEXEC, 0o600))
    if read_only and namespace >= 0:
        # Inside, owners appear as on the machine. Not for writable binds: a tool's root could create setuid-root files
        # there.
        with contextlib.suppress(OSError):
            kernel.idmapped_clone(source, name, namespace)
            return
    try:
        kernel.mount(source, name, flags=kernel.MS_BIND)
        if read_only:
            _remount_read_only(name)
    except OSError as error:
        raise Impossible(f"binds: {source!r} cannot be bound: {error.strerror}") from None


def _remount_read_only(name: str) -> None:
    # Flags of the source are locked in a namespace with fewer rights, and must be repeated.
    flags = os.statvfs(name).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    kernel.mount("none", name, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)


def _make_dev(owner: int) -> None:
    kernel.mount(
        "tmpfs", "dev", "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, f"mode=755,size=64k,uid={owner},gid={owner}"
    )
    for name in ("pts", "shm"):
        os.mkdir(f"dev/{name}", 0o755)
        os.chown(f"dev/{name}", owner, owner)
    for name in _DEVICES:
        os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_CLOEXEC, 0o666))
        kernel.mount(f"/dev/{name}", f"dev/{name}", flags=kernel.MS_BIND)
    for name, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        os.symlink(target, f"dev/{name}")
    _remount_read_only("dev")


def _detach_others(layers: str) -> None:
    """Unmount, in this namespace, the mounts that no workspace needs: each workspace would copy them, and they would
    keep file systems busy.
    """
    for point, _ in reversed(mounts()):
        if point not in _KEPT_MOUNTS and not is_below(layers, point) and not is_below(point, layers):
            with contextlib.suppress(OSError):
                kernel.unmount(point)


class _Base:
    """The layer `base`, which is addressed by workspace paths."""

    def __init__(self, parts: tuple[str, ...], root: str, first_id: int, *, chown: bool, shift: int) -> None:
        # Owners seen in `root` are the image's plus `shift`.
        self._parts, self._root, self._first_id, self._chown, self._shift = parts, root, first_id, chown, shift
        self._masked: list[str] = []
        for index, part in enumerate(parts):
            os.mkdir(f"base/u{index}")
            self._copy_owner(part, f"base/u{index}")

    def copy_top(self) -> None:
        """Create the folders and links of a root that has no lower layer."""
        for name in os.listdir(self._root):
            path, kept = os.path.join(self._root, name), f"base/u0/{name}"
            if os.path.islink(path):
                os.symlink(os.readlink(path), kept)
            elif os.path.isdir(path):
                os.mkdir(kept)
        for part in self._parts[1:]:
            os.makedirs(f"base/u0{part}", exist_ok=True)

    def _place(self, path: str) -> str:
        """Return the file of the base layer for a workspace path."""
        index, part = max(
            ((i, part) for i, part in enumerate(self._parts) if is_below(path, part)), key=lambda row: len(row[1])
        )
        return f"base/u{index}/{path[len(part) :].lstrip('/')}".rstrip("/")

    def _source(self, path: str) -> str:
        return self._root.rstrip("/") + path or "/"

    def _resolve(self, path: str) -> str:
        """Resolve the image's links in a workspace path, because masks and binds apply to their targets."""
        return resolve_below(self._root, path)

    def _copy_owner(self, path: str, place: str) -> None:
        uid, gid, mode = 0, 0, 0o755
        if not self._is_masked(path):
            with contextlib.suppress(OSError):
                info = os.stat(self._source(path))
                uid, gid = info.st_uid - self._shift, info.st_gid - self._shift
                mode = stat.S_IMODE(info.st_mode)
        self._set(place, uid, gid, mode)

    def _set(self, place: str, uid: int, gid: int, mode: int) -> None:
        if self._chown:
            nobody = _IDS - 2
            uid, gid = (identity if 0 <= identity < nobody else nobody for identity in (uid, gid))
            os.chown(place, self._first_id + uid, self._first_id + gid)
        os.chmod(place, mode)

    def _is_masked(self, path: str) -> bool:
        return any(is_below(path, mask) for mask in self._masked)

    def folder(self, path: str, mode: int | None = None) -> str:
        """Create a folder and its parents, each as in the image, or 0755 of root if the image has none."""
        way = ""
        for part in path.strip("/").split("/"):
            way += f"/{part}"
            place = self._place(way)
            if not os.path.isdir(place):
                os.mkdir(place)
                self._copy_owner(way, place)
        if mode is not None:
            self._set(self._place(path), 0, 0, mode)
        return self._place(path)

    def mask(self, path: str) -> None:
        """Hide the image's entry at `path`: a folder becomes empty, anything else is removed."""
        path = self._resolve(path)
        if path == "/":
            raise Impossible("masks: '/' cannot be masked")
        if self._is_masked(path) or not (os.path.lexists(self._source(path)) or path in OWN_FOLDERS):
            return
        if os.path.isdir(self._source(path)) or path in OWN_FOLDERS:
            os.setxattr(self.folder(path), OPAQUE_XATTR, b"y")
        else:
            self.folder(os.path.dirname(path)) if os.path.dirname(path) != "/" else None
            os.mknod(self._place(path), stat.S_IFCHR, 0)
        self._masked.append(path)

    def etc(self) -> None:
        folder = self.folder("/etc")
        for name, content in _ETC.items():
            with open(f"{folder}/{name}", "w", encoding="ascii") as file:
                file.write(content)
            self._set(f"{folder}/{name}", 0, 0, 0o644)

    def bind_target(self, path: str, *, is_folder: bool) -> str:
        """Create a mount point that every user can reach below a mask; return its path in workspaces."""
        target = self._resolve(path)
        parent = os.path.dirname(target)
        if parent != "/":
            self.folder(parent)
        for mask in self._masked:
            if is_below(parent, mask) and mask not in OWN_FOLDERS:
                self._set(self._place(mask), 0, 0, 0o755)
        place = self._place(target)
        if is_folder:
            self.folder(target)
        elif not os.path.lexists(place):
            os.close(os.open(place, os.O_CREAT | os.O_CLOEXEC, 0o644))
        return target
