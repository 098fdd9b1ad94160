"""Subreapers in C where they are compiled, else in Python, which also handles unusual commands. Both behave the same."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_runtime.executor.host import FileFailure
from agent_runtime.executor.init import native
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.workspace import Workspace
from tests.integration.executor_workspaces.conftest import opened
from tests.integration.executor_workspaces.helpers import Inside, read_all, run, start, write

PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\nada:x:1000:1001:Ada:/home/ada:/bin/bash\nbroken\n:x:5:5:::\nodd:x:abc:1::/:\n"
    "homeless:x:1500:1500:::/bin/sh\n"
)
GROUP = "root:x:0:\nwheel:x:10:ada,bob\nada:x:1001:\ndocker:x:999:bob,ada\nagain:x:999:ada\nbad:x:abc:ada\n"
USERS = ["root", "0", "ada", "1000", "ada:wheel", "ada:7", "ada:", "4242", "4242:5", "homeless", "0:docker", "007"]
REFUSED_USERS = ["nobody-here", "odd", "ada:nothing", "4294967295", "x" * 300]


@pytest.fixture(autouse=True)
def as_started_by_nohup() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGQUIT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(params=["C", "Python"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the language for the workspaces that the test creates from then on."""
    chosen: str = request.param
    if chosen == "C":
        assert shutil.which("cc") is None or native.is_compiled(), "subreaper.c was not compiled: make install-test"
    else:
        monkeypatch.setattr(native, "_library", None)
    return chosen


@pytest.fixture
async def inside(language: str, tmp_path: Path) -> AsyncIterator[Inside]:
    async with opened(HostConfig(state_dir=str(tmp_path), mode="Overlay", places=20)) as host:
        yield Inside(host)


async def _identity(workspace: Workspace, user: str) -> str:
    try:
        return (await run(workspace, 'id -u; id -g; id -G; echo "$HOME $USER $LOGNAME"', user=user)).output
    except FileFailure as failure:
        return f"{failure.path}: {failure.message}"


async def test_a_command_runs_as_the_same_user_in_both_languages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name, uid, pairs, groups, home: from the workspace's own lists, also when they change meanwhile."""
    seen: list[list[str]] = []
    for language in ("C", "Python"):
        with monkeypatch.context() as patch:
            if language == "Python":
                patch.setattr(native, "_library", None)
            (tmp_path / language).mkdir()
            async with opened(HostConfig(state_dir=str(tmp_path / language), mode="Overlay", places=2)) as host:
                workspace = await Inside(host).make()
                before = await _identity(workspace, "root")
                await write(workspace, "/etc/passwd", PASSWD.encode())
                await write(workspace, "/etc/group", GROUP.encode())
                answers = [before, *[await _identity(workspace, user) for user in [*USERS, *REFUSED_USERS]]]
                await write(workspace, "/etc/group", f"{GROUP}long:x:77:{'x' * 9000},ada\n".encode())
                await write(workspace, "/etc/passwd", PASSWD.replace("1000", "1234").encode() + b"nul:\0:1:1:::\n")
                seen.append([*answers, await _identity(workspace, "ada")])
    assert seen[0] == seen[1]
    assert "1234\n1001\n1001 10 77 999\n/home/ada ada ada\n" in seen[0]


async def test_the_environment_is_that_of_the_workspace_and_the_command(inside: Inside) -> None:
    workspace = await inside.make(env={"FROM": "spec", "HOME": "/of/spec"})
    done = await run(workspace, ["env"], env={"MORE": "a=b\n", "USER": "nobody", "EMPTY": ""})
    for line in ("FROM=spec", "HOME=/of/spec", "MORE=a=b", "USER=nobody", "LOGNAME=root", "EMPTY="):
        assert line in done.output.splitlines()
    assert done.output.count("PATH=") == 1
    assert (await run(workspace, ["env"], env={"PATH": "/usr/bin:/bin"})).output.count("PATH=/usr/bin:/bin\n") == 1


async def test_folders_are_absolute_or_start_at_the_working_folder(inside: Inside) -> None:
    workspace = await inside.make(working_dir="/work/here")
    assert (await run(workspace, ["pwd"])).output == "/work/here\n"
    assert (await run(workspace, ["pwd"], cwd="/tmp")).output == "/tmp\n"
    await run(workspace, "mkdir below")
    assert (await run(workspace, ["pwd"], cwd="below")).output == "/work/here/below\n"
    assert (await run(workspace, ["pwd"])).output == "/work/here\n"


