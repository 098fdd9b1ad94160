"""The executor's process, from its configuration to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from agent_runtime.executor import CONTRACT_VERSION
from agent_runtime.executor.config import ExecutorConfig
from agent_runtime.executor.http.server import Server, log
from agent_runtime.executor.init.trees import remove
from agent_runtime.executor.overlay import open_host
from agent_runtime.executor.overlay.hosts import Host
from agent_runtime.executor.routes.application import Application
from agent_runtime.executor.runner_locks import ABANDONED_SECONDS, LOOK_SECONDS, RunnerLocks
from agent_runtime.executor.sandbox import Sandbox, empty
from agent_runtime.executor.timing import leave_out_standstills

# Ten times Python's default threshold: a collection every few hundred commands instead of every few dozen, for some
# megabytes.
_GC_OBJECTS = 7000
# sigaction(2): `si_code` of a signal sent by kill(2). The kernel sets the sender's pid.
_SI_USER = 0


class End(IntEnum):
    """Why an executor ended, as its exit code."""

    IDLE = 0
    """No authenticated request came for `idleSeconds`, or its runner has died."""
    BROKEN = 1
    """No workspace can be created any more."""
    STOPPED = 128 + signal.SIGTERM
    """A signal. Not 0: the kubelet drops the reason of an eviction if all containers of the pod end with 0."""


class Daemon:
    """A running executor."""

    def __init__(self, config: ExecutorConfig, host: Host, mode_reason: str | None, folder: str) -> None:
        self.sandbox = Sandbox(host, folder)
        self.boot_id = os.urandom(16).hex()
        self._config, self._mode_reason = config, mode_reason
        self._started_at = time.monotonic()
        self._runner_locks = None if config.runner_locks is None else RunnerLocks(config.runner_locks)
        self.application = Application(self.sandbox, config.token_sha256, self.health)
        self.server = Server(self.application)

    def health(self) -> dict[str, Any]:
        """Return the object of `GET /v1/health`."""
        host, limits = self.sandbox.host, self._config.host
        usages = [entry.workspace.usage() for entry in self.sandbox.workspaces.values()]
        return {
            "bootId": self.boot_id,
            "version": CONTRACT_VERSION,
            "mode": host.mode,
            "modeReason": self._mode_reason,
            "root": limits.root,
            "places": {"total": host.places, "free": self.sandbox.free_places()},
            "draining": self.sandbox.is_draining,
            "live": self.sandbox.live(),
            "rollouts": self.sandbox.rollouts(),
            "uses": self.sandbox.uses,
            "uptimeSeconds": round(time.monotonic() - self._started_at, 3),
            "memoryBytes": {
                "used": sum(u["memoryBytes"] for u in usages),
                "limit": limits.memory_bytes,
                **host.watch.paused_commands(),
                "measured": host.watch.measured(),
            },
            "diskBytes": {"used": sum(u["diskBytes"] for u in usages), "limit": limits.disk_bytes},
            "guarantees": host.guarantees(),
        }

    async def run(self) -> End:
        """Serve until the end; return its cause."""
        told_to_end, end = asyncio.Event(), End.IDLE

        def end_stopped() -> None:
            nonlocal end
            end = End.STOPPED
            told_to_end.set()

        _on_stop_signal(end_stopped)

        def end_broken(why: str) -> None:
            # Its client then uses another executor. Otherwise all further rollouts here would be lost.
            nonlocal end
            if not told_to_end.is_set():
                log(
                    event="broken",
                    message=f"the executor ends: a process that creates or removes workspaces has ended ({why})",
                )
                end = End.BROKEN
                told_to_end.set()

        self.sandbox.host.on_broken(end_broken)
        address = await self.server.listen(self._config.listen)
        self._write_ready_file(address)
        while not told_to_end.is_set():
            left = self._idle_seconds_left()
            if left is not None and left <= 0:
                log(event="idle", message=f"no authenticated request for {self._allowed_idle_seconds():g} s; ending")
                break
            if self._runner_locks is not None:
                if self._runner_locks.is_abandoned(time.monotonic()):
                    log(event="abandoned", message=f"its runner has died, {ABANDONED_SECONDS:g} s ago at least; ending")
                    break
                left = LOOK_SECONDS if left is None else min(left, LOOK_SECONDS)
            await self._wait(told_to_end, left)
        told_to_end.set()
        self.server.close()
        await self.sandbox.close()
        return end

    async def _wait(self, told_to_end: asyncio.Event, seconds: float | None) -> None:
        """Wait at most this long for the end, or for a new limit of the idle time."""
        limited = self.sandbox.activity.limited
        limited.clear()
        events = [asyncio.ensure_future(event.wait()) for event in (told_to_end, limited)]
        await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()

    def _idle_seconds_left(self) -> float | None:
        activity = self.sandbox.activity
        allowed = self._allowed_idle_seconds()
        if allowed is None:
            return None
        if activity.at_work:
            return float(allowed)
        return activity.last + allowed - asyncio.get_running_loop().time()

    def _allowed_idle_seconds(self) -> float | None:
        if self.sandbox.stillness.is_on:
            return None  # a parking that has not begun to store may wait for long
        return min(filter(None, (self._config.idle_seconds, self.sandbox.activity.limit_seconds)), default=None)

    def _write_ready_file(self, address: str) -> None:
        path = self._config.ready_file
        if path is None:
            return
        ready = {
            "address": address,
            "bootId": self.boot_id,
            "mode": self.sandbox.host.mode,
            "modeReason": self._mode_reason,
            "pid": os.getpid(),
        }
        beside = f"{path}.{os.getpid()}.partial"
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(ready, file)
        os.rename(beside, path)


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def hold_stop_signals() -> None:
    """As PID 1 of a container, leave stop signals to `Daemon.run`. Call this before any thread exists: each one inherits it.
    A thread that takes a signal which has a handler, as Python gives SIGINT one, would let any process in the container end
    this one.
    """
    if os.getpid() == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _on_stop_signal(call: Callable[[], None]) -> None:
    """Call a function in this loop when this process gets a stop signal; as PID 1 of a container, only for signals from
    outside the container, which `hold_stop_signals` has held.

    The kernel ignores signals from inside for a container's PID 1 without a handler; with a SIGTERM handler, a tool
    could end it too.
    """
    loop = asyncio.get_running_loop()
    if os.getpid() != 1:
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, call)
        return

    def wait() -> None:
        while True:
            sent = signal.sigwaitinfo(_STOP_SIGNALS)
            # Senders outside this PID namespace have pid 0 here. No process can fake SI_USER.
            if sent.si_code == _SI_USER and sent.si_pid == 0:
                loop.call_soon_threadsafe(call)
                return

    threading.Thread(target=wait, name="stop signals", daemon=True).start()


async def serve(config: ExecutorConfig) -> End:
    """Open the host and run; return as `Daemon.run`. Raises HostFailure if the requested mode is
    unavailable, and OSError.
    """
    leave_out_standstills()
    # This comes first, because it refuses a state folder that another executor uses.
    host, mode_reason = await open_host(config.host)
    # Few objects created from here on are cyclic garbage, so collect less often, and skip the objects that exist now.
    gc.freeze()
    gc.set_threshold(_GC_OBJECTS)
    try:
        folder = os.path.join(config.host.state_dir, "daemon")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        empty(folder)
        kind, _, path = config.listen.partition(":")
        if kind == "unix":
            # Files that a killed executor left.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return await Daemon(config, host, mode_reason, folder).run()
    finally:
        await host.close()
        if config.remove_at_end is not None:
            with contextlib.suppress(OSError):
                remove(config.remove_at_end)
