# ruff: noqa: RET503, SIM115, SIM102, SIM105 (a list of attempts, each as short as it can be said)
"""Runs inside a workspace and tries to get out. Prints a line for each attempt that worked, or `held` if none did.

`hostile.py PORT NEIGHBOUR_MARK EXECUTOR_PID OUTSIDE`: a port that a neighbour serves, a text that only the neighbour's
files and processes contain, the executor's process id outside of the workspace, and a path that exists only outside.
"""

import ctypes
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

PORT, MARK, EXECUTOR_PID, OUTSIDE = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3]), sys.argv[4]
libc = ctypes.CDLL(None, use_errno=True)
worked: list[str] = []


def attempt(function: Callable[[], Any]) -> Callable[[], Any]:
    """Record an attempt. It returns what it could reach, or a false value; a refusal is an OSError."""
    try:
        got = function()
    except (OSError, ValueError):
        got = None
    if got:
        worked.append(f"{function.__name__}: {got!r}")
    return function


def call(result: int) -> bool:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True


def reachable_files(top: str) -> Iterator[str]:
    for folder, _, names in os.walk(top):
        for name in names:
            yield os.path.join(folder, name)


@attempt
def find_the_neighbours_files() -> Any:
    for top in ("/tmp", "/var/tmp", "/root", "/home", "/dev/shm", "/run", "/mnt"):
        for path in reachable_files(top):
            try:
                if stat.S_ISREG(os.lstat(path).st_mode) and os.lstat(path).st_size < 4096:
                    with open(path, "rb") as file:
                        if MARK in file.read():
                            return path
            except OSError:
                continue


@attempt
def find_the_layers_of_others() -> Any:
    mounts = open("/proc/self/mountinfo").read()
    return [line for line in mounts.splitlines() if "/state" in line or "pytest" in line]


@attempt
def see_the_neighbours_processes() -> Any:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) != os.getpid() and MARK in open(f"/proc/{pid}/cmdline", "rb").read():
            if int(pid) not in (os.getppid(),):
                return pid


@attempt
def see_processes_of_the_machine() -> Any:
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 5000]


@attempt
def signal_the_executor() -> Any:
    os.kill(EXECUTOR_PID, 0)
    return True


@attempt
def kill_init() -> Any:
    os.kill(1, signal.SIGKILL)
    os.kill(1, signal.SIGSTOP)
    os.kill(1, signal.SIGINT)
    os.kill(1, signal.SIGTERM)
    return open("/proc/1/stat").read().split()[2] in "TZX"


@attempt
def reach_the_neighbours_port() -> Any:
    with socket.create_connection(("127.0.0.1", PORT), timeout=2) as connection:
        return connection.recv(100)


@attempt
def reach_the_machines_network() -> Any:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(2)
        connection.connect(("192.0.2.1", 80))
        return "connected"


@attempt
def have_another_network_interface() -> Any:
    return [name for _, name in socket.if_nameindex() if name != "lo"]


@attempt
def reach_an_abstract_socket_of_the_machine() -> Any:
    return [line for line in open("/proc/net/unix") if "@" in line]


@attempt
def mount_something() -> Any:
    return call(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None))


@attempt
def unmount_something() -> Any:
    return call(libc.umount2(b"/proc/sys", 2))


@attempt
def make_proc_sys_writable() -> Any:
    return call(libc.mount(b"none", b"/proc/sys", None, 0x20 | 0x1000, None))


@attempt
def pivot_the_root() -> Any:
    return call(libc.pivot_root(b"/", b"/mnt"))


