"""Commands over one connection: client and executor read what the other packs, and no caller waits forever."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.attempts import Attempt, Hold
from agent_runtime.executor.commands.processes import CommandSpec, Process
from agent_runtime.executor.commands.streams import HEAD, Caps, Output, framed
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.host import Exit
from agent_runtime.executor.routes import command_stream
from agent_runtime.executor.routes.command_stream import MAX_FRAME_BYTES, CommandStream, answer, read_command, refusal
from agent_runtime.executor.sandbox import Activity, Sandbox
from agent_runtime.executor.timing import Notifier
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure
from agent_runtime.sandboxes.executor_client import commands
from agent_runtime.sandboxes.executor_client.commands import Refused, Running, command_content

pytestmark = pytest.mark.usefixtures("virtual_clock")

NAMES = ("7.agent", "3:me", "4:call_1", "w")
HOW: dict[str, Any] = {
    "cwd": None,
    "user": None,
    "env": {},
    "stdin": b"",
    "deadline_seconds": 60.0,
    "head_bytes": 10,
    "tail_bytes": 20,
}
TEXT = st.text().filter(lambda text: "\0" not in text and _is_encodable(text))
VARIABLES = st.dictionaries(TEXT.filter(lambda name: bool(name) and "=" not in name), TEXT, max_size=3)
PROGRAM = st.tuples(TEXT.filter(bool), st.lists(TEXT, max_size=3)).map(lambda parts: [parts[0], *parts[1]])


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def content(command: str | list[str] = "true", **how: Any) -> bytes:
    return command_content(NAMES, command, **{**HOW, **how})


@given(st.one_of(TEXT, PROGRAM), TEXT, TEXT, VARIABLES, st.binary(), st.floats(0, 1e9), st.integers(0, 1 << 20))
def test_any_command_reaches_the_executor_unchanged(
    command: str | list[str], cwd: str, user: str, env: dict[str, str], stdin: bytes, deadline: float, kept: int
) -> None:
    sent = content(
        command, cwd=cwd, user=user, env=env, stdin=stdin, deadline_seconds=deadline, head_bytes=kept, tail_bytes=kept
    )
    read = read_command(sent)
    assert (read.attempt, read.hold, read.key, read.workspace) == ("7.agent", Hold(3, "me"), (4, "call_1"), "w")
    assert read.spec == CommandSpec(
        command, cwd or None, _read_back(env), user or None, stdin or None, None, deadline, Caps(kept, kept, 0)
    )


@given(st.none() | st.floats(0, 1e9), st.none() | st.tuples(*[st.integers(1, 65535)] * 2), st.integers(0, 1 << 40))
def test_a_command_that_lives_on_keeps_its_input_open(
    deadline: float | None, terminal: tuple[int, int] | None, spill: int
) -> None:
    sent = content(deadline_seconds=deadline, terminal=terminal, spill_bytes=spill, lives_on=True)
    read = read_command(sent)
    assert read.spec == CommandSpec("true", None, {}, None, "Open", terminal, deadline, Caps(10, 20, spill))
    assert read.lives_on


def _read_back(env: dict[str, str]) -> dict[str, str]:
    return {_bytes_of(name): _bytes_of(value) for name, value in env.items()}


def _bytes_of(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


@given(st.binary(max_size=200))
def test_invalid_command_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_command(data)
    assert refused.value.code == "BadRequest"


@given(st.integers(0, 200), st.binary(max_size=3))
def test_truncated_or_changed_command_is_refused_or_parsed(at: int, instead: bytes) -> None:
    sent = content(["printf", "%s", "a"], env={"A": "b"}, stdin=b"in")
    for changed in (sent[:at], sent[:at] + instead + sent[at + len(instead) :]):
        with contextlib.suppress(ApiError):
            read_command(changed)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"deadline_seconds": -1.0}, id="deadline"),
        pytest.param({"deadline_seconds": float("nan")}, id="no number"),
        pytest.param({"head_bytes": (1 << 20) + 1}, id="head"),
        pytest.param({"tail_bytes": (1 << 20) + 1}, id="tail"),
        pytest.param({"spill_bytes": (1 << 40) + 1}, id="spill"),
        pytest.param({"lives_on": 2}, id="neither ends nor lives on"),
        pytest.param({"terminal": (0, 80)}, id="terminal"),
        pytest.param({"env": {"": "x"}}, id="variable"),
        pytest.param({"command": [""]}, id="program"),
        pytest.param({"command": []}, id="nothing"),
    ],
)
def test_a_command_over_its_bounds_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"^command: ") as refused:
        read_command(content(**wrong))
    assert refused.value.code == "BadRequest"


@pytest.mark.parametrize("command", ["a\0b", ["a", "b\0"], "\ud800"])
def test_a_command_that_no_program_can_receive_is_refused(command: str | list[str]) -> None:
    with pytest.raises(ValueError, match="programs cannot receive"):
        content(command)
    with pytest.raises(ValueError, match="NAME=VALUE"):
        content(env={"A=B": "c"})


def test_repeated_command_of_the_next_runner_is_recognized_and_another_is_refused() -> None:
    first = read_command(content())
    again = read_command(command_content(("7.agent", "4:next", *NAMES[2:]), "true", **HOW))
    assert first.digest == again.digest
    for other in ({"command": "false"}, {"stdin": b"x"}, {"cwd": "/"}, {"tail_bytes": 21}, {"env": {"A": "b"}}):
        assert read_command(content(**other)).digest != first.digest


class FakeProcess:
    """A process that ends when the test says so."""

    def __init__(self, kept: int = 0) -> None:
        self.id = "4-call_1"
        self.over, self.changed, self.pausing = Notifier(), Notifier(), Notifier()
        self.exit: Exit | None = None
        self.refusal: ApiError | None = None
        self.is_settled, self.is_paused = True, False
        self.seconds = 0.25
        caps = Caps(kept, kept, 0)
        self.stdout, self.stderr = Output(caps, "/nonexistent"), Output(caps, "/nonexistent")

    @property
    def is_ended(self) -> bool:
        return self.exit is not None or self.refusal is not None

    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.pausing.notify()

    def end(self, exit: Exit) -> None:
        self.exit = exit
        self.over.notify()


def told(frame: bytes, number: int = 9) -> CommandResult | Running | Refused:
    size, named = HEAD.unpack_from(frame)
    assert (size, named) == (len(frame) - 4, number)
    return commands.answer(frame[HEAD.size :])


@given(st.binary(), st.binary(), st.integers(0, 30), st.integers(0, 255) | st.none(), st.none() | st.just("Deadline"))
def test_output_and_end_of_a_command_arrive_unchanged(
    out: bytes, err: bytes, kept: int, code: int | None, cause: str | None
) -> None:
    process = FakeProcess(kept)
    process.stdout.feed(out)
    process.stderr.feed(err)
    process.end(Exit(code, None if code is not None else 9, cause))
    result = told(answer(9, cast(Process, process)))
    assert isinstance(result, CommandResult)
    assert (result.exit_code, result.signal, result.cause) == (code, None if code is not None else 9, cause)
    assert (result.stdout_bytes, result.stderr_bytes, result.seconds) == (len(out), len(err), 0.25)
    for said, shown, omitted, head in (
        (out, result.stdout, result.stdout_omitted, result.stdout_head),
        (err, result.stderr, result.stderr_omitted, result.stderr_head),
    ):
        assert shown[:head] + said[head : head + omitted] + shown[head:] == said


def test_running_and_refused_processes_are_reported() -> None:
    process = FakeProcess()
    assert told(answer(9, cast(Process, process))) == Running("4-call_1")
    process.refusal = ApiError("FileError", "no such program", errno="ENOENT")
    refused = told(answer(9, cast(Process, process)))
    assert isinstance(refused, Refused)
    assert json.loads(refused.body)["error"]["errno"] == "ENOENT"


@given(st.binary(max_size=80))
def test_invalid_answer_is_a_sandbox_failure(data: bytes) -> None:
    try:
        said = commands.answer(b"\0" + data)
    except SandboxFailure:
        return
    assert isinstance(said, CommandResult)


class Wire:
    """Both ends of a stream's connection: a transport, and what was written to it."""

    def __init__(self, processes: dict[str, FakeProcess]) -> None:
        self.attempt = Attempt("7.agent")
        self.attempt.fence.raise_to(Hold(3, "me"))
        self.activity = Activity()
        self.written: list[bytes] = []
        self.is_closed = False
        self.is_paused = False
        self._processes = processes
        self.stream = CommandStream(cast(Sandbox, self))
        self.stream.connection_made(_transport_of(self))

    def fenced_attempt(self, name: str, hold: Hold) -> Attempt:
        self.attempt.fence.require(hold)
        return self.attempt

    def start(
        self, workspace: str, attempt: str, key: Any, spec: CommandSpec, settled: Callable[[], None]
    ) -> FakeProcess:
        settled()
        return self._processes[key.name]

    def ask(self, number: int, name: str, **how: Any) -> None:
        names = ("7.agent", "3:me", f"4:{name}", "w")
        self.stream.data_received(framed(number, command_content(names, "true", **{**HOW, **how})))

    @property
    def answers(self) -> dict[int, CommandResult | Running | Refused]:
        found = {}
        for frame in self.written:
            number = HEAD.unpack_from(frame)[1]
            found[number] = told(frame, number)
        return found


