"""A workspace whose tools attack: its neighbours, the executor and the machine are not affected."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.executor.host import FileFailure, Limits, WorkspaceFailure
from agent_runtime.executor.overlay import watch
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.usage import MAX_DESCRIPTORS
from agent_runtime.executor.overlay.workspace import Workspace
from agent_runtime.executor.syscall_filter import AARCH64, ABIS, X86_64
from tests.integration.executor_workspaces.conftest import opened
from tests.integration.executor_workspaces.helpers import PATIENCE, Inside, get, put, read_all, run, start, write

_PYTHON = "/usr/bin/python3"
_SCRIPT = Path(__file__).with_name("hostile.py")
_MARK = "a-neighbours-secret"
_PORT = 8123
_SERVER = (
    "import socket, sys\n"
    f"server = socket.create_server(('127.0.0.1', {_PORT}))\n"
    "while True:\n    connection = server.accept()[0]\n    connection.sendall(sys.argv[1].encode())\n    connection.close()"
)


@pytest.fixture
async def masked(tmp_path: Path) -> AsyncIterator[Inside]:
    config = HostConfig(str(tmp_path), mode="Overlay", places=10, masks=("/root", "/opt"))
    async with opened(config) as host:
        yield Inside(host)


@pytest.mark.parametrize("user", ["0", "1234:1234"])
async def test_workspace_cannot_escape(masked: Inside, user: str) -> None:
    neighbour = await masked.make()
    await write(neighbour, "/tmp/secret", _MARK.encode(), mode=0o666)
    server, server_output = await start(neighbour, [_PYTHON, "-c", _SERVER, _MARK])
    client = f"import socket; print(socket.create_connection(('127.0.0.1', {_PORT})).recv(99))"
    async with asyncio.timeout(PATIENCE):
        while _MARK not in (await run(neighbour, [_PYTHON, "-c", client])).output:
            pass
    workspace = await masked.make()
    await write(workspace, "/tmp/hostile.py", _SCRIPT.read_bytes())
    # In pieces, so that the script's own arguments are not what it finds.
    pid = os.getpid()
    attack = f"exec {_PYTHON} /tmp/hostile.py {_PORT} $(printf %s%s a-neighbours -secret) {pid} /proc/{pid}"
    done = await run(workspace, attack, user=user)
    assert (done.output, done.exit.code) == ("held\n", 0)
    assert await get(neighbour, "read", path="/tmp/secret") == _MARK.encode()
    assert _MARK in (await run(neighbour, [_PYTHON, "-c", client])).output
    await server.child.signal(signal.SIGKILL, tree=True)
    await read_all(server_output)


async def test_su_still_works_inside(masked: Inside) -> None:
    workspace = await masked.make()
    done = await run(workspace, "su nobody -s /bin/sh -c 'id -u'")
    assert done.output == "65534\n"


async def test_links_planted_in_a_workspace_lead_nowhere_else(masked: Inside) -> None:
    """A link named like a file of the machine leads to the workspace's own one, or to nothing."""
    outside = Path("/opt/only-on-the-machine")
    outside.write_text(_MARK)
    try:
        workspace = await masked.make()
        links = {"link": outside, "root": "/", "up": "../../../../.."}
        await run(workspace, "mkdir /tmp/d; " + "; ".join(f"ln -s {to} /tmp/d/{name}" for name, to in links.items()))
        for path in ("/tmp/d/link", f"/tmp/d/root{outside}", f"/tmp/d/up{outside}", f"/../../..{outside}"):
            with pytest.raises(FileFailure) as failure:
                await get(workspace, "read", path=path)
            assert failure.value.errno == 2
        await write(workspace, "/tmp/d/root/opt/made-inside", b"x")
        assert not Path("/opt/made-inside").exists()
        packed = await get(workspace, "tar", path="/tmp/d")
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            assert {member.name: member.issym() for member in tar} == {"link": True, "root": True, "up": True}
    finally:
        outside.unlink()


