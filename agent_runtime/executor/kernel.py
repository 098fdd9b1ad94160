"""Linux system calls that the standard library of Python 3.11 lacks, through libc.

Every function raises OSError with the errno and the subject of the call. Constants come from the kernel's headers
(`linux/mount.h`, `linux/sched.h`, `linux/prctl.h`, `linux/capability.h`); system call numbers are the same on x86-64
and arm64.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Callable

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

# The one call used here whose number differs between x86-64 and arm64.
_SYS_SECCOMP = 277 if os.uname().machine == "aarch64" else 317
_SYS_CLONE3 = 435
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442
_OPEN_TREE_CLONE = 0x1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 0x4
_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_IDMAP = 0x00100000

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1

# From linux/fs.h. The kernel reads and writes an int, although the numbers encode a long.
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_FS_TOPDIR_FL = 0x00020000

_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 40
# Docker's and containerd's default capabilities without MKNOD (it never works in a user namespace).
CONTAINER_CAPABILITIES = frozenset(
    {
        0,  # CHOWN
        1,  # DAC_OVERRIDE
        3,  # FOWNER
        4,  # FSETID
        5,  # KILL
        6,  # SETGID
        7,  # SETUID
        8,  # SETPCAP
        10,  # NET_BIND_SERVICE
        13,  # NET_RAW
        18,  # SYS_CHROOT
        29,  # AUDIT_WRITE
        31,  # SETFCAP
    }
)
CAP_KILL = 5
CAP_SETUID = 7
CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21
CAP_SYS_NICE = 23

_libc = ctypes.CDLL(None, use_errno=True)
# Calls made this way keep the interpreter's lock, as a fork must.
_locked = ctypes.PyDLL(None, use_errno=True)
# Looked up before the first fork, because the first use in a process copies memory pages.
_before_fork, _after_fork_in_child = _locked.PyOS_BeforeFork, _locked.PyOS_AfterFork_Child
_after_fork_in_parent, _locked_call = _locked.PyOS_AfterFork_Parent, _locked.syscall
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


def _check(result: int, about: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), about)
    return result


def unshare(flags: int, what: str) -> None:
    """Enter new namespaces; `what` names them in the error."""
    _check(_libc.unshare(flags), f"a new {what} namespace")


def fork_into(flags: int, what: str) -> int:
    """Like `os.fork`, with the child in new namespaces; `what` names them in the error. With unshare and fork, an
    intermediate process would be needed, because a process that has unshared its PID namespace can only fork into the
    new one. The C library's fork hooks are skipped, which is safe with a single thread.
    """
    # struct clone_args of linux/sched.h: flags, three pointers, the signal at its end, and three for a stack.
    arguments = struct.pack("=8Q", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    return fork_by(
        lambda: _locked_call(_SYS_CLONE3, arguments, ctypes.c_size_t(64)), f"a process in a new {what} namespace"
    )


def fork_by(call: Callable[[], int], about: str) -> int:
    """Return the result of a C function that forks like fork(2), with the interpreter's fork hooks around it.

    The call must keep the interpreter's lock (ctypes.PyDLL).
    """
    _before_fork()
    pid = call()
    if pid == 0:
        _after_fork_in_child()
        return 0
    number = ctypes.get_errno()
    _after_fork_in_parent()  # the hooks may change errno
    ctypes.set_errno(number)
    return _check(pid, about)


def address(memory: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _check(
        _libc.mount(
            os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, os.fsencode(options) or None
        ),
        f"mount of {kind or source} on {target}",
    )


def unmount(target: str) -> None:
    """Detach the mount at `target` and all mounts below it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount of {target}")


def prctl(option: int, value: int = 0) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def hide_from_tools() -> None:
    """Make this process non-dumpable: no ptrace, and no /proc/PID/mem, environ or fd for processes of the same user.

    Call it again after a change of user ids, which may undo it (depending on fs.suid_dumpable).
    """
    prctl(PR_SET_DUMPABLE, 0)


def name_process(title: str) -> None:
    """Show `title` in `ps` for this process and its forks, and hide its arguments, which tools could read."""
    with open("/proc/self/stat", "rb") as status:
        fields = status.read().rpartition(b")")[2].split()
    # arg_start and arg_end, which are fields 48 and 49 in proc(5); `fields` lacks the first two and counts from 0.
    # Python keeps its own copies of the arguments.
    start, end = int(fields[48 - 3]), int(fields[49 - 3])
    content = title.encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))
    with open("/proc/self/comm", "wb") as name:
        name.write(content)


