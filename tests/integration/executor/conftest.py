"""A real executor as a separate process, in both modes, and a client that sends the contract's headers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from yarl import URL

from agent_runtime.executor.attempts import read_key
from agent_runtime.executor.errors import STATUS_OF_CODE
from agent_runtime.sandboxes.base import CommandResult
from agent_runtime.sandboxes.executor_client.client import ExecutorClient
from agent_runtime.sandboxes.executor_client.commands import CommandStreams, Refused, Running, answer, command_content
from agent_runtime.sandboxes.executor_client.values import bytes_of

TOKEN = "a token that only the test knows"
START_SECONDS = 120.0  # a busy machine


class ExecutorProcess:
    """One executor; `places` workspaces in Overlay, one in Plain."""

    def __init__(
        self, mode: str, *, places: int = 16, listen: str | None = None, prefix: Sequence[str] = (), **config: Any
    ) -> None:
        # Not below pytest's own folder: tools that run as nobody must be able to reach it, and sockets have short names.
        self.folder = Path(tempfile.mkdtemp(prefix="executor-"))
        self.folder.chmod(0o755)
        root = self.folder / "root"
        root.mkdir()
        root.chmod(0o777)
        (self.folder / "state").mkdir()
        self.mode, self.token = mode, TOKEN
        config = {
            "listen": listen or f"unix:{self.folder}/socket",
            "tokenSha256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "mode": mode,
            "places": places,
            "stateDir": str(self.folder / "state"),
            "root": str(root) if mode == "Plain" else "/",
            "readyFile": str(self.folder / "ready"),
            "idleSeconds": 86_400,  # one that all tests share may wait long for the next of them on a busy machine
            **config,
        }
        self.log = self.folder / "log"
        self.started_at = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "agent_runtime.executor", "--config", "-"],
                stdin=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[3],
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(config).encode())
        self.process.stdin.close()
        self.ready = self._wait_until_ready()

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def socket(self) -> str:
        return self.address.removeprefix("unix:")

    def memory_kib(self) -> int:
        """Return the resident memory of the executor itself."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise AssertionError("no VmRSS")

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(START_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_ready(self) -> dict[str, Any]:
        path = self.folder / "ready"
        while not path.exists():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log.read_text()}"
            assert time.monotonic() < self.started_at + START_SECONDS, self.log.read_text()
            time.sleep(0.002)
        self.seconds_to_ready = time.monotonic() - self.started_at
        ready: dict[str, Any] = json.loads(path.read_text())
        return ready


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


class Answer:
    """A reply, whatever its status."""

    def __init__(self, status: int, body: bytes, headers: Any) -> None:
        self.status, self.body, self.headers = status, body, headers

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Return the error's code."""
        return str(self.json["error"]["code"])

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