def _transport_of(wire: Wire) -> asyncio.Transport:
    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return SimpleNamespace(family=socket.AF_UNIX)

        def write(self, data: Any) -> None:
            wire.written.append(bytes(data))

        def is_closing(self) -> bool:
            return wire.is_closed

        def abort(self) -> None:
            wire.is_closed = True

        def pause_reading(self) -> None:
            wire.is_paused = True

        def resume_reading(self) -> None:
            wire.is_paused = False

    return Transport()


@pytest.fixture(autouse=True)
def _attempts_of_fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime.executor.attempts.Process", FakeProcess)


async def test_each_command_gets_its_own_answer_in_any_order_of_ends() -> None:
    processes = {name: FakeProcess() for name in "abc"}
    wire = Wire(processes)
    for number, name in enumerate(processes):
        wire.ask(number, name)
    assert wire.activity.at_work == 3
    for code, name in enumerate("cab"):
        processes[name].end(Exit(code, None))
    assert {n: cast(CommandResult, said).exit_code for n, said in wire.answers.items()} == {2: 0, 0: 1, 1: 2}
    assert wire.activity.at_work == 0


async def test_a_command_in_any_pieces_is_started_once() -> None:
    wire = Wire({"a": FakeProcess(), "b": FakeProcess()})
    for byte in framed(1, command_content(("7.agent", "3:me", "4:a", "w"), "true", **HOW)):
        wire.stream.data_received(bytes([byte]))
    assert wire.activity.at_work == 1


