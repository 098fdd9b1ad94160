"""How processes that a workspace leaves behind are killed."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from agent_runtime.executor import kernel
from agent_runtime.executor.init import processes

PROC = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class Family:
    """A process that kills its descendants on request, and a child of it that sleeps."""

    def __init__(self, kill: Callable[[], object]) -> None:
        told, tell = os.pipe()
        tells, tells_us = os.pipe()
        self._tell, self._killer = tell, os.fork()
        if self._killer == 0:
            self._live(kill, told, tells_us)
        child = int(os.read(tells, 20))
        self._child = os.pidfd_open(child)
        for end in (told, tells, tells_us):
            os.close(end)

    @staticmethod
    def _live(kill: Callable[[], object], told: int, tells_us: int) -> NoReturn:
        try:
            child = os.fork()
            if child == 0:
                time.sleep(600)
            os.write(tells_us, b"%d" % child)
            os.read(told, 1)
            kill()
        finally:
            os._exit(0)

    def kill(self) -> bool:
        """Have the killer kill; return whether the child has ended."""
        os.write(self._tell, b"!")
        os.waitpid(self._killer, 0)
        ends = select.poll()
        ends.register(self._child, select.POLLIN)
        return bool(ends.poll(5_000))

    def close(self) -> None:
        signal.pidfd_send_signal(self._child, signal.SIGKILL)
        for end in (self._child, self._tell):
            os.close(end)


@pytest.fixture
def family() -> Iterator[Callable[[Callable[[], object]], Family]]:
    made: list[Family] = []

    def make(kill: Callable[[], object]) -> Family:
        made.append(Family(kill))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_killer_that_is_killed_leaves_no_process_stopped(
    family: Callable[[Callable[[], object]], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_one_signal_and_die(pid: int, number: int) -> NoReturn:
        os.kill(pid, number)
        os._exit(0)

    monkeypatch.setattr(processes, "send", send_one_signal_and_die)
    assert family(lambda: processes.kill_below(PROC, os.getpid())).kill()


def test_killer_without_time_to_wait_has_killed_all_processes(family: Callable[[Callable[[], object]], Family]) -> None:
    assert family(lambda: processes.kill_below(PROC, os.getpid(), seconds=-1)).kill()


def _fork_and_exit(held: int) -> NoReturn:
    try:
        os.setsid()
        while True:
            os.write(held, b".")
            if os.fork():
                os._exit(0)
    finally:
        os._exit(1)


def test_a_process_that_forks_and_exits_without_pause_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes has ended before its state is read."""
    list_names = os.listdir

    def list_and_wait(folder: int) -> list[str]:
        names = list_names(folder)
        time.sleep(0.1)
        return names

    written, held = os.pipe()
    killer = os.fork()
    if killer == 0:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if os.fork() == 0:
            os.close(written)
            _fork_and_exit(held)
        os.read(written, 10)
        monkeypatch.setattr(os, "listdir", list_and_wait)
        os._exit(0 if processes.kill_below(PROC, os.getpid(), seconds=60) else 1)
    os.close(held)
    try:
        assert os.waitpid(killer, 0)[1] == 0
        left = 1 << 17  # more than a pipe holds: a process that lives would go on writing
        while left > 0 and select.select([written], [], [], 30)[0]:
            if not (content := os.read(written, 1 << 16)):
                return  # no process has the pipe open any more
            left -= len(content)
        pytest.fail("a process lives")
    finally:
        os.close(written)  # ends it
