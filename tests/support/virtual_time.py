"""Time that tests control, so that a busy machine changes no result."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
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


@contextlib.contextmanager
def passing_time() -> Iterator[Callable[[int], Coroutine[Any, Any, None]]]:
    """Yield a coroutine function that lets so many seconds pass at once, in addition to the real time.

    For tests with sockets or storage, in which `virtual_time` is not possible: limits can be far above what a busy machine
    needs. Call it in the event loop of the tested code.
    """
    monotonic, perf_counter, passed = time.monotonic, time.perf_counter, 0

    async def let_pass(seconds: int) -> None:
        nonlocal passed
        for _ in range(seconds):  # After a longer step, clocks that leave out standstills would leave it out.
            passed += 1
            await asyncio.sleep(0)

    with mock.patch.multiple(
        time, monotonic=lambda: monotonic() + passed, perf_counter=lambda: perf_counter() + passed
    ):
        yield let_pass
