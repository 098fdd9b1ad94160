"""An attempt as the executor sees it: who holds it, which calls it has made, and which of them are still at work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agent_runtime.executor.bell import Bell
from agent_runtime.executor.errors import NOT_REMEMBERED, ApiError, bad_request
from agent_runtime.executor.fencing import Fence, Hold
from agent_runtime.executor.idempotency import Entry, Key, KeyMemory, reused
from agent_runtime.executor.processes import Process
from agent_runtime.executor.remembered import StoredReply
from agent_runtime.executor.server import Disconnected, Request, log_defect

# What a call leaves behind: a reply, or a process, whose status is asked anew each time.
Result = StoredReply | Process
Work = Callable[[], Awaitable[Result]]
T = TypeVar("T")


@dataclass(eq=False)
class Call(Generic[T]):
    """A call at work. `may_be_broken_off` says whether that does nothing that a repeat would spoil."""

    hold: Hold
    may_be_broken_off: Callable[[], bool]
    task: asyncio.Task[T]


class Attempt:
    """Makes each call once, in a task that outlives the caller's connection."""

    def __init__(self, attempt_id: str) -> None:
        self.id = attempt_id
        self.fence = Fence(attempt_id)
        self.keys: KeyMemory[Result] = KeyMemory(_dropped)
        # Rung when a newer hold was raised.
        self.superseded = Bell()
        self._call_ended = Bell()
        self._calls: set[Call[Any]] = set()
        self._is_deleted = False
        self._deletion: asyncio.Task[None] | None = None

    async def raise_fence(self, hold: Hold) -> None:
        """Make `hold` the current one; returns when no call of an older one is at work. Raises Fenced."""
        if self.fence.raise_to(hold):
            self.superseded.ring()
            for call in self._calls:
                if call.hold != hold and call.may_be_broken_off():
                    call.task.cancel()
        while not self.fence.is_settled(hold):
            await Bell.wait(self._call_ended)
        self.fence.require(hold)
        self._is_deleted = False

    async def once(
        self,
        hold: Hold,
        key: Key,
        request: Request,
        body_digest: bytes | None,
        work: Work,
        may_be_broken_off: Callable[[], bool],
    ) -> Result:
        """What the call named `key` has left behind: made now, joined, or remembered.

        `body_digest` is None where `work` reads the request's body itself. Raises what the call was refused with, Fenced,
        Forgotten, KeyReused.
        """
        request_line = f"{request.head.method} {request.head.target}"
        while True:
            self.require(hold)
            entry = self.keys.find(key, request_line)
            is_ours = entry is None
            if entry is None:
                entry = self.keys.begin(key, request_line, body_digest)
                self._start(hold, key, request, entry, work, may_be_broken_off)
            elif body_digest is not None and body_digest != entry.body_digest:
                raise reused(key, "it was made with another body")
            while not entry.is_finished:
                await Bell.wait(entry.finished)
            # The first call's body was streamed, so this one's is compared only now, and thrown away.
            is_to_compare = (
                entry.is_remembered and not is_ours and body_digest is None and entry.body_digest is not None
            )
            if is_to_compare and await request.digest() != entry.body_digest:
                raise reused(key, "it was made with another body")
            if entry.result is not None:
                return entry.result
            if entry.error is not None and (is_ours or entry.is_remembered):
                raise entry.error

    async def delete(self, hold: Hold, work: Callable[[], Awaitable[None]]) -> None:
        """End the attempt: no further call is admitted, `work` is done when those at work have ended, keys are forgotten.

        A repeated call joins. Raises Fenced.
        """
        self.fence.require(hold)
        self._is_deleted = True
        if self._deletion is None:
            # It counts as at work, so whoever takes over meanwhile waits for its end.
            self.fence.admit(hold)
            self._deletion = asyncio.get_running_loop().create_task(self._delete(work))
            self._deletion.add_done_callback(lambda _: self._end_deletion(hold))
        await asyncio.shield(self._deletion)

    async def _delete(self, work: Callable[[], Awaitable[None]]) -> None:
        for call in self._calls:
            if call.may_be_broken_off():
                call.task.cancel()
        while self._calls:
            await Bell.wait(self._call_ended)
        await work()
        self.keys.forget_all()

    def _end_deletion(self, hold: Hold) -> None:
        self._deletion = None
        self.fence.finish(hold)
        self._call_ended.ring()

    def require(self, hold: Hold) -> None:
        """Raises Fenced unless `hold` is the current one, and Forgotten after the attempt was deleted."""
        self.fence.require(hold)
        if self._is_deleted:
            raise ApiError("Forgotten", f"attempt {self.id!r} was deleted; to begin it anew, PUT its fence first")

    def _start(
        self,
        hold: Hold,
        key: Key,
        request: Request,
        entry: Entry[Result],
        work: Work,
        may_be_broken_off: Callable[[], bool],
    ) -> None:
        def note(task: asyncio.Task[Result]) -> None:
            result: Result | None = None
            error: ApiError | None = None
            is_remembered = True
            try:
                result = task.result()
                entry.body_digest = entry.body_digest or request.body_digest
            except ApiError as refusal:
                error, is_remembered = refusal, refusal.code not in NOT_REMEMBERED
            except Disconnected:
                error, is_remembered = bad_request("the connection broke within the body"), False
            except asyncio.CancelledError:
                error = ApiError("Fenced", f"attempt {self.id!r}: broken off, for another runner has taken it over")
                is_remembered = False
            except Exception:  # noqa: BLE001 - it may have done something, so it is remembered like any other outcome
                log_defect(entry.request_line)
                error = ApiError("InternalError", "a defect of the executor; its standard error says more")
            self.keys.finish(key, entry, result, error, is_remembered=is_remembered)

        self._begin(hold, work, may_be_broken_off).add_done_callback(note)

    def _begin(
        self, hold: Hold, work: Callable[[], Awaitable[T]], may_be_broken_off: Callable[[], bool]
    ) -> asyncio.Task[T]:
        async def run() -> T:
            return await work()

        call = Call(hold, may_be_broken_off, asyncio.get_running_loop().create_task(run()))

        def finish(_: asyncio.Task[T]) -> None:
            self._calls.discard(call)
            self.fence.finish(hold)
            self._call_ended.ring()

        self.fence.admit(hold)
        self._calls.add(call)
        call.task.add_done_callback(finish)
        return call.task


def _dropped(result: Result) -> None:
    # A process is forgotten by its workspace, which knows whether it still runs.
    if isinstance(result, StoredReply):
        result.discard()