@attempt
def climb_out_of_the_root() -> Any:
    os.makedirs("/tmp/cage", exist_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            top = os.open("/", os.O_RDONLY)
            os.chroot("/tmp/cage")
            os.fchdir(top)
            for _ in range(50):
                os.chdir("..")
            os.chroot(".")
            os._exit(10 if os.path.exists(OUTSIDE) else 0)
        except OSError:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10


@attempt
def make_a_user_namespace() -> Any:
    pid = os.fork()
    if pid == 0:
        os._exit(10 if libc.unshare(0x10000000) == 0 else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10


@attempt
def make_other_namespaces() -> Any:
    return [hex(flag) for flag in (0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000) if libc.unshare(flag) == 0]


@attempt
def allow_user_namespaces_again() -> Any:
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("100")
    return True


@attempt
def enter_the_namespaces_of_init() -> Any:
    entered = []
    for kind in ("user", "mnt", "net", "pid"):
        try:
            descriptor = os.open(f"/proc/1/ns/{kind}", os.O_RDONLY)
            if libc.setns(descriptor, 0) == 0:
                entered.append(kind)
        except OSError:
            continue
    return entered


def helpers() -> list[int]:
    """Return the other visible processes: init, subreapers, and in Plain the executor. All run the executor's program."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]


@attempt
def trace_init_or_a_helper() -> Any:
    return [pid for pid in helpers() if libc.ptrace(16, pid, None, None) == 0]


@attempt
def read_a_helpers_memory() -> Any:
    for pid in helpers():
        for name in ("mem", "environ", "maps", "auxv", "stack", "syscall", "io"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    if file.read(64):
                        return f"{pid}/{name}"
            except OSError:
                continue


@attempt
def read_a_helpers_memory_by_system_call() -> Any:
    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    buffer = ctypes.create_string_buffer(64)
    local, remote = Vector(ctypes.addressof(buffer), 64), Vector(id(0) & ~0xFFF, 64)
    return [
        pid for pid in helpers() if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0
    ]


@attempt
def use_a_helpers_descriptors() -> Any:
    # Root may list the numbers of a process of its own id map, and do nothing with them.
    for pid in helpers():
        for name in [f"fd/{number}" for number in range(20)] + [f"fdinfo/{number}" for number in range(20)]:
            try:
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_NONBLOCK))
                return f"{pid}/{name}"
            except OSError:
                continue
        try:
            if os.listdir(f"/proc/{pid}/map_files"):
                return f"{pid}/map_files"
        except OSError:
            continue


@attempt
def take_a_helpers_descriptor() -> Any:
    taken = []
    for pid in helpers():
        handle = os.pidfd_open(pid)
        for number in range(20):
            if libc.syscall(438, handle, number, 0) >= 0:
                taken.append((pid, number))
    return taken


@attempt
def go_through_a_helpers_root() -> Any:
    return [pid for pid in helpers() for name in ("root/etc", "cwd/") if os.access(f"/proc/{pid}/{name}", os.F_OK)]


@attempt
def forge_a_result_through_inherited_descriptors() -> Any:
    return [
        name
        for name in os.listdir("/proc/self/fd")
        if int(name) > 2
        and os.path.exists(f"/proc/self/fd/{name}")
        and "socket" in os.readlink(f"/proc/self/fd/{name}")
    ]


@attempt
def write_the_machines_settings() -> Any:
    written = []
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/hostname",
        "/proc/sys/net/ipv4/ip_forward",
        "/sys/kernel/uevent_helper",
        "/sys/power/state",
        "/sys/fs/cgroup/release_agent",
    ):
        try:
            os.close(os.open(path, os.O_WRONLY))
            written.append(path)
        except OSError:
            continue
    return written


@attempt
def read_the_kernel() -> Any:
    got = []
    for path in ("/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg", "/proc/1/pagemap"):
        try:
            with open(path, "rb") as file:
                if file.read(16):
                    got.append(path)
        except OSError:
            continue
    return got


@attempt
def open_a_block_device() -> Any:
    found = []
    for folder, _, names in os.walk("/dev"):
        found += [name for name in names if stat.S_ISBLK(os.lstat(os.path.join(folder, name)).st_mode)]
    return found


@attempt
def make_a_device() -> Any:
    os.mknod("/tmp/disk", stat.S_IFBLK | 0o666, os.makedev(254, 0))
    return True


@attempt
def load_code_into_the_kernel() -> Any:
    return libc.syscall(175, b"", 0, b"") == 0 or ctypes.get_errno() not in (1, 13, 38)


@attempt
def raise_own_limits() -> Any:
    number = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (number + 1, number + 1))
    return True


@attempt
def get_more_capabilities() -> Any:
    allowed = 0xA00425FB
    with open("/proc/self/status") as file:
        rows = dict(line.split(":\t") for line in file if line.startswith("Cap"))
    return [row for row, value in rows.items() if int(value, 16) & ~allowed]


@attempt
def be_root_on_the_machine() -> Any:
    first = open("/proc/self/uid_map").read().split()
    return first if int(first[1]) == 0 else None


@attempt
def read_what_is_masked() -> Any:
    return os.listdir("/root") or os.listdir("/opt")


@attempt
def undo_a_mask() -> Any:
    try:
        os.removexattr("/opt", "user.overlay.opaque")
    except OSError:
        pass
    return os.listdir("/opt")


@attempt
def use_a_kernel_keyring_of_the_machine() -> Any:
    return [line for line in open("/proc/keys") if "_uid.0" in line and os.getuid() != 0]


print("\n".join(worked) if worked else "held")
