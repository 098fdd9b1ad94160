"""The client with a scripted server: failures, repeats, and the result of each answer."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qsl

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.commands.processes import Process
from agent_runtime.executor.commands.streams import HEAD, IS_RUNNING, Caps, Output, framed
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.host import Exit
from agent_runtime.executor.routes import command_stream
from agent_runtime.sandboxes.base import (
    DiskFailed,
    Evidence,
    Fence,
    Fenced,
    FileError,
    SandboxFailure,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.sandboxes.executor_client import client as executor_client
from agent_runtime.sandboxes.executor_client import commands as sandbox_stream
from agent_runtime.sandboxes.executor_client.client import (
    ExecutorClient,
    ExecutorRefusal,
    Hold,
    MissingFile,
    query_string,
    refusal,
)
from agent_runtime.sandboxes.executor_client.sandbox import SAFE_ID, workspace_id
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace

HOLD = Hold("7.agent", Fence(3, "me"))
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The frame that answers a command by its number; None: the connection breaks.
Said = Callable[[int], bytes | None]


class ScriptedExecutor:
    """Answers each request with the next step of a script, and each command with the next of `answers`. It answers
    health requests itself.

    `seen` has all requests except health, `commands` the contents of all frames, `streams` the number of opened
    streams.
    """

    def __init__(self, path: Path) -> None:
        self.address = f"unix:{path}"
        self.boot_id = "boot-1"
        self.script: list[Answer] = []
        self.seen: list[tuple[str, str, str | None, bytes]] = []
        self.answers: list[Said] = []
        self.commands: list[bytes] = []
        self.streams = 0
        application = web.Application()
        application.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        self._path = path

    async def start(self) -> None:
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path)).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/health":
            return web.json_response({"bootId": self.boot_id})
        if request.path == "/v1/commands" and not self.script:
            self.streams += 1
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            stream = ScriptedStream(self, request.transport)
            request.transport.set_protocol(stream)
            await stream.lost
        body = await request.read()
        self.seen.append((request.method, request.path_qs, request.headers.get("Idempotency-Key"), body))
        return await self.script.pop(0)(request)


class ScriptedStream(asyncio.Protocol):
    """The executor's end of a stream of commands."""

    def __init__(self, server: ScriptedExecutor, transport: asyncio.Transport) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server, self._transport = server, transport
        self._input = b""

    def data_received(self, data: bytes) -> None:
        self._input += data
        while len(self._input) >= HEAD.size:
            size, number = HEAD.unpack_from(self._input)
            if len(self._input) < 4 + size:
                return
            self._server.commands.append(self._input[HEAD.size : 4 + size])
            self._input = self._input[4 + size :]
            frame = self._server.answers.pop(0)(number)
            if frame is None:
                self._transport.abort()
            else:
                self._transport.write(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


def ended(code: int | None = 0, *, signal: int | None = None, cause: str | None = None, stdout: bytes = b"") -> Said:
    out, err = Output(Caps(), "/nonexistent"), Output(Caps(), "/nonexistent")
    out.feed(stdout)
    process = SimpleNamespace(refusal=None, exit=Exit(code, signal, cause), seconds=0.1, stdout=out, stderr=err)
    return lambda number: command_stream.answer(number, cast(Process, process))


def running(process: str) -> Said:
    found = SimpleNamespace(refusal=None, exit=None, id=process, is_settled=True)
    return lambda number: command_stream.answer(number, cast(Process, found))


def refused(code: str, **details: Any) -> Said:
    return lambda number: command_stream.refusal(number, ApiError(code, f"{code} happened", **details))


def breaks(_number: int) -> None:
    """Break the connection."""


def silence(_number: int) -> bytes:
    return b""


def says(value: Any, status: int = 200) -> Answer:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.json_response(value, status=status)

    return answer


def error(code: str, status: int, **details: Any) -> Answer:
    return says({"error": {"code": code, "message": f"{code} happened", **details}}, status)


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScriptedExecutor]:
    executor = ScriptedExecutor(tmp_path / "socket")
    await executor.start()
    yield executor
    await executor.stop()


@pytest.fixture
async def client(server: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ExecutorClient]:
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.01, 0.01))
    client = ExecutorClient(server.address, "token", "boot-1")
    yield client
    await client.close()