class Client:
    """Makes calls of one attempt and hold."""

    KEPT: ClassVar = {"head_bytes": 32_768, "tail_bytes": 32_768, "spill_bytes": 64 << 20}

    def __init__(
        self, session: aiohttp.ClientSession, base: str, commands: CommandStreams, attempt: str, fence: str = "1:runner"
    ) -> None:
        self.session, self.base, self.attempt, self.fence = session, base, attempt, fence
        self.commands = commands
        self.workspace = f"w-{attempt}"
        # Plain has one root for all, so each test keeps to a folder of its own; commands start there.
        self.folder = f"/executor-tests/{attempt}"
        self.token = TOKEN
        self.turn = 0
        self._numbers = itertools.count()

    def held_by(self, fence: str) -> Client:
        """Return a client of the same attempt and workspace with another hold."""
        other = Client(self.session, self.base, self.commands, self.attempt, fence)
        other.workspace, other.folder = self.workspace, self.folder
        return other

    def new_key(self) -> str:
        return f"{self.turn}:{self.fence.replace(':', '-')}-{next(self._numbers)}"

    def url(self, path: str) -> Any:
        path = path.replace("~", f"/workspaces/{self.workspace}").replace("@", self.folder)
        return URL(f"{self.base}/v1{path}", encoded=True)

    async def call(
        self, method: str, path: str, *, key: str | None = None, json: Any = None, data: Any = None, keyed: bool = True
    ) -> Answer:
        """Make a call. `path` is below /v1; `~` stands for the workspace's path, `@` for the test's folder in it."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Rollout-Attempt": self.attempt, "Rollout-Fence": self.fence}
        if key is not None or (keyed and method != "GET" and not path.startswith("/attempts")):
            headers["Idempotency-Key"] = key or self.new_key()
        url = self.url(path)
        if json is not None:
            data = encode(json)
        if isinstance(data, bytes):
            # As a file object, because aiohttp warns about large bodies that are bytes.
            data = io.BytesIO(data)
        async with self.session.request(method, url, headers=headers, data=data) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def digest_of(self, path: str) -> str:
        """Return the SHA-256 of a GET's body, which is read piece by piece."""
        digest = hashlib.sha256()
        async with self.session.get(self.url(path), headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            assert response.status == 200
            async for chunk in response.content.iter_any():
                digest.update(chunk)
        return digest.hexdigest()

    async def raise_fence(self) -> Answer:
        epoch, holder = self.fence.split(":")
        body = {"epoch": int(epoch), "holder": holder}
        return await self.call("PUT", f"/attempts/{self.attempt}/fence", json=body)

    async def start(self, command: str | list[str], key: str | None = None, **fields: Any) -> Answer:
        """Start a command. Returns its status once it has started or, with `waitSeconds`, ended; or the refusal."""
        key = key or self.new_key()
        said = await self.ask(command, key, **fields)
        if isinstance(said, Refused):
            return Answer(STATUS_OF_CODE[json.loads(said.body)["error"]["code"]], said.body, {})
        return await self.call("GET", f"~/processes/{read_key(key).process_id()}")

    async def ask(
        self,
        command: str | list[str],
        key: str,
        *,
        waitSeconds: float = 0,
        stdin: Any = None,
        tty: dict[str, int] | None = None,
        deadlineSeconds: float | None = None,
        output: dict[str, int] | None = None,
        **names: Any,
    ) -> CommandResult | Running | Refused:
        """Request the start of a command. Returns the answer at once or, with `waitSeconds`, after the command's end."""
        caps: dict[str, Any] = {
            **self.KEPT,
            **{f"{name.removesuffix('Bytes')}_bytes": count for name, count in (output or {}).items()},
        }
        content = command_content(
            (self.attempt, self.fence, key, self.workspace),
            command,
            cwd=names.get("cwd", self.folder),
            user=names.get("user"),
            env=names.get("env", {}),
            stdin=b"" if stdin in (None, "Open") else bytes_of(stdin),
            deadline_seconds=deadlineSeconds,
            **caps,
            lives_on=not waitSeconds,
            terminal=(tty["rows"], tty["columns"]) if tty else None,
        )
        return answer(await self.commands.ask(content, waitSeconds or None))

    async def run(self, command: str | list[str], key: str | None = None, **fields: Any) -> dict[str, Any]:
        """Run a command to its end; return its status."""
        started = await self.start(command, key, **{"waitSeconds": 30, **fields})
        assert started.status == 200, started.body
        status: dict[str, Any] = started.json
        assert status["state"] == "Exited", status
        return status

    async def out(self, command: str | list[str], **fields: Any) -> str:
        """Return a command's standard output as text."""
        head = (await self.run(command, **fields))["stdout"]["head"]
        assert head["encoding"] == "utf-8"
        return str(head["data"])

    async def output_until(self, process: str, wanted: bytes, cursor: int = 0) -> Answer:
        """Return the output from a cursor on, once it contains `wanted`."""
        for _ in range(200):
            piece = await self.call("GET", f"~/processes/{process}/output?cursor={cursor}")
            if wanted in piece.body:
                return piece
            await asyncio.sleep(0.05)
        raise AssertionError(f"{wanted!r} did not come")

    async def status(self, process: str, wait: float = 0) -> dict[str, Any]:
        """Return the status of a process, once it has ended or the wait is over."""
        until = time.monotonic() + wait
        while True:
            found = await self.call("GET", f"~/processes/{process}")
            assert found.status == 200, found.body
            status: dict[str, Any] = found.json
            if status["state"] == "Exited" or time.monotonic() >= until:
                return status
            await asyncio.sleep(0.01)


@asynccontextmanager
async def open_session(executor: ExecutorProcess) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Yield a client session and the base of its URLs."""
    unix = executor.address.startswith("unix:")
    connector = aiohttp.UnixConnector(executor.socket, limit=0) if unix else aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session, "http://executor" if unix else f"http://{executor.address.removeprefix('tcp:')}"


_attempts = itertools.count()


@asynccontextmanager
async def open_client(executor: ExecutorProcess, **workspace: Any) -> AsyncIterator[Client]:
    """Yield a fenced attempt with one workspace, which is deleted at the end."""
    async with open_session(executor) as (session, base):
        streams = ExecutorClient(executor.address, TOKEN)
        client = Client(session, base, streams._streams, f"a{os.getpid()}-{next(_attempts)}")
        assert (await client.raise_fence()).status == 200
        made = await client.call("POST", "/workspaces", json={"id": client.workspace, **workspace})
        assert made.status == 200, made.body
        assert (await client.call("PUT", "~/files?path=@/.made", data=b"")).status == 200
        try:
            yield client
        finally:
            if executor.process.poll() is None:
                last = client.held_by("1000000:cleaner")
                await last.raise_fence()
                deleted = await last.call("DELETE", f"/attempts/{client.attempt}")
                assert deleted.status == 200, deleted.body
            await streams.close()


@pytest.fixture(scope="session", params=["Overlay", "Plain"])
def executor(request: pytest.FixtureRequest) -> Iterator[ExecutorProcess]:
    """A running executor, in each mode, shared by all tests that do not end it."""
    process = ExecutorProcess(request.param)
    yield process
    log = process.log.read_text()
    process.end()
    assert '"event": "defect"' not in log, log


@pytest.fixture(scope="session")
def overlay() -> Iterator[ExecutorProcess]:
    """An executor in Overlay, for features that Plain lacks."""
    process = ExecutorProcess("Overlay")
    yield process
    process.end()


@pytest.fixture
async def client(executor: ExecutorProcess) -> AsyncIterator[Client]:
    """An attempt with a live workspace."""
    async with open_client(executor) as client:
        yield client


@pytest.fixture
def start_executor() -> Iterator[Any]:
    """Starts executors that a test may end: `start_executor(mode, **config)`."""
    started: list[ExecutorProcess] = []

    def start(mode: str, **config: Any) -> ExecutorProcess:
        started.append(ExecutorProcess(mode, **config))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture(scope="session")
def executor_process() -> type[ExecutorProcess]:
    """Start executors that live as long as the test's module."""
    return ExecutorProcess


@pytest.fixture
def connect() -> Any:
    """`open_client`, for tests that start their own executors."""
    return open_client


@pytest.fixture
def end_init_of() -> Any:
    """`await end_init_of("sleep 777")` kills the init of the workspace in which that command runs."""

    async def end(command: str) -> None:
        found: list[str] = []
        while not found:
            pgrep = await asyncio.create_subprocess_exec("pgrep", "-xf", command, stdout=asyncio.subprocess.PIPE)
            found = (await pgrep.communicate())[0].decode().split()
        sleeper = found[0]
        namespace = f"/proc/{sleeper}/ns/pid"
        # PID 1 of its namespace, found from outside as only the machine's root can.
        kill = (
            f'for p in /proc/[0-9]*; do [ "$(readlink $p/ns/pid 2>/dev/null)" = "$(readlink {namespace})" ] && '
            "grep -q '^NSpid:.*[[:space:]]1$' $p/status && kill -9 ${p#/proc/}; done; true"
        )
        await (await asyncio.create_subprocess_shell(kill)).wait()

    return end


@pytest.fixture
def session_of() -> Any:
    """`open_session`, for tests that speak HTTP themselves."""
    return open_session


@pytest.fixture
def raw(executor: ExecutorProcess) -> Any:
    """`await raw(bytes)` sends bytes on a new connection, and returns everything that comes back until it is closed."""

    async def send(*pieces: bytes, seconds: float = 10.0, pause: float = 0.0) -> bytes:
        reader, writer = await asyncio.open_unix_connection(executor.socket)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            async with asyncio.timeout(seconds):
                return await reader.read()
        finally:
            writer.close()

    return send