async def test_long_command_sends_progress_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_stream, "ANSWER_SECONDS", 0.02)
    process, starting, paused = FakeProcess(), FakeProcess(), FakeProcess()
    starting.is_settled, paused.is_paused = False, True
    wire = Wire({"a": process, "b": starting, "c": paused})
    wire.ask(1, "a")
    wire.ask(2, "b")
    wire.ask(3, "c")
    while len(wire.written) < 6:  # noqa: ASYNC110 what the stream writes cannot be awaited
        await asyncio.sleep(0.01)
    assert wire.answers == {1: Running("4-call_1"), 2: Running(""), 3: Running("")}
    for ending in (process, starting, paused):
        ending.is_settled = True
        ending.end(Exit(0, None))
    assert [type(wire.answers[number]) for number in (1, 2, 3)] == [CommandResult] * 3
    assert wire.activity.at_work == 0


async def test_pause_of_a_command_is_reported_when_it_begins_and_ends() -> None:
    process, late = FakeProcess(), FakeProcess()
    late.is_paused = True
    wire = Wire({"a": process, "b": late})
    wire.ask(1, "a")
    assert wire.written == []
    process.pause(True)
    process.pause(True)
    process.pause(False)
    process.pause(True)
    process.end(Exit(0, None))
    process.pause(False)
    said = [told(frame, 1) for frame in wire.written]
    assert said[:-1] == [Running(""), Running("4-call_1"), Running("")]
    wire.ask(2, "b")
    assert wire.answers[2] == Running("")


