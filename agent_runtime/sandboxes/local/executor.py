"""An executor as a detached process of this machine. The next runner with the same run folder finds it by its record."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_runtime.executor.init.trees import remove
from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.client import ExecutorClient
from agent_runtime.sandboxes.recorded import ExecutorRecords

READY_POLL_SECONDS = 0.01
# Ending hundreds of workspaces takes a third of a second. After this time the executor is killed with its workspaces.
STOP_SECONDS = 10.0
LOG_TAIL_BYTES = 2000
PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class ExecutorRecord:
    """Data with which the next process finds an executor, in a file that only its owner may read."""

    address: str
    boot_id: str
    token: str = field(repr=False)
    pid: int
    mode: str
    mode_reason: str | None
    home: str
    """The executor's temporary folder: socket, layers and spill files; in `Plain` the workspace's root too."""


Settings = Callable[[Path, WorkspaceSpec], Mapping[str, Any]]
"""Returns keys of an executor's configuration, given its temporary folder and a workspace's spec."""


class LocalExecutors:
    """Executors of this machine, recorded in the folder `records`, each with a home in `homes`, or else in TMPDIR.

    Without `start_seconds` the workspace's own limit applies.
    """

    def __init__(
        self, records: Path, settings: Settings, start_seconds: float | None, homes: str | None = None
    ) -> None:
        self._homes = homes
        self._records = ExecutorRecords(records, ExecutorRecord)
        self.names = self._records.names
        self._settings, self._start_seconds = settings, start_seconds

    async def find(self, name: str) -> LocalExecutor | None:
        record = self._records.read(name)
        if record is None:
            return None
        executor = LocalExecutor(record, self._records.path(name))
        if await executor.client.is_alive():
            return executor
        await executor.client.close()
        executor.remove_traces()
        return None

    async def start(self, name: str, spec: WorkspaceSpec) -> LocalExecutor:
        # Not in the run folder, because a socket's path is limited to 107 bytes, and other users cannot enter home
        # folders.
        home = Path(tempfile.mkdtemp(prefix="rollout-", dir=self._homes))
        home.chmod(0o711)
        private = home / "executor"
        private.mkdir(mode=0o700)
        (private / "state").mkdir()
        token = secrets.token_urlsafe(32)
        ready = private / "ready.json"
        configuration = {
            "listen": f"unix:{private / 'socket'}",
            "tokenSha256": hashlib.sha256(token.encode()).hexdigest(),
            "stateDir": str(private / "state"),
            "readyFile": str(ready),
            # The executor removes its files itself, because there may be no further runner.
            "removeAtEnd": str(home),
            **self._runner_locks(),
            **self._settings(home, spec),
        }
        (private / "config.json").write_text(json.dumps(configuration))
        # Create the folder again: another process of this run may have removed it when it was empty.
        self._records.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self._records.path(name).with_suffix(".log")
        pid = _spawn(private / "config.json", log)
        try:
            state = await _wait_until_ready(pid, ready, log, self._start_seconds or spec.start_seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                await _end(pid)
            with contextlib.suppress(OSError):
                remove(home)
            raise
        record = ExecutorRecord(
            state["address"], state["bootId"], token, pid, state["mode"], state.get("modeReason"), str(home)
        )
        return LocalExecutor(record, self._records.write(name, record))

    def _runner_locks(self) -> Mapping[str, Any]:
        """Return the folder of the run's locks, if this process works on a run: it ends soon after its last process."""
        folder = self._records.folder.parent
        return {"runnerLocks": str(folder)} if list(folder.glob("shard-*.lock")) else {}


class LocalExecutor:
    """A running executor of this machine, reached through `client`."""

    def __init__(self, record: ExecutorRecord, path: Path) -> None:
        self.record, self._path = record, path
        self.mode = record.mode
        self.client = ExecutorClient(record.address, record.token, record.boot_id)

    async def stop(self) -> None:
        """End the sandbox and its workspaces, and remove its files."""
        # Only if it responds with its boot id, its pid is certainly not reused.
        if await self.client.is_alive():
            with contextlib.suppress(ProcessLookupError):
                await _end(self.record.pid)
        await self.client.close()
        self.remove_traces()

    def remove_traces(self) -> None:
        with contextlib.suppress(OSError):
            remove(self.record.home)
        self._path.unlink(missing_ok=True)
        log = self._path.with_suffix(".log")
        if log.exists() and not log.stat().st_size:
            log.unlink()


def _spawn(configuration: Path, log: Path) -> int:
    """Start the executor in its own session, without this process's environment, which may contain keys."""
    environment = {"PATH": os.defpath, "PYTHONPATH": str(PACKAGE_ROOT), "LANG": "C.UTF-8"}
    arguments = [sys.executable, "-P", "-m", "agent_runtime.executor", "--config", str(configuration)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        arguments,
        environment,
        setsid=True,
        setsigdef=[signal.SIGINT, signal.SIGPIPE],
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )


async def _wait_until_ready(pid: int, ready: Path, log: Path, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not ready.exists():
        ended, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 (does not wait)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            raise SandboxFailure("ExecutorFailed", f"the executor ended with code {code} at its start: {_tail(log)}")
        if time.monotonic() > deadline:
            raise SandboxFailure(
                "ExecutorFailed",
                f"the executor did not listen after {seconds:g} s (sandbox.startSeconds): {_tail(log)}",
            )
        await asyncio.sleep(READY_POLL_SECONDS)
    state: dict[str, Any] = json.loads(ready.read_text())
    return state


async def _end(pid: int) -> None:
    """Send SIGTERM, then SIGKILL if necessary; return when the process has ended. Raises ProcessLookupError."""
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        try:
            await asyncio.wait_for(gone.wait(), STOP_SECONDS)
        except TimeoutError:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)  # noqa: ASYNC222 (it has ended)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        text = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        if text:
            return text
    return f"there is no output ({log})"