async def test_writing_with_replace_never_writes_through_a_link(masked: Inside) -> None:
    workspace = await masked.make()
    await run(workspace, "mkdir /a; echo mine >/a/target; ln -s /a/target /a/link; mkdir /a/folder; touch /a/folder/x")
    await write(workspace, "/a/link", b"new", replace=True)
    await write(workspace, "/a/folder", b"new", replace=True)
    done = await run(workspace, "cat /a/target; stat -c %F /a/link /a/folder")
    assert done.output.split("\n") == ["mine", "regular file", "regular file", ""]
    await run(workspace, "ln -sf /a/target /a/link")
    await write(workspace, "/a/link", b"through")
    assert (await run(workspace, "cat /a/target; stat -c %F /a/link")).output == "throughsymbolic link\n"


def _tar(*members: tuple[str, bytes, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            member.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"evil"))
    return packed.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", tarfile.REGTYPE, "")],
        [("/evil", tarfile.REGTYPE, "")],
        [("a/../../evil", tarfile.REGTYPE, "")],
        [("out", tarfile.SYMTYPE, "/"), ("out/evil", tarfile.REGTYPE, "")],
        [("out", tarfile.SYMTYPE, ".."), ("out/deeper/evil", tarfile.REGTYPE, "")],
        [("evil", tarfile.LNKTYPE, "../mine")],
        [("out", tarfile.SYMTYPE, ".."), ("evil", tarfile.LNKTYPE, "out/mine")],
        [("disk", tarfile.BLKTYPE, "")],
    ],
)
async def test_a_tar_cannot_leave_its_target(masked: Inside, members: list[tuple[str, bytes, str]]) -> None:
    workspace = await masked.make()
    await run(workspace, "mkdir -p /t/target; echo mine > /t/mine")
    with pytest.raises(FileFailure):
        await put(workspace, "untar", _tar(*members), path="/t/target")
    done = await run(workspace, "cat /t/mine; find / -xdev -name evil 2>/dev/null")
    assert done.output == "mine\n"


async def test_tar_with_a_path_through_a_link_is_refused(masked: Inside) -> None:
    workspace = await masked.make()
    await run(workspace, "mkdir -p /t/target /t/other; ln -s /t/other /t/target/sub")
    with pytest.raises(FileFailure, match="link"):
        await put(workspace, "untar", _tar(("sub/evil", tarfile.REGTYPE, "")), path="/t/target")
    assert (await run(workspace, "ls /t/other")).output == ""


async def test_special_files_are_refused_not_waited_for(masked: Inside) -> None:
    workspace = await masked.make()
    bind = "import socket; socket.socket(socket.AF_UNIX).bind('/tmp/socket')"
    await run(workspace, f'mkfifo /tmp/fifo; {_PYTHON} -c "{bind}"')
    for path, kind in (("/tmp/fifo", "fifo"), ("/tmp/socket", "socket"), ("/dev/zero", "device"), ("/tmp", "folder")):
        with pytest.raises(FileFailure, match=kind):
            await get(workspace, "read", path=path)
    with pytest.raises(FileFailure, match="fifo"):
        await write(workspace, "/tmp/fifo", b"x")
    with tarfile.open(fileobj=io.BytesIO(await get(workspace, "tar", path="/tmp"))) as tar:
        assert {member.name for member in tar} == {"fifo"}
    await write(workspace, "/etc/passwd", b"", replace=True)
    await run(workspace, "rm /etc/passwd; mkfifo /etc/passwd")
    assert (await run(workspace, ["echo", "ok"])).output == "ok\n"


async def test_folders_of_any_depth_are_removed(masked: Inside) -> None:
    workspace = await masked.make()
    deep = f"{_PYTHON} -c \"import os; [(os.mkdir('d'*50), os.chdir('d'*50)) for _ in range(3000)]\""
    assert (await run(workspace, f"mkdir /deep && cd /deep && {deep}")).ok
    await workspace.file("remove", {"path": "/deep"})
    assert (await run(workspace, f"mkdir /deep && cd /deep && {deep}")).ok
    await workspace.destroy()


async def _still_answers(neighbour: Workspace, until: asyncio.Event) -> int:
    answered = 0
    while not until.is_set():
        assert (await run(neighbour, "echo fine")).output == "fine\n"
        answered += 1
    return answered


