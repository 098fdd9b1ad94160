"""HTTP client of one executor (docs/executor.md), over a unix socket or TCP.

After a broken connection, a changing call is sent again with the same idempotency key, so that it happens once. Before
that, and before accepting that an attempt is fenced, the boot id is compared: a different one means that the sandbox
was lost and another executor listens at its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from agent_runtime.executor.commands.streams import UPGRADE
from agent_runtime.sandboxes.base import (
    DISK_FULL,
    OOM_KILLED,
    SANDBOX_MEMORY,
    CommandResult,
    DiskFailed,
    Fence,
    Fenced,
    FileError,
    SandboxFailure,
    WorkspaceLimit,
    ignore_pauses,
)
from agent_runtime.sandboxes.executor_client.commands import (
    CommandStream,
    CommandStreams,
    Refused,
    Running,
    answer,
    command_content,
    no_answer,
)
from agent_runtime.sandboxes.executor_client.connection import (
    STALL_SECONDS,
    Body,
    Connection,
    Connections,
    FailedReply,
    Headers,
)
from agent_runtime.sandboxes.executor_client.silence import SilenceWatch

# Pauses between attempts after a broken connection: 6 s in all, longer than short network failures, and shorter than a
# new attempt of the rollout. A unix socket without a listener is not retried, because a local executor has ended then.
RETRY_PAUSES = (0.05, 0.2, 0.75, 2.0, 3.0)
CONNECT_SECONDS = 5.0
# Time limit of a reply after the requested waitSeconds; beyond it the executor hangs. Uploads have STALL_SECONDS.
REPLY_SECONDS = 30.0
# After a network outage the executor may have few of its idleSeconds left.
KEEP_ALIVE_RETRY_SECONDS = 1.0
# The executor ends a command at its deadline. If a command still runs this much later, the executor is broken.
DEADLINE_GRACE_SECONDS = 60.0
LIMIT_CAUSES = frozenset({"Memory", "Disk", "Processes", "Attacked"})
DISK_ERRNOS = frozenset({"ENOSPC", "EDQUOT", "EIO"})

Query = Sequence[tuple[str, str]]
ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)
T = TypeVar("T")


class ExecutorRefusal(SandboxFailure):
    """An error response of the executor; `reason` is its code, and `details` are the other fields of the error object."""

    def __init__(self, code: str, message: str, details: Mapping[str, Any]) -> None:
        super().__init__(code, message)
        self.details = details


class MissingFile(FileError):
    """The path does not exist."""


@dataclass(frozen=True)
class Hold:
    """The attempt for which a call is made, by the executor's name for it, and the fence of the runner that holds it."""

    attempt: str
    fence: Fence

    @property
    def fence_text(self) -> str:
        """Return the value of the header: `EPOCH:HOLDER`."""
        return f"{self.fence.epoch}:{self.fence.holder}"

    def headers(self, key: str | None) -> dict[str, str]:
        """Return the headers of every call of this hold, and the idempotency key (`TURN:NAME`) if there is one."""
        headers = {"Rollout-Attempt": self.attempt, "Rollout-Fence": self.fence_text}
        if key is not None:
            headers["Idempotency-Key"] = key
        return headers


@dataclass(frozen=True)
class Reply:
    """A successful reply."""

    body: bytes
    headers: Headers

    def json(self) -> Any:
        return json.loads(self.body.decode())


def refusal(status: int, body: bytes, what: str) -> Exception:
    """Return the exception for an error reply. `what` names the call, for replies without an explanation."""
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return SandboxFailure(
            "ExecutorFailed", f"{what} was answered with status {status} and no explanation; see the executor's log"
        )
    match code:
        case "Fenced":
            return Fenced(message)
        case "WorkspaceFailed" if error.get("cause") in LIMIT_CAUSES:
            return WorkspaceLimit(error["cause"], message)
        case "WorkspaceFailed" if error.get("cause") == DISK_FULL:
            return disk_full(message)
        case "WorkspaceFailed":
            return SandboxFailure(reason_of_loss(error.get("cause")), message)
        case "NotFound" if "path" in error:
            return MissingFile(str(error["path"]), message)
        case "NotFound":
            return SandboxFailure("WorkspaceLost", message)
        case "FileError":
            kind = DiskFailed if error.get("errno") in DISK_ERRNOS else FileError
            return kind(str(error.get("path", "")), message)
        case "Unauthorized":
            return SandboxFailure("SandboxLost", f"another executor answers at this address: {message}")
    return ExecutorRefusal(code, message, {k: v for k, v in error.items() if k not in ("code", "message")})


