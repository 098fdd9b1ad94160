"""What both modes guarantee, and what Overlay adds."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from agent_runtime.executor.host import FileFailure, Limits, WorkspaceFailure
from agent_runtime.executor.init.channel import StartRequest
from agent_runtime.executor.overlay import peer
from agent_runtime.executor.overlay import workspace as live_workspace
from agent_runtime.executor.overlay.workspace import spawn
from tests.integration.executor_workspaces.helpers import Inside, get, read_all, run, start, write


@pytest.fixture(params=["overlay", "plain"])
def either(request: pytest.FixtureRequest) -> Inside:
    inside: Inside = request.getfixturevalue(request.param)
    return inside


async def test_exit_codes_and_signals_of_the_command_are_reported(either: Inside) -> None:
    workspace = await either.make()
    assert (await run(workspace, "exit 7")).exit.code == 7
    assert (await run(workspace, "kill -TERM $$")).exit.signal == signal.SIGTERM


async def test_many_commands_run_at_once_and_keep_their_own_results(either: Inside) -> None:
    workspace = await either.make()
    done = await asyncio.gather(*(run(workspace, f"echo {index}; exit {index}") for index in range(40)))
    assert [(entry.exit.code, entry.output) for entry in done] == [(index, f"{index}\n") for index in range(40)]


async def test_large_environments_and_arguments_arrive_whole(either: Inside) -> None:
    workspace = await either.make()
    done = await run(
        workspace, ["sh", "-c", 'printf %s "$BIG$1" | wc -c', "sh", "y" * 100_000], env={"BIG": "x" * 120_000}
    )
    assert done.output.strip() == "220000"


async def test_large_commands_that_have_to_wait_are_not_mixed_with_small_ones(either: Inside) -> None:
    workspace = await either.make()
    sizes = [100_000 if index % 2 else index for index in range(24)]
    commands = [["sh", "-c", 'printf %s "$1" | wc -c', "sh", "y" * size] for size in sizes]
    done = await asyncio.gather(*(run(workspace, command) for command in commands))
    assert [int(entry.output) for entry in done] == sizes


async def test_command_with_an_unknown_start_is_awaited_for_a_limited_time(
    either: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = await either.make()
    monkeypatch.setattr(live_workspace, "_ANSWER_SECONDS", 1.0)
    with monkeypatch.context() as lost:
        lost.setattr(peer.Peer, "start_now", lambda *_: True)
        starting = asyncio.create_task(run(workspace, "true"))
        await asyncio.sleep(0)
    ended = (await asyncio.wait_for(starting, 20)).exit
    assert (ended.code, ended.signal) == (None, signal.SIGKILL)
    assert (await run(workspace, "true")).ok


async def test_bytes_that_are_not_utf8_are_unchanged_in_arguments_and_output(either: Inside) -> None:
    workspace = await either.make()
    done = await run(workspace, ["printf", "%s", os.fsdecode(b"\xff\xfea")])
    assert os.fsencode(done.output) == b"\xff\xfea"


async def test_a_missing_program_folder_or_user_is_named_in_the_error(either: Inside) -> None:
    workspace = await either.make()
    with pytest.raises(FileFailure, match="'no-such-program' does not exist on PATH"):
        await run(workspace, ["no-such-program"])
    with pytest.raises(FileFailure, match="working folder '/no/such'"):
        await run(workspace, "true", cwd="/no/such")
    with pytest.raises(FileFailure, match="user 'nobody-at-all' is not in"):
        await run(workspace, "true", user="nobody-at-all")
    assert (await run(workspace, "true")).ok


async def test_killed_tree_includes_daemons_but_no_other_commands_server(either: Inside) -> None:
    workspace = await either.make()
    server, server_output = await start(workspace, ["sleep", "1001"])
    script = "setsid sh -c '(setsid sleep 1002 &) ; (sleep 1003 &)' & sleep 1004 & wait"
    command, output = await start(workspace, script)
    await _until_running(workspace, 4)
    await command.child.signal(signal.SIGKILL, tree=True, cause="Deadline")
    ended = await asyncio.wait_for(command.exited, 20)
    assert (ended.signal, ended.cause) == (signal.SIGKILL, "Deadline")
    await read_all(output)  # end of file: nobody of the tree holds it any more
    assert not server.exited.done()
    await server.child.signal(signal.SIGTERM, tree=False)
    assert (await server.exited).signal == signal.SIGTERM
    await read_all(server_output)


async def _until_running(workspace: object, count: int) -> None:
    for _ in range(400):
        done = await run(workspace, "ps -eo args= | grep -c '^sleep 100[0-9]$'")  # type: ignore[arg-type]
        if int(done.output) >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{count} sleeps expected, {done.output} run")


async def test_signal_at_the_deadline_never_reaches_the_next_command(either: Inside) -> None:
    """A signal used to reach the next command if it started while the process list was read again."""
    workspace = await either.make()
    for _ in range(20):
        command, output = await start(workspace, "sleep 2000")
        ending = asyncio.create_task(command.child.signal(signal.SIGKILL, tree=True, cause="Deadline"))
        await asyncio.wait_for(command.exited, 20)
        assert (await run(workspace, "echo fine")).output == "fine\n"
        await ending
        await read_all(output)


async def test_command_ends_although_its_background_server_continues(either: Inside) -> None:
    workspace = await either.make()
    done = await run(workspace, "sleep 1001 </dev/null >/dev/null 2>&1 & echo started")
    assert done.ok
    await _until_running(workspace, 1)
    await workspace.destroy()
    # Arguments that only this test uses: nothing of it may live on the machine.
    assert not _machine_runs("sleep\x001001")


def _machine_runs(arguments: str) -> bool:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if arguments.encode() in file.read():
                    return True
        except OSError:
            continue
    return False


async def test_signal_reaches_only_the_command_unless_the_tree_is_requested(either: Inside) -> None:
    workspace = await either.make()
    command, output = await start(
        workspace, "trap 'echo got it; exit 3' USR1; echo ready; while :; do sleep 0.01; done"
    )
    assert await asyncio.to_thread(os.read, output, 99) == b"ready\n"
    await command.child.signal(signal.SIGUSR1, tree=False)
    assert (await asyncio.wait_for(command.exited, 20)).code == 3
    assert await read_all(output) == b"got it\n"


async def test_destroying_a_workspace_ends_and_reports_its_running_commands(either: Inside) -> None:
    workspace = await either.make()
    command, output = await start(workspace, ["sleep", "1000"])
    await workspace.destroy()
    ended = await command.exited
    assert (ended.signal, ended.cause) == (signal.SIGKILL, "WorkspaceEnded")
    assert await read_all(output) == b""
    with pytest.raises(WorkspaceFailure):
        await run(workspace, "true")


async def test_a_terminal_controls_its_command(either: Inside) -> None:
    workspace = await either.make()
    master, slave = await workspace.open_terminal(33, 77)
    request = StartRequest("stty size; tty; echo on; exec cat </dev/tty", tty=True)
    command = await spawn(workspace, request, [slave] * 3)
    output = b""
    while b"on\r\n" not in output:
        output += await asyncio.to_thread(os.read, master, 4096)
    os.write(master, b"\x03")  # Ctrl-C reaches only those whom the terminal controls
    ended = await asyncio.wait_for(command.exited, 20)
    os.close(master)
    assert b"33 77" in output
    assert b"/dev/pts/" in output
    assert ended.signal == signal.SIGINT or ended.code == 130


async def test_home_user_and_path_are_set_by_default(either: Inside) -> None:
    workspace = await either.make(env={"FROM_WORKSPACE": "1"})
    done = await run(workspace, 'echo "$HOME|$USER|$FROM_WORKSPACE|$CALL"; test -n "$PATH"', env={"CALL": "2"})
    home, user, from_workspace, call = done.output.strip().split("|")
    assert done.ok
    assert home
    assert user
    assert (from_workspace, call) == ("1", "2")


async def test_no_descriptor_of_the_executor_reaches_a_command(either: Inside) -> None:
    workspace = await either.make()
    done = await run(workspace, ["sh", "-c", "ls /proc/$$/fd"])
    assert set(done.output.split()) <= {"0", "1", "2", "3"}  # 3: the shell's own, while ls runs


async def test_processes_over_their_number_are_stopped_with_a_cause(either: Inside) -> None:
    workspace = await either.make(limits=Limits(processes=20))
    # Two users, each below the limit, so that the limit for a user is not what stops them, and neither ends before both run.
    users = range(2000, 2002) if either.host.mode == "Overlay" and os.geteuid() == 0 else (None,)
    script = "for i in $(seq 12); do sleep 1000 & done; sleep 1000"
    if users == (None,):
        script = script.replace("12", "40")
    commands = [await start(workspace, script, user=None if user is None else str(user)) for user in users]
    ended = await asyncio.wait_for(asyncio.gather(*(command.exited for command, _ in commands)), 30)
    assert {entry.cause for entry in ended} == {"Processes"}
    assert (await run(workspace, "true")).ok


async def test_memory_over_the_limit_is_stopped_with_a_cause(either: Inside) -> None:
    workspace = await either.make(limits=Limits(memory_bytes=150_000_000))
    # Each process alone stays below RLIMIT_DATA; together they are over.
    hog = "import time; x = b'x' * 60_000_000; time.sleep(1000)"
    script = f'for i in 1 2 3 4; do {_PYTHON} -c "{hog}" & done; wait'
    command, output = await start(workspace, script)
    ended = await asyncio.wait_for(command.exited, 40)
    await read_all(output)
    assert ended.cause == "Memory"
    assert (await run(workspace, "true")).ok


_PYTHON = "/usr/bin/python3"


async def test_a_file_over_its_limit_is_refused(either: Inside) -> None:
    workspace = await either.make(limits=Limits(file_bytes=1_000_000))
    await write(workspace, "/small", b"x" * 900_000)
    with pytest.raises(FileFailure, match="too large"):
        await write(workspace, "/large", b"x" * 1_100_000)
    assert not (await run(workspace, "head -c 1100000 /dev/zero > ./large")).ok


async def test_a_failing_create_leaves_no_trace(either: Inside) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(WorkspaceFailure, match="parent"):
            await either.make(parent="nobody")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_program_can_be_executed_as_soon_as_it_is_written(either: Inside) -> None:
    workspace = await either.make()
    for number in range(40):
        await write(workspace, f"/program-{number}", b"#!/bin/sh\necho ran\n", mode=0o755)
        done = await run(workspace, f"./program-{number}")
        assert done.output == "ran\n"


async def test_file_is_read_and_written_at_its_absolute_path(either: Inside) -> None:
    workspace = await either.make()
    await write(workspace, "/tmp/a/b/c.txt", b"hello", mode=0o640)
    assert await get(workspace, "read", path="/tmp/a/b/c.txt") == b"hello"
    assert await get(workspace, "read", path="/tmp/a/b/c.txt", offset=1, limit=3) == b"ell"
    described = await workspace.file("stat", {"path": "/tmp/a/b/c.txt"})
    assert (described["type"], described["size"], described["mode"]) == ("file", 5, 0o640)
    await workspace.file("remove", {"path": "/tmp/a"})
    with pytest.raises(FileFailure) as failure:
        await get(workspace, "read", path="/tmp/a/b/c.txt")
    assert failure.value.errno == 2
