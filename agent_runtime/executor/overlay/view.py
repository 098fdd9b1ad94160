"""Build one workspace: its layers, namespaces and mounts. Runs in a fork of the zygote. The order matters;
docs/workspaces.md says why. All paths of a workspace are resolved inside it, after the new root is mounted, so that
links in a frozen layer cannot lead out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import stat
from typing import NamedTuple, NoReturn

from agent_runtime.executor import kernel
from agent_runtime.executor.init.channel import Channel, Message, close_all
from agent_runtime.executor.init.commands import WorkspaceSettings
from agent_runtime.executor.init.init import Init
from agent_runtime.executor.init.trees import copy_contents, remove
from agent_runtime.executor.overlay.base_layers import HOSTNAME, BaseLayers, write
from agent_runtime.executor.overlay.usage import MAX_PROCESSES

# Without its own limit, a workspace may fill this much of /dev/shm; Docker's 64 MiB is too little for PyTorch.
_SHM_BYTES = 1024**3
# Limit of open files. A workspace uses four, so the usual soft limit of 1,024 would allow some 200 workspaces.
_DESCRIPTORS = 65536
# The kernel allows 3,072 pseudo-terminals in all containers of a machine together. One workspace must not take them all.
_MAX_TERMINALS = 64
# The group `tty` in every distribution.
_TERMINAL_GROUP = 5
# The kernel kills tools before the executor when the machine runs out of memory.
_OOM_SCORE = 900
# The number of ids in a range of 65,536, except those of root and nobody.
_CREATORS = 65534
# What every image has.
_BARE_FOLDERS = ("proc", "dev", "sys", "tmp", "etc")
# The folder of volumes, in the workspace that others join.
_VOLUMES = "/.volumes"
# Top-level folders that volumes may not replace.
_NOT_REPLACED = frozenset({".volumes", "proc", "dev", "sys"})
HELLO = 0
# The number of messages between spares and the keeper.
IDS = 0

Received = tuple[int, Message, list[int]]


class Shared(NamedTuple):
    """Descriptors by which another workspace joins one: its namespaces, and its folder of volumes."""

    users: int
    network: int
    mounts: int
    volumes: int


def make_layer(base: BaseLayers, name: str) -> None:
    """Create the empty folders of a new layer."""
    os.mkdir(name, 0o755)
    for part in range(len(base.parts)):
        os.mkdir(f"{name}/u{part}")
        os.mkdir(f"{name}/w{part}", 0o700)


def _copy_root_owner(base: BaseLayers, name: str, parent: str) -> None:
    """Give the root folder of an empty layer the owner and mode of layer `parent`."""
    for part in range(len(base.parts)):
        below = os.stat(f"{parent}/u{part}", follow_symlinks=False)
        if (below.st_uid, below.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(f"{name}/u{part}", below.st_uid, below.st_gid)
        os.chmod(f"{name}/u{part}", stat.S_IMODE(below.st_mode))


def raise_own_limits() -> None:
    """Raise the limit of open files for this process and the processes that serve workspaces."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def process_limits(request: Message, *, own_users: bool = True) -> dict[int, int]:
    """Return the rlimits that enforce a workspace's limits for one process or user.

    The kernel counts processes per user, so that limit is set only if the workspace has its own users. It counts
    descriptors in transit through sockets per user over all workspaces, and compares them with the sender's limit.
    Tools get half of this process's limit, so that they cannot block the processes that serve workspaces.
    """
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2}
    if own_users:
        limits[resource.RLIMIT_NPROC] = request["processes"] or MAX_PROCESSES
    sizes = [size for size in (request["fileBytes"], request["diskBytes"]) if size is not None]
    if sizes:
        limits[resource.RLIMIT_FSIZE] = min(sizes)
    if request["memoryBytes"] is not None:
        limits[resource.RLIMIT_DATA] = request["memoryBytes"]
    return limits