def reason_of_loss(cause: Any) -> str:
    """Return the reason of a workspace that its executor has ended, by the cause that it gives."""
    return cause if cause in (SANDBOX_MEMORY, OOM_KILLED) else "WorkspaceLost"


def disk_full(what: str) -> SandboxFailure:
    """Return the failure of an operation that failed, or is unreliable, because others have filled the disk."""
    return SandboxFailure(DISK_FULL, f"{what}: other programs filled the sandbox's disk; free some space")


def query_string(query: Query) -> str:
    """Return `?a=b&c=d`, or an empty string. Bytes of names that are not UTF-8 are preserved as by os.fsencode."""
    if not query:
        return ""
    return "?" + "&".join(f"{name}={quote(value, safe='/', errors='surrogateescape')}" for name, value in query)


class ExecutorClient:
    """One executor. `address` is `unix:PATH` or `tcp:HOST:PORT`; all calls raise the errors of `refusal` and `_lost`.

    `boot_id` is None until the first `health` has returned it, if it is not known otherwise.
    """

    def __init__(self, address: str, token: str, boot_id: str | None = None) -> None:
        self.address, self.boot_id = address, boot_id
        self._token = token
        self._connections = Connections(self._connect)
        self._streams = CommandStreams(lambda: self.attach("/commands", UPGRADE, CommandStream))
        self.silence = SilenceWatch(self.health)
        kind, _, place = address.partition(":")
        self._socket_path = place if kind == "unix" else None
        self._fixed_headers = f"Host: executor\r\nAuthorization: Bearer {token}\r\n"
        self._unattended_from = math.inf
        """Monotonic time after which the executor may end as idle, because this process made no call in time."""

    async def call(
        self,
        method: str,
        path: str,
        *,
        hold: Hold | None = None,
        key: str | None = None,
        query: Query = (),
        json_body: Any = None,
        body: Body = None,
        wait_seconds: float = 0.0,
    ) -> Reply:
        """Make one call; sent again after a broken connection, unless `body` is a stream, which cannot be read twice.

        Raises SandboxFailure, Fenced, WorkspaceLimit, FileError.
        """
        if json_body is not None:
            body = json.dumps(json_body).encode()
        what = f"{method} {path}"
        head = self._head(method, f"{path}{query_string(query)}", hold.headers(key) if hold else {}, body)
        is_upload = not isinstance(body, bytes | None)
        silence_seconds = STALL_SECONDS if is_upload else wait_seconds + REPLY_SECONDS
        status, headers, reply = await self._retried(
            what, lambda: self._connections.ask(head, body, silence_seconds), is_repeatable=not is_upload
        )
        if status < 400:
            return Reply(reply, headers)
        raise await self._verified_failure(refusal(status, reply, what))

    async def run(
        self, hold: Hold, workspace: str, key: str, command: str | Sequence[str], *, deadline_seconds: float, **how: Any
    ) -> CommandResult:
        """Run a command to its end, `how` as for `command_content` and `RunOptions`; sent again after a broken
        connection.

        Raises as `call`, and ValueError for arguments that no program can have.
        """
        how["deadline_seconds"] = deadline_seconds
        ended = await self._command(hold, workspace, key, command, deadline_seconds + DEADLINE_GRACE_SECONDS, how)
        assert isinstance(ended, CommandResult)  # the stream passes on no other errors
        return ended

    async def start(self, hold: Hold, workspace: str, key: str, command: str | Sequence[str], **how: Any) -> str:
        """Start a command that outlives the call; return the id of its process. Otherwise like `run`."""
        running = await self._command(hold, workspace, key, command, None, {**how, "lives_on": True})
        if not isinstance(running, Running):
            raise no_answer()
        return running.id

    async def _command(
        self,
        hold: Hold,
        workspace: str,
        key: str,
        command: str | Sequence[str],
        seconds: float | None,
        how: dict[str, Any],
    ) -> CommandResult | Running:
        what = f"command {key} of {workspace}"
        pausing = how.pop("pausing", ignore_pauses)
        content = command_content((hold.attempt, hold.fence_text, key, workspace), command, **how)
        said = answer(await self._retried(what, lambda: self._streams.ask(content, seconds, pausing)))
        if isinstance(said, Refused):
            raise await self._verified_failure(refusal(0, said.body, what))
        return said

    async def stream(self, path: str, query: Query = ()) -> AsyncIterator[bytes]:
        """Yield the body of a GET as it arrives. A broken connection ends it with SandboxFailure, never silently."""
        head = self._head("GET", f"{path}{query_string(query)}", {}, None)
        try:
            async with self._connections.exchange(head, None, REPLY_SECONDS) as (status, _, chunks):
                if status >= 400:
                    raise refusal(status, b"".join([chunk async for chunk in chunks]), f"GET {path}")
                async for chunk in chunks:
                    yield chunk
        except FailedReply as failed:
            raise refusal(500, failed.body, f"GET {path}") from None
        except (OSError, TimeoutError) as error:
            raise self._lost(f"GET {path}", error) from error

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            if self._socket_path is not None:
                return (await loop.create_unix_connection(Connection, self._socket_path))[1]
            host, _, port = self.address.removeprefix("tcp:").rpartition(":")
            return (await loop.create_connection(Connection, host.strip("[]"), int(port)))[1]

    def secret(self, purpose: str) -> bytes:
        """Return 32 bytes that can only be derived from the token; the executor itself only has the token's digest."""
        return hmac.digest(self._token.encode(), purpose.encode(), "sha256")

    async def health(self) -> dict[str, Any]:
        """Call `GET /v1/health` once. Raises SandboxFailure if the executor has ended or is another one."""
        try:
            status, _, reply = await self._connections.ask(self._head("GET", "/health", {}, None), None, REPLY_SECONDS)
        except (OSError, TimeoutError) as error:
            raise self._lost("GET /health", error) from error
        if status >= 400:
            raise refusal(status, reply, "GET /health")
        health: dict[str, Any] = json.loads(reply)
        if self.boot_id is None:
            self.boot_id = health["bootId"]
        if health["bootId"] != self.boot_id:
            raise SandboxFailure(
                "SandboxLost",
                f"the executor at {self.address} was restarted (boot id {health['bootId']}, expected "
                f"{self.boot_id}); its workspaces no longer exist",
            )
        return health

    async def first_health(self, pause: Callable[[], Awaitable[float]], seconds: float = math.inf) -> dict[str, Any]:
        """Call `health` of an executor that may not listen yet. `pause` returns the seconds before each further
        attempt, or raises.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                return await self.health()
            except SandboxFailure as failure:
                if not isinstance(failure.__cause__, OSError | TimeoutError) or time.monotonic() > until:
                    raise
                await asyncio.sleep(await pause())

    async def end_after(self, seconds: float) -> None:
        """Have the executor end after this time, or its `idleSeconds` if shorter, unless another request comes before. An
        executor that does not answer ends after its `idleSeconds`.
        """
        body = json.dumps({"seconds": seconds}).encode()
        with contextlib.suppress(OSError, TimeoutError):
            await self._connections.ask(self._head("PUT", "/idle", {}, body), body, REPLY_SECONDS)

    async def keep_alive(self, idle_seconds: float) -> None:
        """Call the executor's health until cancelled, so that it does not end as idle during a long model call."""
        pause = idle_seconds / 3
        while True:
            # Set before the pause: if this process is stopped (SIGSTOP, Ctrl-Z), another call may detect the loss
            # before the next check.
            self._unattended_from = min(self._unattended_from, time.monotonic() + idle_seconds)
            try:
                await asyncio.sleep(pause)
            finally:
                if time.monotonic() < self._unattended_from:
                    self._unattended_from = math.inf
            pause = min(KEEP_ALIVE_RETRY_SECONDS, idle_seconds / 3)
            with contextlib.suppress(SandboxFailure):
                await self.health()
                self._unattended_from = math.inf
                pause = idle_seconds / 3

    def marked_if_stopped(self, failure: SandboxFailure) -> SandboxFailure:
        """Return the failure, marked if this process was stopped before it."""
        failure.was_unheld = time.monotonic() > self._unattended_from
        return failure

    async def is_alive(self, has_ended: Callable[[], Awaitable[bool]] | None = None) -> bool:
        """Whether this executor responds. An unanswered call is repeated, because a busy machine may miss one.

        `has_ended` says whether its process has ended; then nothing is repeated.
        """
        for pause in (*RETRY_PAUSES, None):
            try:
                await self.health()
                return True
            except SandboxFailure as failure:
                error = failure.__cause__
                if not isinstance(error, (OSError, TimeoutError)) or self._is_final(error):
                    return False
            if pause is None or (has_ended is not None and await has_ended()):
                return False
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: the last attempt returns")

    async def close(self) -> None:
        self.silence.close()
        self._connections.close()
        self._streams.close()

    async def attach(
        self, path: str, upgrade: str, make: Callable[[], ProtocolT], hold: Hold | None = None
    ) -> ProtocolT:
        """Open a separate connection that uses another protocol after this call. Raises OSError, TimeoutError, and the
        errors of `refusal`.
        """
        connection = await self._connect()
        headers = {**(hold.headers(None) if hold else {}), "Connection": "Upgrade", "Upgrade": upgrade}
        try:
            await connection.send(self._head("POST", path, headers, b""), None)
            status, received = await connection.read_head(REPLY_SECONDS)
            if status != 101:
                body = b"".join([piece async for piece in connection.body(received, REPLY_SECONDS)])
                raise refusal(status, body, f"POST {path}")
        except BaseException:
            connection.abort()
            raise
        protocol = make()
        connection.become(protocol)
        return protocol

    async def _retried(self, what: str, ask: Callable[[], Awaitable[T]], *, is_repeatable: bool = True) -> T:
        """Return the response, retrying after broken connections. Raises SandboxFailure."""
        for pause in (*RETRY_PAUSES, None):
            try:
                return await ask()
            except FailedReply as failed:
                raise refusal(500, failed.body, what) from None
            except (OSError, TimeoutError) as error:
                if pause is None or self._is_final(error) or not is_repeatable:
                    raise self._lost(what, error) from error
            await asyncio.sleep(pause)
            await self._check_boot_id()
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _verified_failure(self, failure: Exception) -> Exception:
        """Return the failure, or SandboxLost if another executor at this address raised it: it reports every attempt as
        fenced.
        """
        if isinstance(failure, Fenced):
            await self._check_boot_id()
        return failure

    def _head(self, method: str, target: str, headers: Mapping[str, str], body: Body) -> bytes:
        lines = self._fixed_headers
        for name, value in headers.items():
            if not value.isprintable():
                raise ValueError(f"{name}: {value!r} cannot be a header, because it contains a line end")
            lines += f"{name}: {value}\r\n"
        if isinstance(body, bytes):
            lines += f"Content-Length: {len(body)}\r\n"
        elif body is not None:
            lines += "Transfer-Encoding: chunked\r\n"
        return f"{method} /v1{target} HTTP/1.1\r\n{lines}\r\n".encode()

    async def _check_boot_id(self) -> None:
        """Raise SandboxLost if another executor responds; an unanswered call is left to the next attempt."""
        try:
            await self.health()
        except SandboxFailure as failure:
            if not isinstance(failure.__cause__, (OSError, TimeoutError)):
                raise

    def _is_final(self, error: Exception) -> bool:
        """Whether the unix socket of a process on this machine has no listener, so that the process has ended."""
        return self._socket_path is not None and getattr(error, "errno", None) in (errno.ENOENT, errno.ECONNREFUSED)

    def _lost(self, what: str, error: Exception) -> SandboxFailure:
        reason = f"{type(error).__name__} {error}".strip()
        message = f"{what}: the executor at {self.address} does not answer ({reason})"
        return self.marked_if_stopped(SandboxFailure("SandboxLost", message))