@pytest.fixture
def workspace(client: ExecutorClient) -> ExecutorWorkspace:
    spec = WorkspaceSpec(group="g", working_dir="/workspace")
    return ExecutorWorkspace(client, HOLD, spec, handle={}, description={})


async def test_call_with_a_broken_connection_is_repeated_with_the_same_key_and_body(
    server: ScriptedExecutor, client: ExecutorClient
) -> None:
    server.script = [hangs_up, hangs_up, says({"ok": True})]
    reply = await client.call("POST", "/x", hold=HOLD, key="4:bash", json_body={"a": 1})
    assert reply.json() == {"ok": True}
    assert server.seen == [("POST", "/v1/x", "4:bash", b'{"a": 1}')] * 3


async def test_an_executor_that_was_started_anew_is_a_lost_sandbox_not_a_second_run(
    server: ScriptedExecutor, client: ExecutorClient
) -> None:
    async def restarts(request: web.Request) -> web.StreamResponse:
        server.boot_id = "boot-2"
        return await hangs_up(request)

    server.script = [restarts]
    with pytest.raises(SandboxFailure, match=r"restarted.*boot-2") as failure:
        await client.call("POST", "/x", hold=HOLD, key="4:bash", json_body={})
    assert failure.value.reason == "SandboxLost"
    assert len(server.seen) == 1


async def test_a_fence_that_only_a_new_executor_forgot_does_not_end_the_rightful_runner(
    server: ScriptedExecutor, client: ExecutorClient
) -> None:
    server.script = [error("Fenced", 409), error("Fenced", 409)]
    with pytest.raises(Fenced):
        await client.call("POST", "/x", hold=HOLD, key="4:bash")
    server.boot_id = "boot-2"
    with pytest.raises(SandboxFailure) as failure:
        await client.call("POST", "/x", hold=HOLD, key="4:bash")
    assert failure.value.reason == "SandboxLost"


async def test_a_connection_that_keeps_breaking_ends_as_a_lost_sandbox(
    server: ScriptedExecutor, client: ExecutorClient
) -> None:
    server.script = [hangs_up] * 3
    with pytest.raises(SandboxFailure, match=r"POST /x.*does not answer") as failure:
        await client.call("POST", "/x", hold=HOLD, key="4:bash")
    assert failure.value.reason == "SandboxLost"
    assert len(server.seen) == 3


@pytest.mark.usefixtures("virtual_clock")
async def test_ended_local_executor_costs_no_wait(tmp_path: Path) -> None:
    client = ExecutorClient(f"unix:{tmp_path / 'nothing'}", "token", "boot-1")
    began = time.monotonic()
    with pytest.raises(SandboxFailure) as failure:
        await client.call("GET", "/x")
    assert time.monotonic() == began
    assert failure.value.reason == "SandboxLost"
    await client.close()


@pytest.fixture
async def clock(client: ExecutorClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SimpleNamespace]:
    """The client's clock, while it keeps its executor alive. `tries` counts the calls for that."""
    time, health = SimpleNamespace(now=0.0, tries=0), client.health
    time.monotonic = lambda: time.now

    async def counted() -> dict[str, Any]:
        try:
            return await health()
        finally:
            time.tries += 1

    monkeypatch.setattr(executor_client, "time", time)
    monkeypatch.setattr(client, "health", counted)
    time.pulse = asyncio.create_task(client.keep_alive(0.03))
    await asyncio.sleep(0)
    yield time
    time.pulse.cancel()


async def next_try(clock: SimpleNamespace) -> None:
    tries = clock.tries
    async with asyncio.timeout(60):
        while clock.tries == tries:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def loss(client: ExecutorClient) -> SandboxFailure:
    with pytest.raises(SandboxFailure) as failure:
        await client.call("GET", "/workspaces")
    return failure.value


async def test_sandbox_lost_while_its_runner_was_stopped_is_not_the_policys_fault(
    server: ScriptedExecutor, client: ExecutorClient, clock: SimpleNamespace
) -> None:
    await server.stop()
    clock.now = 1000.0
    assert (await loss(client)).was_unheld, "a rollout to whom that happens twice would be graded with 0"
    await asyncio.sleep(0.1)
    clock.pulse.cancel()
    assert (await loss(client)).was_unheld, "others who were in the sandbox find out later"


