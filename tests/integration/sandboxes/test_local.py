"""The local provider on this machine: what survives a crash, what a workspace can see, and what an ordinary user gets."""

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.sandboxes.base import Checkable, Fence, Fenced, FileError, SandboxFailure, Workspace, WorkspaceLimit
from agent_runtime.sandboxes.executor_client import silence
from agent_runtime.sandboxes.factory import open_provider
from agent_runtime.sandboxes.local.environment import running_environment
from agent_runtime.sandboxes.local.provider import LocalProvider, _plain_homes
from rollout_api.rollout_job import RolloutJobSpec
from rollout_api.sandbox import Provider
from tests.integration.sandboxes.conftest import FIRST, NOBODY, REPOSITORY, python_for_nobody, spec, template

CRASHING_RUNNER = Path(__file__).with_name("crashing_runner.py")
only_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="is about what root's tools become; as a user, they are that user"
)


async def say(workspace: Workspace, command: str, key: str) -> str:
    result = await workspace.run(command, key=key, deadline_seconds=60)
    return (result.stdout + result.stderr).decode().strip()


@contextlib.contextmanager
def running(arguments: list[str], **options: Any) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a runner process; return it and the JSON that it prints once its workspace exists."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"the runner ended with {process.wait()} before it had a workspace"
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def here() -> dict[str, str]:
    """Return the environment of a Python that finds this repository."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_a_killed_runner_loses_no_command_and_runs_none_twice(tmp_path: Path, mode: str) -> None:
    arguments = [sys.executable, str(CRASHING_RUNNER), str(tmp_path), mode]
    with running(arguments, env=here()) as (process, printed):
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    provider = LocalProvider(tmp_path, template(mode), places=4)
    await provider.open()
    workspace = await provider.reattach(printed["handle"], spec=spec(), fence=Fence(2, "second"))
    command = "sleep 1.5; echo once >> count; cat count"
    assert await say(workspace, command, "1:slow") == "once"
    assert await say(workspace, "cat count", "1:look") == "once"
    await provider.close()


@only_root
async def test_plain_commands_run_when_only_root_can_enter_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as closed:  # of mode 700, and short enough for a socket
        monkeypatch.setattr(tempfile, "tempdir", closed)
        provider = LocalProvider(tmp_path / "run", template("Plain"), places=1)
        await provider.open()
        workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
        assert await say(workspace, "id -un", "1:who") == "nobody"
        await provider.close()


@only_root
async def test_reattached_workspace_still_reports_that_its_programs_ended_it(tmp_path: Path) -> None:
    first, second = (LocalProvider(tmp_path, template("Plain"), places=2) for _ in range(2))
    await first.open()
    workspace = await first.acquire(spec(user="0"), attempt="0-1", fence=FIRST, name="agent")
    attack = "kill -KILL $(parent() { sed 's/.*) . //' /proc/$1/stat | cut -d' ' -f1; }; parent $PPID); sleep 30"
    with pytest.raises(WorkspaceLimit):
        await workspace.run(attack, key="1:attack", deadline_seconds=60)
    await first.close(keep=True)
    await second.open()
    again = await second.reattach(workspace.handle, spec=spec(user="0"), fence=Fence(2, "second"))
    with pytest.raises(WorkspaceLimit, match="killed"):
        await again.run(attack, key="1:attack", deadline_seconds=60)
    await again.release()
    await second.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_workspace_of_a_stopped_run_stays_for_a_limited_time(tmp_path: Path, mode: str) -> None:
    first, second, third = (LocalProvider(tmp_path, template(mode), places=2) for _ in range(3))
    await first.open()
    workspace = await first.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    await first.close(keep=True, at_most=600)
    await second.open()  # within the time
    again = await second.reattach(workspace.handle, spec=spec(), fence=Fence(2, "second"))
    assert await say(again, "echo still", "1:say") == "still"
    (record,) = (tmp_path / "sandboxes").glob("*.json")
    executor = Path(f"/proc/{json.loads(record.read_text())['pid']}")
    await second.close(keep=True, at_most=1)
    async with asyncio.timeout(60):
        while executor.exists() and executor.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await third.open()
    with pytest.raises(SandboxFailure):
        await third.reattach(workspace.handle, spec=spec(), fence=Fence(3, "third"))
    await third.close()


async def test_executor_that_does_not_answer_delays_a_stopped_run_for_seconds_only(tmp_path: Path) -> None:
    first, second = (LocalProvider(tmp_path, template("Plain"), places=2) for _ in range(2))
    await first.open()
    workspace = await first.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    (record,) = (tmp_path / "sandboxes").glob("*.json")
    pid = json.loads(record.read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.wait_for(first.close(keep=True, at_most=60), 25)
    finally:
        os.kill(pid, signal.SIGCONT)
    await second.open()
    again = await second.reattach(workspace.handle, spec=spec(), fence=Fence(2, "second"))
    assert await say(again, "echo still", "1:say") == "still"
    await second.close()


async def test_standstill_of_an_executor_is_reported_to_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(silence, "SILENT_SECONDS", 1.0)
    provider = LocalProvider(tmp_path, template("Plain"), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    (record,) = (tmp_path / "sandboxes").glob("*.json")
    pid, paused, continues = json.loads(record.read_text())["pid"], asyncio.Event(), asyncio.Event()
    assert isinstance(workspace, Checkable)
    with workspace.silence(lambda is_paused: (paused if is_paused else continues).set()):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.wait_for(paused.wait(), 30)
            continues.clear()
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(continues.wait(), 30)
    await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_the_secret_of_an_executor_is_its_owners_alone_and_in_no_handle(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    (record,) = (tmp_path / "run" / "sandboxes").glob("*.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    assert json.loads(record.read_text())["token"] not in json.dumps(dict(workspace.handle))
    json.dumps(dict(workspace.description))
    assert "pathReason" in workspace.description
    await provider.close()
    assert list((tmp_path / "run" / "sandboxes").glob("*.json")) == []


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_executors_of_a_run_know_its_locks(tmp_path: Path, mode: str) -> None:
    for run in ("locked", "other"):
        provider = LocalProvider(tmp_path / run, template(mode), places=2)
        (tmp_path / run).mkdir()
        if run == "locked":
            (tmp_path / run / "shard-0.lock").touch()
        await provider.open()
        await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
        (path,) = (tmp_path / run / "sandboxes").glob("*.json")
        configuration = Path(json.loads(path.read_text())["home"]) / "executor" / "config.json"
        assert json.loads(configuration.read_text()).get("runnerLocks") == {"locked": str(tmp_path / run)}.get(run)
        await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_close_ends_the_executors_and_removes_their_folders(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    assert provider.sandbox_states() == {"Ready": 1}
    (path,) = (tmp_path / "run" / "sandboxes").glob("*.json")
    record = json.loads(path.read_text())
    await provider.close()
    assert not Path(record["home"]).exists()
    assert not Path(f"/proc/{record['pid']}").exists()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_workspace_files_are_deleted_when_no_runner_returns(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode, idleSeconds=1), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    (path,) = (tmp_path / "run" / "sandboxes").glob("*.json")
    record = json.loads(path.read_text())
    await say(workspace, "mkdir -p deep/er; head -c 1000000 /dev/zero > deep/er/left", "1:write")
    await provider.close(keep=True)
    assert await asyncio.to_thread(os.waitpid, record["pid"], 0) == (record["pid"], 0)
    assert not Path(record["home"]).exists()


async def _last(pieces: AsyncIterator[bytes]) -> bytes:
    return [piece async for piece in pieces][-1]


NESTS_FOLDERS = """
import os
folder = os.open(".", os.O_RDONLY)
for _ in range(3000):
    os.mkdir("d", dir_fd=folder)
    folder, above = os.open("d", os.O_RDONLY, dir_fd=folder), folder
    os.close(above)
