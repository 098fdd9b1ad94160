"""Pause a workspace with the ones that joined it: while the sandbox's memory is short, or while their files are read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator

from agent_runtime.executor.init.processes import Process
from agent_runtime.executor.timing import Notifier


class Pause:
    """Whether a workspace, with those that joined it, is paused. Its processes are stopped by SIGSTOP, and commands wait
    for their start.

    A pause has one of two reasons: memory is short, or a caller has leased it to read files. No pause for memory begins
    during a lease.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._before = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self.is_for_memory = False
        """Whether memory is short."""
        self.changed = Notifier()
        """Notified when it begins and when it ends."""
        self.is_steady = False
        """Whether it never pauses for memory."""
        self._forbidden = 0
        # By descriptor of /proc and process. Processes that a tool has stopped are not in it, and stay stopped.
        self._stopped: set[tuple[int, int]] = set()

    @property
    def is_on(self) -> bool:
        return self._since is not None

    @property
    def is_leased(self) -> bool:
        return self._lease is not None

    @property
    def is_forbidden(self) -> bool:
        """Whether no pause for memory may begin. One that has begun ends at the next check."""
        return self.is_steady or self._forbidden > 0 or self.is_leased

    @contextlib.contextmanager
    def forbidden(self) -> Iterator[None]:
        """Forbid pauses for memory while the context is open."""
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    def seconds(self) -> float:
        """Return how long it has been paused in all."""
        return self._before + (0.0 if self._since is None else asyncio.get_running_loop().time() - self._since)

    def begin(self) -> None:
        """Begin a pause for memory, if it is not forbidden."""
        if not self.is_forbidden:
            self.is_for_memory = True
            self._update()

    def end(self) -> None:
        """End a pause for memory, after `proceed` for the processes."""
        self.is_for_memory = False
        self._update()

    def lease(self, seconds: float, expire: Callable[[], None]) -> None:
        """Pause for that time from now on; `expire` is called at its end, and calls `end_lease`."""
        if self._lease is not None:
            self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(seconds, expire)
        self._update()

    def end_lease(self, tools: Iterable[tuple[int, Iterable[Process]]]) -> None:
        """End a lease and continue these processes, as far as `stop` has stopped them. Idempotent.

        `tools` are the processes of each workspace, with the descriptor of its /proc.
        """
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
            for proc, running in tools:
                self.proceed(proc, running)
            self._update()

    def _update(self) -> None:
        is_on = self.is_for_memory or self.is_leased
        if is_on == self.is_on:
            return
        if is_on:
            self._since = asyncio.get_running_loop().time()
        else:
            self._before, self._since = self.seconds(), None
            self._stopped.clear()
        self.changed.notify()

    async def wait(self) -> None:
        """Return when it is not paused."""
        while self.is_on:
            await Notifier.wait(self.changed)

    def stop(self, proc: int, running: Iterable[Process]) -> None:
        """Stop these processes, parents before their children, so that no shell notices that its child has stopped.

        Repeat this at every check: a process may have been forked meanwhile, or continued by another one.
        """
        for process in running:
            if process.state != "T":
                self._stopped.add((proc, process.pid))
                _send(proc, process.pid, signal.SIGSTOP)

    def proceed(self, proc: int, running: Iterable[Process]) -> None:
        """Continue these processes, as far as `stop` has stopped them and no lease forbids it; children before their
        parents.
        """
        if self.is_leased:
            return
        self.let_run(proc, running)

    def let_run(self, proc: int, running: Iterable[Process]) -> None:
        """Continue these processes for a moment, although a lease is on."""
        for process in reversed(list(running)):
            if (proc, process.pid) in self._stopped:
                _send(proc, process.pid, signal.SIGCONT)


def _send(proc: int, pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # it has ended
        # A folder in /proc serves as a process descriptor, also for another process namespace.
        folder = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            signal.pidfd_send_signal(folder, number)
        finally:
            os.close(folder)
