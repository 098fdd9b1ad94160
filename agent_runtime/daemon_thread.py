"""Blocking work that may never end."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, and return its result or raise its exception.

    Cancellation abandons the thread. It keeps neither the process from ending nor other threads of a pool waiting.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:  # noqa: BLE001 raised again by `done`
            result, error = None, raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop has ended, and nobody waits any more

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True).start()
    return await done
