"""A plugin's own thread with an event loop, so that a plugin that blocks delays only itself."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agent_runtime.extensions import contained

PATIENCE_SECONDS = 1.0
"""Time for the thread to respond after a call timed out; otherwise it counts as blocked."""


class HookTimeout(Exception):
    """A call exceeded its time limit, or an earlier one still blocks the thread."""


class Worker:
    """Calls of one plugin. They are concurrent while it awaits, and always on the same thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_doubt = False
        """Whether a call has timed out and the thread has not responded since."""

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float) -> Any:
        """Return the function's result, awaited if necessary. Raises HookTimeout and the function's errors."""
        if self._in_doubt and await self._within(PATIENCE_SECONDS, _nothing, {}) is None:
            raise HookTimeout("an earlier call has run out of time and still blocks the plugin's thread")
        call = await self._within(seconds, function, arguments)
        if call is None:
            raise HookTimeout(f"took longer than timeoutSeconds {seconds:g}")
        return call.result()

    async def _within(
        self, seconds: float, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> "asyncio.Future[Any] | None":
        """Wait for a call; None if it was abandoned at its time limit."""
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_called(function, arguments), self._started()))
        try:
            ended, _ = await asyncio.wait({call}, timeout=seconds)
        finally:
            call.cancel()  # also when the caller was cancelled
        self._in_doubt = not ended
        return call if ended else None

    def close(self) -> None:
        """End the thread; a blocked one ends with the process."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name=f"plugin {self._name}", daemon=True).start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _nothing() -> None:
    """Do nothing; used to check whether the thread responds."""


async def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    with contained(KeyboardInterrupt):  # raised by the plugin itself: Ctrl-C only reaches the main thread
        value = function(**arguments)
        return await value if inspect.isawaitable(value) else value