EXHAUSTING = [
    # The kernel refuses one user more processes, which ends nothing: the command's deadline does.
    ("fork bomb", Limits(processes=200), "Deadline"),
    ("fork bomb of two users", Limits(processes=200), "Processes"),
    ("threads of two users", Limits(processes=200), "Processes"),
    # Counting so many descriptors must not keep the executor from answering.
    ("open descriptors", Limits(), "Processes"),
    ("memory", Limits(memory_bytes=200_000_000), "Memory"),
    ("shared memory", Limits(memory_bytes=200_000_000), "Memory"),
    ("memory without a name", Limits(memory_bytes=200_000_000), "Memory"),
    ("disk", Limits(disk_bytes=50_000_000), "Disk"),
    ("disk without a name", Limits(disk_bytes=50_000_000), "Disk"),
]


@pytest.mark.parametrize(
    ("attack", "limits", "cause", "user"),
    # Only root can become another user.
    [(*one, user) for one in EXHAUSTING for user in ("0", "1234") if user == "0" or one[2] != "Processes"],
)
async def test_exhausted_resources_affect_only_the_workspace_that_used_them(
    masked: Inside, attack: str, limits: Limits, cause: str, user: str
) -> None:
    scripts = {
        "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "fork bomb of two users": "import os, time\nfor user in 1, 2:\n    if os.fork() == 0:\n"
        "        os.setuid(user)\n        while True:\n            try:\n                os.fork()\n"
        "            except OSError:\n                time.sleep(100)\ntime.sleep(100)",
        "threads of two users": "import os, threading, time\nfor user in 1, 2:\n    if os.fork() == 0:\n"
        "        os.setuid(user)\n        for _ in range(150):\n"
        "            threading.Thread(target=time.sleep, args=(100,)).start()\ntime.sleep(100)",
        "open descriptors": "import os, time\nlast = 0\ntry:\n    while True:\n        last = os.dup(0)\nexcept OSError:\n"
        f"    pass\nfor _ in range({MAX_DESCRIPTORS} // last + 1):\n    os.fork() or time.sleep(100)\ntime.sleep(100)",
        "memory": "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
        "        kept = bytearray(b'x' * 60_000_000); time.sleep(100)\ntime.sleep(100)",
        "shared memory": "import mmap, time\n"
        "kept = [mmap.mmap(-1, 10_000_000) for _ in range(50)]\n"
        "for area in kept:\n    area.write(b'x' * 10_000_000)\n    time.sleep(0.01)\ntime.sleep(100)",
        "memory without a name": "import os, time\n"
        "for _ in range(50):\n    os.write(os.memfd_create('x'), b'x' * 10_000_000)\n    time.sleep(0.01)\ntime.sleep(100)",
        "disk": "import time\nfor name in range(1000):\n"
        "    open(f'/tmp/fill-{name}', 'wb').write(b'x' * 5_000_000)\n    time.sleep(0.01)\ntime.sleep(100)",
        "disk without a name": "import os, time\nkept = []\nfor name in range(1000):\n"
        "    kept.append(open('/tmp/fill', 'wb', 0)); kept[-1].write(b'x' * 5_000_000); os.unlink('/tmp/fill')\n"
        "    time.sleep(0.01)\ntime.sleep(100)",
    }
    neighbour, culprit = await masked.make(), await masked.make(limits=limits)
    over = asyncio.Event()
    answering = asyncio.create_task(_still_answers(neighbour, over))
    command, output = await start(culprit, [_PYTHON, "-c", scripts[attack]], user=user)
    try:
        if attack == "fork bomb":
            await asyncio.sleep(1)
            await command.child.signal(signal.SIGKILL, tree=True, cause="Deadline")
        async with asyncio.timeout(60):
            ended = await command.exited
            await read_all(output)
    finally:
        over.set()
    assert ended.cause == cause
    assert await answering > 0
    again = await run(culprit, "echo again")
    if attack == "disk" and again.output == "":
        # Its processes wrote until they were killed, so the next count of its files exceeds the limit again.
        assert again.exit.cause == cause
        again = await run(culprit, "echo again")
    assert again.output == "again\n"


# Sends as many descriptors as the kernel allows one user to have in flight, through sockets that nobody reads.
_SENDS_DESCRIPTORS = """
import array, resource, socket, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
pairs = []
try:
    while True:
        pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        pairs[-1][0].setblocking(False)
        try:
            while True:
                pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 253))])
        except BlockingIOError:
            pass
except OSError as error:
    print(error.strerror, flush=True)
time.sleep(1000)
"""