async def test_command_that_waited_for_its_start_is_reported_as_soon_as_it_runs() -> None:
    """Otherwise its time would not be the agent's for up to 25 s more, or until its end."""
    process = FakeProcess()
    process.is_settled, process.is_paused = False, True
    wire = Wire({"a": process})
    wire.ask(1, "a")
    process.pause(False)
    assert [told(frame, 1) for frame in wire.written] == [Running("")], "it is not started yet"
    process.is_settled = True
    process.changed.notify()
    assert [told(frame, 1) for frame in wire.written] == [Running(""), Running("4-call_1")]
    process.changed.notify()
    process.end(Exit(0, None))
    process.changed.notify()
    assert len(wire.written) == 3


async def test_a_command_that_lives_on_is_answered_once_it_is_started() -> None:
    process = FakeProcess()
    process.is_settled = False
    wire = Wire({"a": process})
    wire.ask(1, "a", lives_on=True)
    process.changed.notify()
    assert wire.written == [], "it is not decided yet"
    process.is_settled = True
    process.changed.notify()
    process.end(Exit(0, None))
    wire.ask(2, "a", lives_on=True)
    assert wire.answers == {1: Running("4-call_1"), 2: Running("4-call_1")}
    assert len(wire.written) == 2


async def test_superseded_runner_gets_an_error_while_its_command_runs() -> None:
    wire = Wire({"a": FakeProcess()})
    wire.ask(1, "a")
    await wire.attempt.raise_fence(Hold(4, "next"))
    refused = wire.answers[1]
    assert isinstance(refused, Refused)
    assert json.loads(refused.body)["error"]["code"] == "Fenced"
    wire.ask(2, "b")
    assert isinstance(wire.answers[2], Refused)


async def test_broken_connection_leaves_no_waiting_call() -> None:
    process = FakeProcess()
    wire = Wire({"a": process})
    wire.ask(1, "a")
    wire.stream.connection_lost(None)
    assert wire.activity.at_work == 0
    process.end(Exit(0, None))
    assert wire.written == []


async def test_a_command_too_long_is_refused_and_the_next_one_served() -> None:
    process = FakeProcess()
    wire = Wire({"a": process})
    wire.stream.data_received(struct.pack(">II", MAX_FRAME_BYTES + 5, 1))
    left = MAX_FRAME_BYTES + 1
    while left:
        piece = min(left, 1 << 20)
        wire.stream.data_received(bytes(piece))
        left -= piece
    refused = wire.answers[1]
    assert isinstance(refused, Refused)
    assert json.loads(refused.body)["error"]["code"] == "TooLarge"
    wire.ask(2, "a")
    process.end(Exit(0, None))
    assert isinstance(wire.answers[2], CommandResult)


@pytest.mark.parametrize("frame", [struct.pack(">II", 3, 1), framed(1, content()) * 2])
async def test_invalid_frame_or_repeated_number_ends_the_connection(frame: bytes) -> None:
    wire = Wire({"call_1": FakeProcess()})
    wire.stream.data_received(frame)
    assert wire.is_closed


async def test_client_that_reads_no_answers_is_paused_and_then_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_stream, "STALL_SECONDS", 0.05)
    wire = Wire({})
    wire.stream.pause_writing()
    assert wire.is_paused
    wire.stream.resume_writing()
    await asyncio.sleep(0.1)
    assert (wire.is_paused, wire.is_closed) == (False, False)
    wire.stream.pause_writing()
    await asyncio.sleep(0.1)
    assert wire.is_closed


def test_refusal_has_the_status_and_message_of_http() -> None:
    error = ApiError("WorkspaceFailed", "over 1 GiB", cause="Memory")
    assert told(refusal(9, error)) == Refused(json.dumps(error.body()).encode())
