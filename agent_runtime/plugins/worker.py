"""A thread of a plugin's own with an event loop in it, so that a plugin that blocks holds up nobody but itself."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agent_runtime.extensions import contained

PATIENCE_SECONDS = 1.0
"""For a thread whose last call ran out of time: it is back at its loop at once, or still blocked."""


class HookTimeout(Exception):
    """A call took longer than it may, or an earlier one still blocks the thread."""


class Worker:
    """Calls of one plugin. They run side by side where it awaits, and never on two threads at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_doubt = False
        """A call ran out of time, and the thread has not been heard of since."""

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float) -> Any:
        """What the function returns, awaited if need be. Raises HookTimeout, and whatever the function raises."""
        if self._in_doubt and await self._within(PATIENCE_SECONDS, _nothing, {}) is None:
            raise HookTimeout("an earlier call has run out of time and still blocks the plugin's thread")
        call = await self._within(seconds, function, arguments)
        if call is None:
            raise HookTimeout(f"took longer than timeoutSeconds {seconds:g}")
        return call.result()

    async def _within(
        self, seconds: float, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> "asyncio.Future[Any] | None":
        """A call that has ended, or None where it was given up when its time was over."""
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_called(function, arguments), self._started()))
        try:
            ended, _ = await asyncio.wait({call}, timeout=seconds)
        finally:
            call.cancel()  # where whoever asked was cancelled, too
        self._in_doubt = not ended
        return call if ended else None

    def close(self) -> None:
        """End the thread; one that blocks ends with the process."""
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
    """What the thread is asked to do to see whether it still listens."""


async def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    with contained(KeyboardInterrupt):  # no Ctrl-C comes to this thread
        value = function(**arguments)
        return await value if inspect.isawaitable(value) else value