_TAKES = """
import ctypes, os, resource, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
libc = ctypes.CDLL(None)
def inotify():
    if libc.inotify_init1(0) < 0:
        raise OSError("refused")
take = {"terminals": os.openpty, "inotify instances": inotify}[sys.argv[1]]
if sys.argv[2] == "one":
    take()
    sys.exit()
try:
    taken = []
    while True:
        taken.append(take())
except OSError:
    print("taken", flush=True)
time.sleep(600)
"""


# Root of a machine alone can have another user make each workspace's namespace (docs/workspaces.md).
_IS_BARE = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


@pytest.mark.parametrize("what", ["terminals", *(["inotify instances"] if _IS_BARE else [])])
async def test_a_workspace_that_exhausts_a_resource_leaves_its_neighbours_theirs(masked: Inside, what: str) -> None:
    workspace, neighbour = await masked.make(), await masked.make()
    taking, output = await start(workspace, [_PYTHON, "-c", _TAKES, what, "all"])
    assert await asyncio.to_thread(os.read, output, 99) == b"taken\n"
    done = await run(neighbour, [_PYTHON, "-c", _TAKES, what, "one"])
    await taking.child.signal(signal.SIGKILL, tree=True)
    await read_all(output)
    assert done.ok, done.output


# Prints which of the given system calls do not fail with EPERM.
_CALLS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in map(int, sys.argv[1:]):
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1:
        print(number)
"""
_DEBUGS = """
import ctypes, os
libc = ctypes.CDLL(None)
pid = os.fork()
if pid == 0:
    libc.personality(0x40000)
    os._exit(libc.ptrace(0, 0, 0, 0) or os.kill(os.getpid(), 19) or 7)