"""


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_files_that_cannot_be_packed_are_a_file_error_and_no_lost_sandbox(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    try:
        workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
        assert await say(workspace, f"python3 -c '{NESTS_FOLDERS}'", "1:a") == ""
        pieces = workspace.tar(".")
        await anext(pieces)  # the reply has begun
        with pytest.raises(FileError, match="path of 4096 bytes"):
            await asyncio.wait_for(_last(pieces), 60)
        assert await say(workspace, "echo alive", "1:b") == "alive"
    finally:
        await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_lost_sandbox_is_replaced_for_the_next_attempt(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    (path,) = (tmp_path / "run" / "sandboxes").glob("*.json")
    command = asyncio.create_task(workspace.run("sleep 30", key="1:a", deadline_seconds=60))
    await asyncio.sleep(0.3)
    os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
    with pytest.raises(SandboxFailure) as failure:
        await command
    assert failure.value.reason == "SandboxLost"
    await workspace.release()
    again = await provider.acquire(spec(), attempt="0-2", fence=FIRST, name="agent")
    assert await say(again, "cat setup.log", "1:a") == "prepared"
    with pytest.raises(SandboxFailure):
        await provider.reattach(workspace.handle, spec=spec(), fence=Fence(2, "second"))
    await provider.close()


async def test_lost_sandbox_is_replaced_for_another_group(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path / "run", template("Overlay"), places=2)
    await provider.open()
    await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    (path,) = (tmp_path / "run" / "sandboxes").glob("*.json")
    os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
    other = replace(spec(), group="another")
    workspace = await provider.acquire(other, attempt="1-1", fence=FIRST, name="agent")
    assert await say(workspace, "cat setup.log", "1:a") == "prepared"
    await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_processes_that_tools_leave_running_end_before_grading(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    loop = "while :; do date +%s%N > alive; sleep 0.05; done"
    await say(workspace, f"setsid sh -c '{loop}' >/dev/null 2>&1 & until [ -s alive ]; do sleep 0.05; done", "1:a")
    await workspace.kill_all(key="2:kill")
    before = await workspace.read("alive")
    await asyncio.sleep(0.3)
    assert await workspace.read("alive") == before
    await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_keys_of_the_runner_reach_no_command(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "do-not-leak")
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(env={"TASK": "yes"}), attempt="0-1", fence=FIRST, name="agent")
    seen = await say(workspace, "env; cat /proc/self/environ /proc/$PPID/environ 2>/dev/null", "1:a")
    assert "TASK=yes" in seen
    assert "do-not-leak" not in seen
    await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_command_gets_cwd_environment_and_stdin_and_reports_a_failed_start(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    await workspace.write("sub/in", b"", key="1:a")
    result = await workspace.run(
        "ls; echo $A; cat", key="1:b", deadline_seconds=30, cwd="/workspace/sub", env={"A": "1"}, stdin=b"\xff\x00"
    )
    assert result.stdout == b"in\n1\n\xff\x00"
    missing = await workspace.run(["no-such-program"], key="1:c", deadline_seconds=30)
    assert (missing.ok, missing.exit_code, missing.cause) == (False, None, "NotStarted")
    assert b"no-such-program" in missing.stderr
    elsewhere = await workspace.run("true", key="1:d", deadline_seconds=30, cwd="/no/such/folder")
    assert (elsewhere.ok, elsewhere.cause) == (False, "NotStarted")
    await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_long_output_keeps_its_head_and_tail(tmp_path: Path, mode: str) -> None:
    provider = LocalProvider(tmp_path / "run", template(mode), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    result = await workspace.run(
        "echo first; seq 100000; echo last", key="1:a", deadline_seconds=30, head_bytes=1000, tail_bytes=500
    )
    assert result.stdout.startswith(b"first\n1\n")
    assert result.stdout.endswith(b"100000\nlast\n")
    assert (len(result.stdout), result.stdout_head) == (1500, 1000)
    assert result.stdout_omitted == result.stdout_bytes - 1500
    await provider.close()


async def test_the_setup_of_a_group_runs_once_for_all_its_members(overlay: LocalProvider) -> None:
    unique = spec(setup=["cat /proc/sys/kernel/random/uuid > id"])
    members = await asyncio.gather(
        *(overlay.acquire(unique, attempt=f"{n}-1", fence=FIRST, name="agent") for n in range(5))
    )
    ids = {await say(member, "cat id", "1:a") for member in members}
    assert len(ids) == 1
    other = await overlay.acquire(spec(setup=list(unique.setup), group="task-2"), attempt="9-1", fence=FIRST, name="a")
    assert await say(other, "cat id", "1:a") not in ids


async def test_places_are_reused_by_hundreds_of_workspaces(overlay: LocalProvider) -> None:
    async with asyncio.timeout(60):
        for number in range(300):
            workspace = await overlay.acquire(spec(), attempt=f"{number}-1", fence=FIRST, name="agent")
            await workspace.release()


async def test_next_process_forks_from_the_prepared_state_of_the_last_one(tmp_path: Path) -> None:
    unique = spec(setup=["cat /proc/sys/kernel/random/uuid > id"])
    ids = []
    for attempt in ("0-1", "1-1"):
        provider = LocalProvider(tmp_path / "run", template("Overlay"), places=4)
        await provider.open()
        workspace = await provider.acquire(unique, attempt=attempt, fence=FIRST, name="agent")
        ids.append(await say(workspace, "cat id", "1:a"))
        await provider.close(keep=attempt == "0-1")
    assert ids[0] == ids[1]


async def test_homes_secrets_sockets_and_the_run_folder_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "output").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    provider = LocalProvider(tmp_path / "run", template("Overlay"), places=2, private=[tmp_path / "output"])
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    hidden = ["/etc/shadow", "/run/*", "/home/*", "/tmp/*"]
    for folder in ("run", "output", "home"):
        (tmp_path / folder / "key").write_text("secret")
        hidden.append(f"{tmp_path / folder}/*")
    for number, path in enumerate(hidden):
        assert await say(workspace, f"cat {path} 2>/dev/null", f"1:{number}") == ""
    own = [prefix for prefix in running_environment().prefixes if prefix.startswith("/root/")]
    ways = {Path(prefix).parts[2] for prefix in own}
    assert set((await say(workspace, "ls -A /root", "2:a")).split()) == ways
    await provider.close()


async def test_files_of_jobs_are_hidden_in_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, tasks and manifest contain hidden tests, and the temporary folder contains the sandboxes of other jobs."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # workspaces have another /tmp
        folder = Path(name)
        monkeypatch.setattr(tempfile, "tempdir", f"{name}/temporary")
        for secret in (
            "tasks%20.jsonl",
            "job.yaml",
            "serve/request.json",
            "temporary/token",
            "out put/job.json",
            "seen",
        ):
            (folder / secret).parent.mkdir(exist_ok=True)
            (folder / secret).write_text(f"content of {secret}")
        job = RolloutJobSpec.model_validate(
            {
                "tasks": {"from": {"uri": f"file://{name}/tasks%20.jsonl"}},  # as written: no escapes
                "agent": {"type": "Oracle"},
                "sandbox": template("Overlay").wire(),
                "output": {"uri": f"file://{name}/out%20put"},
            }
        )
        private = [folder / "job.yaml", folder / "serve"]
        provider = open_provider(job, folder / "temporary" / "run", Provider.LOCAL, base_dir=folder, private=private)
        await provider.open()
        try:
            workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
            assert await say(workspace, f"cat {name}/* {name}/*/* 2>/dev/null", "1:a") == "content of seen"
        finally:
            await provider.close()


async def test_the_python_of_this_environment_runs_the_tests_of_a_task(overlay: LocalProvider) -> None:
    workspace = await overlay.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    await workspace.write("test_it.py", b"def test_it():\n    assert 1 + 1 == 2\n", key="1:a")
    assert "1 passed" in await say(workspace, "python3 -m pytest -q", "1:b")
    own = running_environment()
    assert "1 passed" in await say(workspace, f"{own.bin}/python3 -m pytest -q", "1:c")
    assert own.bin in (await say(workspace, "echo $PATH", "1:d")).split(":")
    refused = await say(workspace, f"touch {own.bin}/planted && echo written", "1:e")
    assert "written" not in refused


async def test_a_workspace_reaches_no_network(overlay: LocalProvider) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    workspace = await overlay.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    await workspace.enter("agent", key="1:phase")
    assert "connected" not in await say(workspace, f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo connected", "1:a")
    assert await say(workspace, "cat /proc/net/route | wc -l", "1:b") == "1"
    server.close()


@only_root
async def test_workspace_root_has_no_rights_on_this_machine(overlay: LocalProvider) -> None:
    workspace = await overlay.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    assert await say(workspace, "id -u", "1:a") == "0"
    command = asyncio.create_task(workspace.run("exec sleep 31.4159", key="1:b", deadline_seconds=60))
    found: list[int] = []
    while not found:
        await asyncio.sleep(0.05)
        found = [
            int(status.split("Uid:")[1].split()[0])
            for folder in Path("/proc").glob("[0-9]*")
            if text_of(folder / "cmdline") == "sleep\x0031.4159\x00" and (status := text_of(folder / "status"))
        ]
    assert all(uid >= 65536 for uid in found)
    await workspace.release()
    await asyncio.gather(command, return_exceptions=True)


def text_of(path: Path) -> str:
    """Return the content of a file of a process; empty if it has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


