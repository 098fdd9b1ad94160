"""Agents whose code catches every exception: those that call again after each error, and those that do not end when they
are cancelled.
"""

import asyncio
import ctypes
from types import TracebackType
from typing import Any

from agent_runtime.engine.attempt.attribution import AGENTS_TO_HANDLE
from agent_runtime.extensions import described

MOST_FAILED_IN_A_ROW = 100


class FailureLimit:
    """Cancels an agent that catches the error of each call and calls again: otherwise it would never end, and if no call
    waits for anything, it would block all rollouts of this process. Each call is made within `async with`.
    """

    def __init__(self) -> None:
        self.failed_in_a_row = 0
        self.cancellation: asyncio.CancelledError | None = None
        """Raised in the agent's code when the limit was exceeded."""
        self.ignored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the agent has caught the cancellation too, and called again. Its calls then wait forever."""

    async def __aenter__(self) -> None:
        if self.failed_in_a_row <= MOST_FAILED_IN_A_ROW:
            return
        if not self.ignored.done():
            self.ignored.set_result(None)
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine of asyncio runs in a task"
        leave_behind(caller)
        await asyncio.get_running_loop().create_future()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, AGENTS_TO_HANDLE):
            return
        self.failed_in_a_row += 1
        if self.failed_in_a_row > MOST_FAILED_IN_A_ROW:
            self.cancellation = asyncio.CancelledError(
                f"{MOST_FAILED_IN_A_ROW} calls of the agent failed in a row, and it made another one; do not "
                f"catch their errors. The last one: {described(error)}"
            )
            raise self.cancellation from error


def leave_behind(job: "asyncio.Task[Any]") -> None:
    """Let a coroutine that swallows its cancellation wait or run on alone, until the process ends."""
    # asyncio.run cancels all registered coroutines at the end, and waits for them, which would take forever.
    asyncio.tasks._unregister_task(job)
    # The interpreter closes a coroutine without references, also when it exits. Code that catches GeneratorExit as well
    # would then loop forever, or print an error.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(job))
    job.add_done_callback(_ended)


def _ended(job: "asyncio.Task[Any]") -> None:
    if not job.cancelled():
        job.exception()  # otherwise asyncio reports that it was not retrieved
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(job))