def build(base: BaseLayers, requests: Channel, own: str) -> NoReturn:
    """Become the init of a workspace, in the new mount and PID namespaces into which this process was forked.

    Creates the layer `own` immediately. The first message on `requests` has the lower layers; then files are mounted
    and the other namespaces entered. In between, it requests its id mapping and waits for the confirmation (both are
    IDS messages). The next message has the workspace's settings and init's ends of two sockets: for requests, and for
    commands to start. It may arrive before any of this is done. A failure is reported on the first socket, as HELLO.
    """
    try:
        make_layer(base, own)
    except OSError:  # the same error occurs when the layer is mounted, and is reported then
        with contextlib.suppress(OSError):
            remove(own)
    first = requests.receive()
    if first is None:
        os._exit(0)
    _, lower_layers, joined = first
    early = failure = None
    uppers: list[int] = []
    volumes: int | None = None
    try:
        uppers = _mount_view(base, own, lower_layers)
        # Before entering the user namespace: inside, a non-dumpable process that the machine's root started cannot
        # write it.
        write("/proc/self/oom_score_adj", str(_OOM_SCORE))
        if base.own_creators and not joined:
            # The kernel also counts a user namespace's objects (inotify) for its creator, so workspaces must not share
            # one.
            kernel.become_keeping_capabilities(base.first_id + 1 + int(own, 16) % _CREATORS)
        shared = Shared(*joined) if joined else None
        if shared is not None:
            volumes = kernel.clone_from(shared.mounts, shared.volumes)
        early = _enter_user_namespace(requests, shared)
        _enter_other_namespaces(shared)
    except OSError as error:
        failure = error
    # If the failure occurred before the request arrived, its cause may have ended since.
    is_stale = failure is not None and early is None and not select.select([requests.end], [], [], 0)[0]
    received = None if is_stale else early or requests.receive()
    if received is None:
        os._exit(0)
    _, request, ends = received
    channel, starts = (Channel(socket.socket(fileno=end)) for end in ends)
    try:
        if failure is not None:
            raise failure
        _serve(base, request, channel, starts, uppers, volumes)
    except OSError as error:
        channel.send(HELLO, {"error": f"{error.filename or 'a step'}: {error.strerror}"})
    finally:
        os._exit(1)


def _enter_user_namespace(requests: Channel, shared: Shared | None) -> Received | None:
    """Become root of a user namespace, a new one or the `shared` one; return the workspace's request if it has arrived
    meanwhile.
    """
    if shared is not None:
        kernel.enter_namespace(shared.users, kernel.CLONE_NEWUSER, "user")
    else:
        kernel.unshare(kernel.CLONE_NEWUSER, "user")
    requests.send(IDS, {"is_mapped": shared is not None})
    early: Received | None = None
    while (received := requests.receive()) is not None:
        if received[0] == IDS:
            with contextlib.suppress(PermissionError):
                os.setgroups([0])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            kernel.hide_from_tools()
            return early
        early = received
    raise OSError(0, "its ids could not be mapped", "the user namespace")


def _enter_other_namespaces(shared: Shared | None) -> None:
    """Enter new mount, ipc and uts namespaces, and a new network namespace or the `shared` one; mount /sys."""
    if shared is not None:
        kernel.enter_namespace(shared.network, kernel.CLONE_NEWNET, "network")
    new_network = 0 if shared is not None else kernel.CLONE_NEWNET
    kernel.unshare(
        new_network | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS, "network, mount, ipc and uts"
    )
    socket.sethostname(HOSTNAME)
    if shared is None:
        kernel.raise_loopback()
    with contextlib.suppress(OSError):
        # Some kernels and security profiles refuse a new sysfs; then /sys stays empty.
        kernel.mount("sysfs", "/sys", "sysfs", kernel.MS_RDONLY | _PROC_FLAGS)
    write("/proc/sys/user/max_user_namespaces", "0")


