"""Tasks that several callers share, tasks without a caller, and the end of a process that serves until a signal.

Several callers wait by `asyncio.shield`, so that a cancelled one does not end the work for others.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)


def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task for it. asyncio does not log its exception if all waiting callers were cancelled."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def has_failed(task: asyncio.Task[Any]) -> bool:
    """Whether it has ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def shared(
    tasks: MutableMapping[K, asyncio.Task[T]], key: K, make: Callable[[], Coroutine[Any, Any, T]]
) -> asyncio.Task[T]:
    """Return the task for that key. If there is none, or if it has failed, start a new one."""
    task = tasks.get(key)
    if task is None or has_failed(task):
        task = tasks[key] = started(make())
    return task


async def ended_before(event: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> asyncio.Task[T] | None:
    """Return the task of `work` when it has ended; None if `event` ends first: the work was then cancelled, and has
    ended.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def repeat(step: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Call `step` at this interval until cancelled. An exception is logged and does not end the work, because no caller
    would notice its end.
    """
    while True:
        await asyncio.sleep(seconds)
        try:
            await step()
        except Exception:
            log.exception("%s failed; it is repeated in %g s", step.__qualname__, seconds)


@contextlib.contextmanager
def until_stopped() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for each in signals:
        loop.add_signal_handler(each, stop.set)
    try:
        yield stop
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
