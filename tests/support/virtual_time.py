"""Time of an event loop that passes only while all of its jobs wait, so that a busy machine changes no result."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock


class VirtualClock:
    """Tests may increase `now`: time then passes without a chance for any job to run, as while a process is stopped."""

    def __init__(self) -> None:
        self.now = time.monotonic()


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualClock]:
    """Replace the time of the running event loop, `time.time()`, `time.monotonic()` and `time.perf_counter()`.

    When no job can continue, the time advances to the next timer at once. Threads of `asyncio.to_thread` are awaited first.
    Not for tests with sockets, processes, plugins or storage: their answers take real time.
    """
    loop: Any = asyncio.get_running_loop()
    clock, in_threads = VirtualClock(), set[asyncio.Future[Any]]()
    run_once, run_in_executor = loop._run_once, loop.run_in_executor
    epoch = time.time() - clock.now

    def advance_and_run_once() -> None:
        if not loop._ready and not in_threads and not loop._selector.select(0):
            timers = [timer.when() for timer in loop._scheduled if not timer.cancelled()]
            clock.now = max(clock.now, min(timers, default=clock.now))
        run_once()

    def run_in_thread(*arguments: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = run_in_executor(*arguments)
        in_threads.add(future)
        future.add_done_callback(in_threads.discard)
        return future

    def now() -> float:
        return clock.now

    def wall() -> float:
        return epoch + clock.now

    loop._run_once, loop.run_in_executor = advance_and_run_once, run_in_thread
    try:
        with mock.patch.multiple(time, time=wall, monotonic=now, perf_counter=now):
            yield clock
    finally:
        del loop._run_once, loop.run_in_executor
