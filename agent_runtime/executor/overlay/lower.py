"""The lower layers of all workspaces of a host: the folder that is their root, or the unpacked layers of an image."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

from agent_runtime.executor import kernel

# These are assembled from what a workspace has of its own.
OWN_FOLDERS = ("/proc", "/sys", "/dev", "/tmp")
_PROGRAMS = "/usr"


class Impossible(Exception):
    """Overlay cannot be had here; the message says why."""


def mounts() -> list[tuple[str, str]]:
    """(mount point, file system type) of every mount seen, in the order they were made."""
    with open("/proc/self/mountinfo", encoding="ascii") as file:
        rows = [line.split(" ") for line in file.read().splitlines()]
    return [(row[4].encode().decode("unicode_escape"), row[row.index("-") + 1]) for row in rows]


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def refuse_overlay_on_overlay(layers: str) -> None:
    point, kind = max(
        ((point, kind) for point, kind in mounts() if is_below(layers, point)), key=lambda row: len(row[0])
    )
    if kind in ("overlay", "fuse.fuse-overlayfs"):
        raise Impossible(
            f"stateDir is on {kind} (mounted at {point}), which cannot hold writable layers; "
            "put it on a volume of its own, such as an emptyDir"
        )


def mount_root(
    root: str, namespace: int, layers: str, *, split: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Mount the lower layers; the workspace paths of the parts, and the names of each one's lower layers."""
    os.mkdir("s0")
    parts = ["/"]
    if not split:
        _mount_lower(root, "s0", namespace)
        if _is_refused("s0", root, layers):
            # What then stands in for the root makes the start of a program a third slower, so programs do without it.
            programs = root.rstrip("/") + _PROGRAMS
            if _is_plain_folder(programs) and not is_below(layers, programs):
                os.mkdir("s1")
                _mount_lower(programs, "s1", namespace)
                parts.append(_PROGRAMS)
            _separate("s0")
        return tuple(parts), tuple((f"s{index}",) for index in range(len(parts)))
    # Submounts are locked to their parents in a namespace of fewer rights, so only folders without any can be lower.
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
    """Whether it is a folder, no link, and without mounts."""
    is_folder = os.path.isdir(path) and not os.path.islink(path)
    return is_folder and not any(is_below(point, path) for point, _ in mounts())


def _mount_lower(source: str, target: str, namespace: int) -> None:
    if namespace < 0:
        kernel.mount(source, target, flags=kernel.MS_BIND)
    else:
        _mount_mapped(source, target, namespace)


def _mount_mapped(source: str, target: str, namespace: int) -> None:
    try:
        kernel.idmapped_clone(source, target, namespace, read_only=True)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.ENOSYS):
            raise
        kind = max((row for row in mounts() if is_below(source, row[0])), key=lambda row: len(row[0]))[1]
        raise Impossible(
            f"root {source!r} is on {kind}, which this kernel cannot mount with mapped ids ({error.strerror}), "
            "and this process is root of the machine itself; run it in a pod with hostUsers: false"
        ) from None


def mount_image(folders: Sequence[str], namespace: int) -> tuple[str, ...]:
    """Mount an image's layers, and all of them as one at `image`; the names of the lower layers."""
    names = tuple(f"i{index}" for index in range(len(folders)))
    for folder, name in zip(folders, names, strict=True):
        os.mkdir(name)
        _mount_lower(folder, name, namespace)
    # An overlay wants two layers.
    os.mkdir("image")
    os.mkdir("nothing")
    kernel.mount("overlay", "image", "overlay", kernel.MS_RDONLY, f"lowerdir={':'.join((*names, 'nothing'))},userxattr")
    return names


def _is_refused(name: str, folder: str, layers: str) -> bool:
    """Whether overlay would refuse lower layer `name`, which is `folder`: where another layer lies in it on the same file
    system, as ours do when stateDir is in a folder of the image."""
    return is_below(layers, folder) and os.stat(name).st_dev == os.stat(layers).st_dev


def _separate(name: str) -> None:
    """An overlay of that layer and of nothing is another file system."""
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