print(os.WIFSTOPPED(os.waitpid(pid, 0)[1]), libc.ptrace(7, pid, 0, 0), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("user", ["0", *(["1234"] if os.geteuid() == 0 else [])])
async def test_workspace_cannot_use_kernel_objects_that_are_counted_across_workspaces(
    masked: Inside, user: str
) -> None:
    """Keys, rings and fanotify groups are counted for all workspaces; a container may not make any of them either."""
    is_arm = os.uname().machine == "aarch64"
    numbers = [number for number in ABIS[AARCH64 if is_arm else X86_64].refused.values() if number < 500]
    x32 = [] if is_arm else [number | 0x40000000 for number in numbers]
    workspace = await masked.make()
    assert (await run(workspace, [_PYTHON, "-c", _CALLS, *map(str, numbers + x32)], user=user)).output == ""
    assert (await run(workspace, [_PYTHON, "-c", _DEBUGS], user=user)).output == "True 0 7\n"


# Its main thread ends, and the kernel shows the process as a zombie then, without memory and files.
_HIDES = """
import ctypes, mmap, subprocess, threading, time
def work():
    sleeper = subprocess.Popen(["sleep", "600"])
    print("began", flush=True)
    time.sleep(0.5)
    block = mmap.mmap(-1, 256 << 20)
    for at in range(0, BYTES, 4096):
        block[at] = 1
    time.sleep(600)
threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_program_whose_main_thread_has_ended_is_held_to_its_memory_limit(masked: Inside) -> None:
    workspace = await masked.make(limits=Limits(memory_bytes=100 << 20))
    done = await run(workspace, [_PYTHON, "-c", _HIDES.replace("BYTES", str(256 << 20))])
    assert done.exit.cause == "Memory"


async def test_program_with_an_ended_main_thread_is_killed_with_its_children(masked: Inside) -> None:
    workspace = await masked.make()
    command, output = await start(workspace, [_PYTHON, "-c", _HIDES.replace("BYTES", "0")])
    assert await asyncio.to_thread(os.read, output, 99) == b"began\n"
    await asyncio.sleep(0.1)
    await command.child.signal(signal.SIGKILL, tree=True)
    # The program that it started has the other end of this pipe too.
    async with asyncio.timeout(PATIENCE):
        assert await read_all(output) == b""


async def test_the_kernel_kills_tools_before_the_executor_when_memory_runs_out(masked: Inside) -> None:
    assert (await run(await masked.make(), "cat /proc/self/oom_score_adj")).output == "900\n"


async def test_descriptors_in_flight_do_not_prevent_new_workspaces(masked: Inside) -> None:
    """The kernel counts them by user, over all workspaces. Otherwise other rollouts would be lost, or could not be
    graded.
    """
    neighbour, culprit = await masked.make(), await masked.make()
    command, output = await start(culprit, [_PYTHON, "-c", _SENDS_DESCRIPTORS])
    told = await asyncio.get_running_loop().run_in_executor(None, os.read, output, 100)
    assert told == b"Too many references: cannot splice\n"
    for _ in range(10):
        assert (await run(await masked.make(), "echo made")).output == "made\n"
    master, slave = await neighbour.open_terminal(24, 80)
    os.close(master)
    os.close(slave)
    await command.child.signal(signal.SIGKILL, tree=True)
    await read_all(output)


@pytest.fixture(params=["masked", "plain"])
def either(request: pytest.FixtureRequest) -> Inside:
    inside: Inside = request.getfixturevalue(request.param)
    return inside


async def test_a_tool_that_kills_its_subreaper_only_ends_its_own_command(either: Inside) -> None:
    workspace = await either.make()
    other, other_output = await start(workspace, ["sleep", "1000"])
    command, output = await start(workspace, "(setsid sleep 2001 &); kill -KILL $PPID; sleep 2000")
    ended = await asyncio.wait_for(command.exited, 20)
    assert (ended.code, ended.signal) == (None, signal.SIGKILL)
    await read_all(output)  # its orphan went as well
    assert not other.exited.done()
    await other.child.signal(signal.SIGKILL, tree=True)
    await read_all(other_output)


async def test_a_tool_cannot_stall_its_workspace_by_stopping_helpers(masked: Inside) -> None:
    """Otherwise a policy could turn its own failure into an infrastructure failure, and get another attempt."""
    workspace = await masked.make()
    # A batch system that suspends a job stops subreapers too, so a stop alone is no offence.
    for _ in range(5):
        done = await asyncio.wait_for(run(workspace, "kill -STOP $PPID; sleep 0.1; echo on"), 20)
        assert (done.ok, done.output) == (True, "on\n")
    stopper = "import os, signal\nwhile True:\n    os.kill(-1, signal.SIGSTOP)"
    command, output = await start(workspace, [_PYTHON, "-c", stopper])
    assert (await asyncio.wait_for(command.exited, 20)).signal == signal.SIGKILL
    await read_all(output)
    assert (await run(workspace, "echo fine")).output == "fine\n"
    await write(workspace, "/tmp/file", b"x")


@pytest.mark.parametrize(
    "attack",
    [
        "kill -KILL $init",
        "kill -STOP $init",
        "kill -KILL $zygote",
        # Its own subreaper last: init ends a command whose subreaper has ended or stopped, before a later signal is sent.
        "kill -KILL $zygote $init $PPID",
        "kill -STOP $zygote $init $PPID",
    ],
)
async def test_a_tool_that_kills_its_own_init_is_recorded_as_the_cause(
    plain: Inside, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a policy could turn its own failure into an infrastructure failure, and get another attempt."""
    monkeypatch.setattr(watch, "_STOPPED_SECONDS", 1.0)
    workspace = await plain.make(user="0" if os.geteuid() == 0 else None)
    command, output = await start(
        workspace,
        # Wait until the command counts as started.
        "sleep 0.2; parent() { sed 's/.*) . //' /proc/$1/stat | cut -d' ' -f1; }\n"
        f"init=$(parent $PPID) zygote=$(parent $init)\n{attack}\nsleep 2000",
    )
    failure = await asyncio.wait_for(workspace.failed, 20)
    ended = await asyncio.wait_for(command.exited, 20)
    assert failure.cause == "Attacked"
    # Init may report the end of its helper before it is killed itself; such a command was killed as by any other signal.
    assert ended.cause == "Attacked" or (ended.cause, ended.signal) == (None, signal.SIGKILL)
    await read_all(output)  # nothing of it lives on
    with pytest.raises(WorkspaceFailure) as told:
        await run(workspace, "true")
    assert told.value.cause == "Attacked"


async def test_a_tool_that_kills_all_its_processes_leaves_a_working_workspace(masked: Inside) -> None:
    workspace = await masked.make()
    done = await run(workspace, "kill -9 -1; sleep 1; echo survived")
    assert done.exit.signal == signal.SIGKILL or not done.ok
    for _ in range(3):
        assert (await run(workspace, "echo fine")).output == "fine\n"