def enter_namespace(descriptor: int, kind: int, what: str) -> None:
    """Enter the existing namespace of that descriptor; `kind` is one of CLONE_NEW…, `what` names it in the error."""
    _check(_libc.setns(descriptor, kind), f"the {what} namespace of another workspace")


def clone_from(namespace: int, folder: int) -> int:
    """Return a clone of the mount at a folder of another mount namespace, for `place_mount`; both are descriptors.

    The current folder becomes the root.
    """
    own = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    enter_namespace(namespace, CLONE_NEWNS, "mount")
    try:
        flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
        return _check(_libc.syscall(_SYS_OPEN_TREE, folder, b"", flags), "clone of a folder of another workspace")
    finally:
        enter_namespace(own, CLONE_NEWNS, "mount")
        os.close(own)


def place_mount(clone: int, target: str) -> None:
    """Mount such a clone on `target`, once."""
    _check(
        _libc.syscall(_SYS_MOVE_MOUNT, clone, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH),
        f"mount on {target}",
    )


def idmapped_clone(source: str, target: str, user_namespace: int) -> None:
    """Mount a read-only clone of the mount at `source` on `target`. The user namespace of that descriptor maps owners."""
    clone = _check(
        _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC),
        f"clone of {source}",
    )
    try:
        request = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, 0, 0, user_namespace)
        _check(
            _libc.syscall(_SYS_MOUNT_SETATTR, clone, b"", _AT_EMPTY_PATH, request, ctypes.c_size_t(len(request))),
            f"idmapped mount of {source}",
        )
        place_mount(clone, target)
    finally:
        os.close(clone)


def keep_only_container_capabilities() -> None:
    """Drop all capabilities except CONTAINER_CAPABILITIES from the bounding, permitted, effective and inheritable sets,
    permanently.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in CONTAINER_CAPABILITIES:
            prctl(PR_CAPBSET_DROP, capability)
    raise_container_capabilities()


def raise_container_capabilities() -> None:
    """Set the permitted and effective sets to CONTAINER_CAPABILITIES, as far as permitted already."""
    _set_capabilities(sum(1 << capability for capability in CONTAINER_CAPABILITIES))


def become_keeping_capabilities(uid: int) -> None:
    """Change only the effective user id, and keep every permitted capability."""
    # Read before the change: without effective capabilities, the mode of the root folder may forbid reading /proc.
    permitted = _capabilities(b"CapPrm:")
    os.seteuid(uid)
    _set_capabilities(permitted)


def _set_capabilities(mask: int) -> None:
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("=IIIIII", low, low, 0, high, high, 0)), "capset")


def set_syscall_filter(program: bytes) -> None:
    """Install a BPF program that checks each system call of this process and its children, permanently.

    Without the flag, kernels before 5.16 also turn off speculative execution, which slows down everything.
    """
    instructions = ctypes.create_string_buffer(program, len(program))
    request = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    _check(
        _libc.syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_SPEC_ALLOW, request),
        "the seccomp filter",
    )


def effective_capabilities() -> int:
    """Return the effective set of this process as a bit mask."""
    return _capabilities(b"CapEff:")


def _capabilities(kind: bytes) -> int:
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(kind):
                return int(line.split()[1], 16)
    return 0


def raise_loopback() -> None:
    """Enable `lo` in the network namespace of this process."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def spread_subfolders(folder: int) -> None:
    """Have ext4 spread new folders in the folder of that descriptor: `chattr +T`, chattr(1)."""
    flags = struct.unpack("=ixxxx", fcntl.ioctl(folder, _FS_IOC_GETFLAGS, bytes(8)))[0]
    fcntl.ioctl(folder, _FS_IOC_SETFLAGS, struct.pack("=ixxxx", flags | _FS_TOPDIR_FL))


def close_all_but(keep: list[int]) -> None:
    """Close every descriptor from 3 up that is not in `keep`."""
    low = 3
    for descriptor in sorted(keep):
        if descriptor >= low:
            os.closerange(low, descriptor)
            low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