async def test_loss_of_a_sandbox_that_a_policy_ended_is_never_excused(
    server: ScriptedExecutor, client: ExecutorClient, clock: SimpleNamespace
) -> None:
    await server.stop()
    for _ in range(20):
        clock.now += 0.01
        await next_try(clock)
    assert not (await loss(client)).was_unheld
    clock.pulse.cancel()
    await asyncio.sleep(0)
    clock.now += 1000.0
    assert not (await loss(client)).was_unheld


async def test_paused_runner_that_reached_its_sandbox_again_holds_it(
    server: ScriptedExecutor, client: ExecutorClient, clock: SimpleNamespace
) -> None:
    clock.now = 1000.0
    await next_try(clock)
    await next_try(clock)
    await server.stop()
    assert not (await loss(client)).was_unheld


async def test_keep_alive_is_repeated_soon_after_it_failed(
    client: ExecutorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a network outage the executor may have little of its idleSeconds left."""
    replies = iter([True, False, False, True])
    pauses: list[float] = []

    async def health() -> dict[str, Any]:
        if not next(replies):
            raise SandboxFailure("SandboxLost", "no reply")
        return {}

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(client, "health", health)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await client.keep_alive(900)
    monkeypatch.undo()
    again = executor_client.KEEP_ALIVE_RETRY_SECONDS
    assert pauses == [300, 300, again, again, 300]


async def test_a_streamed_body_is_never_sent_in_two_halves(server: ScriptedExecutor, client: ExecutorClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    server.script = [hangs_up, says({})]
    with pytest.raises(SandboxFailure):
        await client.call("PUT", "/x", hold=HOLD, key="4:untar", body=pieces())
    assert len(server.seen) == 1


async def test_an_upload_that_is_worked_on_for_long_is_not_a_lost_sandbox(
    server: ScriptedExecutor, client: ExecutorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"many files"

    async def works(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3 * executor_client.REPLY_SECONDS)
        return web.json_response({})

    monkeypatch.setattr(executor_client, "REPLY_SECONDS", 0.1)
    server.script = [works]
    assert (await client.call("PUT", "/carry", hold=HOLD, key="4:carry", body=pieces())).json() == {}


async def test_a_truncated_stream_is_an_error_not_a_short_artifact(
    server: ScriptedExecutor, client: ExecutorClient
) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    server.script = [half]
    with pytest.raises(SandboxFailure):
        _ = [chunk async for chunk in client.stream("/tar")]


async def test_long_command_is_awaited_while_the_executor_reports_it_running(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    def runs_and_ends(number: int) -> bytes:
        return (running("p")(number) or b"") * 3 + (ended(2, stdout=b"end")(number) or b"")

    server.answers = [runs_and_ends]
    result = await workspace.run("make", key="1:bash", deadline_seconds=600)
    assert (result.exit_code, result.stdout, len(server.commands)) == (2, b"end", 1)


async def test_command_that_runs_after_its_deadline_is_a_fault_of_the_executor(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "DEADLINE_GRACE_SECONDS", 0.0)
    server.answers = [running("p")]
    with pytest.raises(SandboxFailure, match="after its deadline") as failure:
        await workspace.run("make", key="1:bash", deadline_seconds=0.0)
    assert failure.value.reason == "ExecutorFailed"


async def test_time_in_which_the_executor_pauses_a_command_is_no_fault_of_it(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "DEADLINE_GRACE_SECONDS", 0.0)

    def paused_and_ends(number: int) -> bytes:
        return framed(number, bytes([IS_RUNNING])) * 3 + (ended(2)(number) or b"")

    server.answers = [paused_and_ends]
    assert (await workspace.run("make", key="1:bash", deadline_seconds=0.0)).exit_code == 2


def messages(*paused: bool) -> Callable[[int], bytes]:
    def made(number: int) -> bytes:
        return b"".join(framed(number, bytes([IS_RUNNING]) + (b"" if each else b"p")) for each in paused)

    return made


async def test_pauses_are_reported_to_the_caller(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "DEADLINE_GRACE_SECONDS", 0.0)
    seen: list[bool] = []
    server.answers = [lambda number: messages(True, True, False, True)(number) + (ended(2)(number) or b"")]
    assert (await workspace.run("make", key="1:bash", deadline_seconds=0.0, pausing=seen.append)).exit_code == 2
    assert seen == [True, False, True, False]


async def test_caller_that_no_longer_waits_hears_of_no_further_pause(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    seen: list[bool] = []
    server.answers = [messages(True), lambda number: messages(False, True)(number - 1) + (ended(2)(number) or b"")]
    first = asyncio.create_task(workspace.run("make", key="1:bash", deadline_seconds=60, pausing=seen.append))
    while seen != [True]:  # noqa: ASYNC110 it is another task
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    assert (await workspace.run("make", key="2:bash", deadline_seconds=60)).exit_code == 2
    assert seen == [True, False]


async def test_executor_cannot_pause_a_command_forever(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_stream, "MAX_PAUSED_SECONDS", 1.0)
    server.answers = [messages(*[True, False] * 20)]
    with pytest.raises(SandboxFailure, match="waited for more than 1 s") as failure:
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    assert failure.value.reason == "SandboxMemory"


async def test_command_that_ended_in_time_counts_when_this_process_stood_still(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "DEADLINE_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(sandbox_stream, "RUNNING_SECONDS", 0.1)

    def runs_and_ends(number: int) -> bytes:
        time.sleep(0.3)  # a process that is stopped reads both messages when it continues
        return (running("p")(number) or b"") + (ended(2)(number) or b"")

    server.answers = [runs_and_ends]
    assert (await workspace.run("make", key="1:bash", deadline_seconds=0.1)).exit_code == 2


async def test_started_process_is_identified_by_its_id(server: ScriptedExecutor, workspace: ExecutorWorkspace) -> None:
    def starts(number: int) -> bytes:
        undecided = SimpleNamespace(refusal=None, exit=None, id="p", is_settled=False)
        return command_stream.started(number, cast(Process, undecided)) + (running("p")(number) or b"")

    server.answers = [breaks, starts, refused("BadRequest")]
    assert await workspace.start_process("serve", key="1:serve") == "p"
    for command in ("serve", "a\0b"):
        with pytest.raises(FileError):
            await workspace.start_process(command, key="1:other")


async def test_command_with_a_broken_connection_is_repeated_unchanged(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    server.answers = [breaks, breaks, ended(3, stdout=b"said\xff")]
    result = await workspace.run(["make", "it"], key="1:bash", deadline_seconds=60, stdin=b"in", env={"A": "b"})
    assert (result.exit_code, result.stdout, result.stdout_head) == (3, b"said\xff", 5)
    assert (len(server.commands), len(set(server.commands)), server.streams) == (3, 1, 3)


async def test_a_connection_that_breaks_under_every_command_ends_as_a_lost_sandbox(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    server.answers = [breaks] * 3
    with pytest.raises(SandboxFailure, match=r"command 1:bash of 7\.agent.*does not answer") as failure:
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    assert failure.value.reason == "SandboxLost"


async def test_command_is_not_sent_to_a_restarted_executor(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    def restarts(_number: int) -> None:
        server.boot_id = "boot-2"

    server.answers = [restarts, ended()]
    with pytest.raises(SandboxFailure, match=r"restarted.*boot-2"):
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    assert len(server.commands) == 1


@pytest.mark.parametrize("code", ["Fenced", "Forgotten"])
async def test_refused_command_gives_the_reason(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, code: str
) -> None:
    server.answers = [refused(code)]
    with pytest.raises(Fenced if code == "Fenced" else SandboxFailure, match=f"{code} happened"):
        await workspace.run("make", key="1:bash", deadline_seconds=60)


async def test_a_stranger_at_the_executors_address_gets_no_command(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    server.script = [error("Unauthorized", 401)]
    with pytest.raises(SandboxFailure) as failure:
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    assert (failure.value.reason, server.commands) == ("SandboxLost", [])


async def test_concurrent_commands_share_a_connection_and_a_cancelled_one_is_harmless(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    numbers: list[int] = []
    all_asked = asyncio.Event()

    def later(number: int) -> bytes:
        numbers.append(number)
        if len(numbers) == 3:
            all_asked.set()
        return b""

    def all_now(number: int) -> bytes:
        return b"".join(ended(n, stdout=b"x")(n) or b"" for n in [number, *reversed(numbers)])

    server.answers = [later, later, later, all_now]
    runs = [asyncio.create_task(workspace.run("make", key=f"1:{n}", deadline_seconds=60)) for n in range(3)]
    await all_asked.wait()
    runs[1].cancel()
    assert (await workspace.run("make", key="1:last", deadline_seconds=60)).exit_code == 4
    assert [(await run).exit_code for run in (runs[0], runs[2])] == [1, 3]
    assert server.streams == 1


async def test_a_connection_that_was_idle_for_long_carries_no_command(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_stream, "KEPT_SECONDS", 0.05)
    server.answers = [ended(), ended(), ended()]
    await workspace.run("make", key="1:a", deadline_seconds=60)
    await workspace.run("make", key="1:b", deadline_seconds=60)
    assert server.streams == 1
    await asyncio.sleep(0.1)
    await workspace.run("make", key="1:c", deadline_seconds=60)
    assert server.streams == 2


async def test_silent_executor_is_awaited_for_a_limited_time(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_stream, "SILENCE_SECONDS", 0.05)
    server.answers = [silence, silence, ended(7)]
    assert (await workspace.run("make", key="1:a", deadline_seconds=60)).exit_code == 7
    server.answers = [silence] * 3
    with pytest.raises(SandboxFailure, match=r"silent for 0\.05 s"):
        await workspace.run("make", key="1:b", deadline_seconds=60)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(lambda number: HEAD.pack(4, number), id="nothing"),
        pytest.param(lambda number: HEAD.pack(1 << 31, number), id="too much"),
        pytest.param(lambda number: ended()(number + 1), id="another's"),
    ],
)
async def test_invalid_frame_ends_the_connection_and_the_command_is_sent_again(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, garbage: Said
) -> None:
    server.answers = [garbage, ended(7)]
    assert (await workspace.run("make", key="1:a", deadline_seconds=60)).exit_code == 7
    assert server.streams == 2


@pytest.mark.parametrize("cause", ["Memory", "Disk"])
async def test_limit_reached_by_the_policy_counts_against_it(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, cause: str
) -> None:
    server.answers = [ended(None, signal=9, cause=cause)]
    with pytest.raises(WorkspaceLimit) as limit:
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    assert limit.value.cause == cause


async def test_command_that_met_a_disk_which_others_filled_has_no_result(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    server.answers = [ended(1, cause="DiskFull")]
    with pytest.raises(SandboxFailure) as failure:
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    assert failure.value.reason == "DiskFull"


async def test_command_that_ended_with_its_workspace_has_the_workspaces_reason(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    def then(answer: Answer) -> Said:
        def say(number: int) -> bytes | None:
            server.script = [answer]
            return ended(None, signal=9, cause="WorkspaceEnded")(number)

        return say

    server.answers = [then(says({"state": "Failed", "failure": {"cause": "Memory", "message": "over 1 GiB"}}))]
    with pytest.raises(WorkspaceLimit, match="over 1 GiB"):
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    server.answers = [then(error("NotFound", 404))]
    with pytest.raises(SandboxFailure) as failure:
        await workspace.run("make", key="2:bash", deadline_seconds=60)
    assert failure.value.reason == "WorkspaceLost"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("cause", "evidence"), [("SandboxMemory", Evidence.OUTSIDE), ("OOMKilled", Evidence.UNEXPLAINED)]
)
async def test_workspace_ended_for_the_sandboxs_memory_is_no_limit_of_its_own(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, late: bool, cause: str, evidence: Evidence
) -> None:
    def then_failed(number: int) -> bytes | None:
        server.script = [says({"state": "Failed", "failure": {"cause": cause, "message": "used up"}})]
        return ended(None, signal=9, cause=cause)(number)

    server.answers = [refused("WorkspaceFailed", cause=cause) if late else then_failed]
    with pytest.raises(SandboxFailure) as failure:
        await workspace.run("make", key="1:bash", deadline_seconds=60)
    assert (failure.value.reason, failure.value.evidence) == (cause, evidence)


@pytest.mark.parametrize("code", ["BadRequest", "TooLarge", "FileError"])
async def test_wrong_command_of_the_model_is_a_result(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, code: str
) -> None:
    server.answers = [refused(code)]
    result = await workspace.run(["no-such"], key="1:bash", deadline_seconds=60)
    assert (result.ok, result.cause, result.stderr) == (False, "NotStarted", f"{code} happened".encode())
    result = await workspace.run(["no\0such"], key="2:bash", deadline_seconds=60)
    assert (result.ok, result.cause) == (False, "NotStarted")
    assert b"NUL" in result.stderr
    assert len(server.commands) == 1


@pytest.mark.parametrize("code", ["BadRequest", "TooLarge", "FileError"])
async def test_a_path_that_the_model_got_wrong_is_its_file_error(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, code: str
) -> None:
    server.script = [error(code, 400)]
    with pytest.raises(FileError):
        await workspace.read("a\0b", key="1:read")
    with pytest.raises(FileError):
        await workspace.read("\ud800", key="2:read")


@pytest.mark.parametrize(("errno", "is_disks"), [("ENOSPC", True), ("EIO", True), ("EACCES", False)])
async def test_full_disk_is_distinguished_from_an_existing_entry(
    server: ScriptedExecutor, workspace: ExecutorWorkspace, errno: str, is_disks: bool
) -> None:
    """Otherwise a correct solution gets reward 0 where the machine that grades it has a full disk."""
    server.script = [error("FileError", 422, errno=errno)]
    with pytest.raises(FileError) as raised:
        await workspace.write("a", b"x", key="1:write")
    assert isinstance(raised.value, DiskFailed) is is_disks


async def test_removing_a_missing_file_succeeds_and_its_stat_is_none(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    missing = error("NotFound", 404, errno="ENOENT", path="/workspace/a")
    server.script = [missing, missing, missing]
    await workspace.remove("a", key="1:remove")
    assert await workspace.stat("a") is None
    with pytest.raises(MissingFile):
        await workspace.read("a")


async def test_repeated_release_succeeds_unless_another_runner_holds_the_workspace(
    server: ScriptedExecutor, workspace: ExecutorWorkspace
) -> None:
    server.script = [error("Fenced", 409), says({"state": "Live"}), error("Fenced", 409), error("NotFound", 404)]
    with pytest.raises(Fenced):
        await workspace.release()
    await workspace.release()
    await workspace.release()
    assert server.script == []


@pytest.mark.parametrize(
    ("status", "body", "expected", "reason"),
    [
        (500, b'{"error":{"code":"WorkspaceFailed","message":"m","cause":"Processes"}}', WorkspaceLimit, None),
        (500, b'{"error":{"code":"WorkspaceFailed","message":"m","cause":null}}', SandboxFailure, "WorkspaceLost"),
        (500, b'{"error":{"code":"WorkspaceFailed","message":"m","cause":"DiskFull"}}', SandboxFailure, "DiskFull"),
        (404, b'{"error":{"code":"NotFound","message":"m"}}', SandboxFailure, "WorkspaceLost"),
        (404, b'{"error":{"code":"NotFound","message":"m","path":"/a"}}', MissingFile, None),
        (401, b'{"error":{"code":"Unauthorized","message":"m"}}', SandboxFailure, "SandboxLost"),
        (422, b'{"error":{"code":"KeyReused","message":"m"}}', ExecutorRefusal, "KeyReused"),
        (503, b'{"error":{"code":"NoPlace","message":"m","places":2}}', ExecutorRefusal, "NoPlace"),
        (502, b"<html>", SandboxFailure, "ExecutorFailed"),
        (500, b'"text"', SandboxFailure, "ExecutorFailed"),
    ],
)
def test_each_refusal_is_the_right_kind_of_failure(
    status: int, body: bytes, expected: type[Exception], reason: str | None
) -> None:
    failure = refusal(status, body, "GET /x")
    assert isinstance(failure, expected)
    assert getattr(failure, "reason", None) == reason


@given(st.lists(st.tuples(st.sampled_from(["path", "part"]), st.binary(min_size=1)), max_size=4))
def test_path_of_any_bytes_is_sent_unchanged(pairs: list[tuple[str, bytes]]) -> None:
    query = [(name, value.decode(errors="surrogateescape")) for name, value in pairs]
    parsed = parse_qsl(query_string(query).removeprefix("?"), errors="surrogateescape", keep_blank_values=True)
    assert parsed == query


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_ids_are_safe_and_tell_attempts_apart(one: str, other: str, name: str) -> None:
    assert SAFE_ID.fullmatch(workspace_id(one, name))
    assert (workspace_id(one, name) == workspace_id(other, name)) == (one == other)