def _serve(
    base: BaseLayers, request: Message, channel: Channel, starts: Channel, uppers: list[int], volumes: int | None
) -> NoReturn:
    """Apply the workspace's limits, drop this process's other rights, then serve the workspace.

    `volumes` is a clone of the mounted folder of volumes, if it joins a workspace.
    """
    shm_bytes = min(request["memoryBytes"] or _SHM_BYTES, _SHM_BYTES)
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", _NO_PRIVILEGES, f"mode=1777,size={shm_bytes},uid=0,gid=0")
    with contextlib.suppress(OSError):
        write("/proc/sys/kernel/shmall", str(shm_bytes // os.sysconf("SC_PAGE_SIZE")))
    handles = _share(request, volumes)
    kernel.mount("/proc/sys", "/proc/sys", flags=kernel.MS_BIND)
    kernel.mount("none", "/proc/sys", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _PROC_FLAGS)
    kernel.keep_only_container_capabilities()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    shm = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    kernel.close_all_but([channel.end.fileno(), starts.end.fileno(), proc, shm, *handles, *uppers])
    channel.send(HELLO, {}, [proc, shm, *handles])
    close_all([shm, *handles])
    layer = tuple(
        (part.strip("/") + "/" if part != "/" else "", upper) for part, upper in zip(base.parts, uppers, strict=True)
    )
    settings = WorkspaceSettings(
        isolated=True,
        user=request["user"] or "0",
        working_dir=request["workingDir"],
        nice=request["nice"],
        environment=request["environment"],
        rlimits=process_limits(request),
        layer=layer,
    )
    Init(channel, starts, settings, proc).serve()


def _share(request: Message, volumes: int | None) -> list[int]:
    """Mount the volumes; if others may join, return the descriptors of `Shared`.

    The volumes are folders in the layer of the workspace that others join. They are mounted here because later no
    process of the workspace may mount anything. As in Docker, an empty volume gets the content of the folder that it
    replaces, with that one's owner and mode.
    """
    if not request["shares"] and volumes is None:
        return []
    os.makedirs(_VOLUMES, 0o755, exist_ok=True)
    if volumes is not None:
        kernel.place_mount(volumes, _VOLUMES)
    for name, target in sorted(request["volumes"].items(), key=lambda item: item[1]):  # outer folders first
        if os.path.realpath(target).split("/")[1] in _NOT_REPLACED:
            # Tools may have made such a link in the state that this workspace starts from. The volume would get the
            # content of one that they must not see.
            raise OSError(errno.EXDEV, "it leads to a folder that cannot be a volume", target)
        os.makedirs(target, 0o755, exist_ok=True)
        source = f"{_VOLUMES}/{name}"
        if not os.path.isdir(source):
            os.mkdir(source)
        if not os.listdir(source):
            replaced = os.stat(target)
            os.chown(source, replaced.st_uid, replaced.st_gid)
            os.chmod(source, stat.S_IMODE(replaced.st_mode))
            copy_contents(target, source)
        kernel.mount(source, target, flags=kernel.MS_BIND)
    if volumes is not None:
        kernel.unmount(_VOLUMES)
        return []
    namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "net", "mnt")]
    handles = [*namespaces, os.open(_VOLUMES, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    # Volumes of other workspaces alone are in this folder too, so hide it.
    kernel.mount("tmpfs", _VOLUMES, "tmpfs", _NO_PRIVILEGES | kernel.MS_RDONLY, "size=4k,mode=755")
    return handles


_NO_PRIVILEGES = kernel.MS_NOSUID | kernel.MS_NODEV
_PROC_FLAGS = _NO_PRIVILEGES | kernel.MS_NOEXEC


def _mount_view(base: BaseLayers, own: str, lower_layers: Message) -> list[int]:
    """Mount a workspace's root and move it onto `/`; return descriptors of the layer for snapshots.

    `own` is its empty layer. `lower_layers` has the layers below: a `chain` of frozen layers, the nearest first, and the
    image's unless it `is_bare`. A view of an existing layer (`view_of`) gets no new layer. `resumed` is the layer of a
    workspace that rested, which it continues.
    """
    chain, frozen, is_bare = lower_layers["chain"], lower_layers["view_of"], lower_layers["is_bare"]
    if frozen:
        remove(own)
    elif lower_layers["resumed"]:
        remove(own)
        own = lower_layers["resumed"]
        for part in range(len(base.parts)):
            # A mark of the last mount in it, that it may have been lost in a crash of the machine, forbids another one.
            remove(f"{own}/w{part}/work")
    else:
        if not os.path.isdir(own):
            make_layer(base, own)
        _copy_root_owner(base, own, chain[0] if chain else "base")
    folder = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    uppers = [os.open(f"{frozen or own}/u{part}", folder) for part in range(len(base.parts))]
    layers = os.open(".", os.O_PATH | os.O_CLOEXEC)
    dev = os.open("dev", os.O_PATH | os.O_CLOEXEC)
    binds = [os.open(f"bind{index}", os.O_PATH | os.O_CLOEXEC) for index in range(len(base.binds))]
    # A root without the image's files has no mounts below it that need their own overlays.
    for part, path in enumerate(base.parts[:1] if is_bare else base.parts):
        os.fchdir(layers)
        lower = [f"{layer}/u{part}" for layer in [*chain, "base"]]
        lower += () if is_bare else base.lower[part]
        options = f"lowerdir={':'.join(lower)},userxattr"
        if not frozen:
            options += f",upperdir={own}/u{part},workdir={own}/w{part},volatile"
        kernel.mount("overlay", "m" if part == 0 else path, "overlay", kernel.MS_NODEV, options)
        if part == 0:
            os.chdir("m")
            kernel.mount(".", "/", flags=kernel.MS_MOVE)
            os.chroot(".")
    os.chdir("/")
    if is_bare and not frozen:
        for name in _BARE_FOLDERS:
            os.makedirs(name, exist_ok=True)
    kernel.mount("proc", "/proc", "proc", _PROC_FLAGS)
    kernel.mount(f"/proc/self/fd/{dev}", "/dev", flags=kernel.MS_BIND | kernel.MS_REC)
    group = f",gid={base.first_id + _TERMINAL_GROUP}" if base.several_ids else ""
    kernel.mount(
        "devpts",
        "/dev/pts",
        "devpts",
        kernel.MS_NOSUID | kernel.MS_NOEXEC,
        f"newinstance,ptmxmode=0666,mode=620,max={_MAX_TERMINALS}{group}",
    )
    for bind, target in zip(binds, base.binds, strict=True):
        kernel.mount(f"/proc/self/fd/{bind}", target, flags=kernel.MS_BIND)
        if os.fstatvfs(bind).f_flag & os.ST_RDONLY:
            kernel.mount("none", target, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _NO_PRIVILEGES)
    return uppers