@only_root
async def test_plain_commands_of_root_run_as_nobody_user(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path / "run", template("Plain"), places=2)
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")
    assert await say(workspace, "id -un; echo x > mine; cat mine", "1:a") == "nobody\nx"
    assert any("Plain mode" in warning and "network" in warning for warning in provider.warnings)
    await provider.close()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
@pytest.mark.parametrize("has_pytest", [True, False])
async def test_missing_pytest_names_the_other_python_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, has_pytest: bool
) -> None:
    machine = tmp_path / "machine"
    machine.mkdir()
    (machine / "python3").write_text(f"#!/bin/sh\necho {has_pytest}\n")
    (machine / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine}:{os.environ['PATH']}")
    # In Plain it is on PATH only where nobody can read it, which not every checkout allows.
    monkeypatch.setattr("agent_runtime.sandboxes.local.provider.readable_by", lambda environment, uid: True)
    provider = LocalProvider(tmp_path / "run", template(mode), places=1)
    await provider.open()
    await provider.close()
    own = running_environment().bin
    told = [warning for warning in provider.warnings if warning.startswith("PATH of commands:")]
    assert told == ([] if has_pytest else [f"PATH of commands: {own} first, because {machine}/python3 has no pytest"])


@only_root
@pytest.mark.parametrize("mode", ["Auto", "Plain"])
def test_ordinary_user_gets_a_working_sandbox_and_its_limits(mode: str) -> None:
    python, libraries = python_for_nobody()
    run_dir = Path(
        subprocess.check_output(["mktemp", "-d"], text=True, user=NOBODY, group=NOBODY, extra_groups=[]).strip()
    )
    try:
        options = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": libraries, "PYTHONDONTWRITEBYTECODE": "1"}
        with running([python, str(CRASHING_RUNNER), str(run_dir), mode], env=environment, **options) as (
            process,
            printed,
        ):
            assert process.stdout is not None
            assert process.stdout.readline() == "ended\n"
        assert printed["warnings"]
    finally:
        for path in (run_dir / "sandboxes").glob("*.json"):
            record = json.loads(path.read_text())
            ended = os.pidfd_open(record["pid"])
            os.kill(record["pid"], signal.SIGTERM)
            select.select([ended], [], [], 30)
            os.close(ended)
            assert not Path(record["home"]).exists()
        shutil.rmtree(run_dir)


async def test_an_attempt_of_a_fenced_off_runner_is_refused_at_acquire_too(overlay: LocalProvider) -> None:
    await overlay.acquire(spec(), attempt="0-1", fence=Fence(2, "second"), name="agent")
    with pytest.raises(Fenced):
        await overlay.acquire(spec(), attempt="0-1", fence=FIRST, name="agent")


def test_an_ordinary_users_tmpdir_is_used_where_only_its_group_lets_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o750)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: NOBODY)
    assert _plain_homes(NOBODY) == str(tmp_path)