async def test_failed_start_is_explained_and_the_next_command_runs(inside: Inside) -> None:
    workspace = await inside.make()
    await write(workspace, "/tmp/no-interpreter", b"#!/no/such\n", mode=0o755)
    await write(workspace, "/tmp/garbage", b"\x7fELFgarbage", mode=0o755)
    await write(workspace, "/tmp/not-executable", b"#!/bin/sh\n", mode=0o644)
    for argv, said in [
        (["no-such-program"], "'no-such-program' does not exist on PATH"),
        (["/tmp/not-executable"], "'/tmp/not-executable' is not an executable file"),
        (["/tmp"], "'/tmp' is not an executable file"),
        (["/tmp/no-interpreter"], "program '/tmp/no-interpreter': its interpreter"),
        (["/tmp/garbage"], "program '/tmp/garbage': Exec format error"),
        (["echo", "x" * 140_000], "arguments and environment are too long"),
        (["true", *["x" * 1000] * 3000], "arguments and environment are too long"),
    ]:
        with pytest.raises(FileFailure) as failure:
            await run(workspace, argv)
        assert said in failure.value.message
        assert (await run(workspace, "echo fine")).output == "fine\n"
    with pytest.raises(FileFailure, match="working folder '/no/such'"):
        await run(workspace, "true", cwd="/no/such")
    assert (await run(workspace, "echo fine")).output == "fine\n"


async def test_more_arguments_and_variables_than_fit_a_packet_arrive(inside: Inside) -> None:
    workspace = await inside.make()
    arguments = [str(number) for number in range(6000)]
    assert (await run(workspace, ["sh", "-c", "echo $# ${6000}", "sh", *arguments])).output == "6000 5999\n"
    variables = {f"V{number}": str(number) for number in range(5000)}
    assert (await run(workspace, "env | grep -c ^V", env=variables)).output == "5000\n"
    assert (await run(workspace, ["printf", "%s", "é\n\x01"])).output == "é\n\x01"


async def test_the_shell_is_the_best_that_the_workspace_has_at_that_time(inside: Inside) -> None:
    workspace = await inside.make()
    shell = "readlink /proc/$$/exe; :"
    assert "bash" in (await run(workspace, shell)).output
    await run(workspace, "mv /bin/bash /bin/other 2>/dev/null; mv /usr/bin/bash /usr/bin/other 2>/dev/null; :")
    assert "bash" not in (await run(workspace, shell)).output


async def test_command_has_default_signals_and_only_its_own_descriptors(inside: Inside) -> None:
    workspace = await inside.make()
    status = (await run(workspace, ["cat", "/proc/self/status"])).output
    masks = dict(line.split(":") for line in status.splitlines() if line.startswith("Sig"))
    # The C library keeps two real-time signals for itself, and leaves them ignored where it spawns.
    assert [int(masks[name], 16) & 0x7FFFFFFF for name in ("SigBlk", "SigIgn", "SigCgt")] == [0, 0, 0]
    assert (await run(workspace, ["ls", "/proc/self/fd"])).output.split() == ["0", "1", "2", "3"]
    session = (await run(workspace, ["sh", "-c", "cut -d' ' -f1,5,6 /proc/$$/stat"])).output.split()
    assert len(set(session)) == 1  # leader of its process group and of its session


async def test_leftover_process_keeps_its_subreaper_and_delays_no_command(inside: Inside) -> None:
    workspace = await inside.make()
    for number in range(4):
        done = await run(workspace, "(sleep 77 &) >/dev/null 2>&1; (setsid sleep 78 &) >/dev/null 2>&1; echo started")
        assert done.output == "started\n", number
    # The last ones may still become what they are to be.
    await run(workspace, "until test $(ps -eo args= | grep -c '^sleep 7[78]$') = 8; do sleep 0.1; done")
    assert (await run(workspace, "ps -eo stat= | grep -c ^Z; :")).output == "0\n"


async def test_command_whose_subreaper_is_killed_immediately_has_ended(inside: Inside) -> None:
    """It is killed before its start was reported."""
    workspace = await inside.make()
    for _ in range(10):
        done = await run(workspace, "kill -9 $PPID; sleep 50")
        assert done.exit.signal == signal.SIGKILL
    assert (await run(workspace, "ps -eo args= | grep -c '^sleep 50$'; :")).output == "0\n"
    assert (await run(workspace, "echo fine")).output == "fine\n"


async def test_a_long_command_is_signalled_and_a_short_one_runs_beside_it(inside: Inside) -> None:
    workspace = await inside.make()
    command, output = await start(
        workspace, "trap 'echo got it; exit 3' USR1; echo ready; while :; do sleep 0.01; done"
    )
    assert (await asyncio.gather(*(run(workspace, f"exit {code}") for code in range(5))))[4].exit.code == 4
    assert await asyncio.get_running_loop().run_in_executor(None, os.read, output, 6) == b"ready\n"
    await command.child.signal(signal.SIGUSR1, tree=False)
    assert (await asyncio.wait_for(command.exited, 20)).code == 3
    assert await read_all(output) == b"got it\n"


async def test_no_tool_can_trace_or_read_the_process_that_starts_commands(inside: Inside) -> None:
    workspace = await inside.make()
    read = "for e in mem environ fd exe; do p=/proc/$PPID/$e; (ls $p/ || cat $p) >/dev/null 2>&1 && echo $e; done; :"
    assert (await run(workspace, read)).output == ""
    assert (await run(workspace, read, user="4242")).output == ""
