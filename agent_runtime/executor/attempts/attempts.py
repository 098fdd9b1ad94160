"""An attempt in the executor: its holder, its calls, and which of them are in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent_runtime.executor.attempts.fencing import Fence, Hold
from agent_runtime.executor.attempts.idempotency import Entry, Key, KeyMemory, StoredReply, reused
from agent_runtime.executor.commands.processes import Process
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.http.server import Disconnected, Request, log_defect
from agent_runtime.executor.notifier import Notifier

# The remembered result of a call: a reply, or a process whose status is fetched each time.
Result = StoredReply | Process
Work = Callable[[], Coroutine[Any, Any, StoredReply]]


@dataclass(eq=False)
class Call:
    """A call in progress. `may_cancel` says whether cancelling it leaves a repeat safe."""

    hold: Hold
    may_cancel: Callable[[], bool]
    task: asyncio.Task[StoredReply] | None = None

    def cancel(self) -> None:
        """End the call early if that is harmless."""
        if self.task is not None and self.may_cancel():
            self.task.cancel()


class Attempt:
    """Makes each call once; its work outlives the caller's connection."""

    def __init__(self, attempt_id: str) -> None:
        self.id = attempt_id
        self.fence = Fence(attempt_id)
        self.keys: KeyMemory[Result] = KeyMemory(_dropped)
        # Notified when a newer hold was raised.
        self.superseded = Notifier()
        self._call_ended = Notifier()
        self._calls: set[Call] = set()
        self._is_deleted = False
        self._deletion: asyncio.Task[None] | None = None

    async def raise_fence(self, hold: Hold) -> None:
        """Make `hold` the current one; returns when no call of an older one is in progress. Raises Fenced."""
        if self.fence.raise_to(hold):
            self.superseded.notify()
            for call in self._calls:
                if call.hold != hold:
                    call.cancel()
        while any(call.hold != hold for call in self._calls):
            await Notifier.wait(self._call_ended)
        self.fence.require(hold)
        self._is_deleted = False

    async def once(
        self,
        hold: Hold,
        key: Key,
        request: Request,
        body_digest: bytes | None,
        work: Work,
        may_cancel: Callable[[], bool],
    ) -> StoredReply:
        """Return the result of the call named `key`: made now, joined, or remembered.

        `body_digest` is None if `work` reads the request's body itself. Raises the call's own refusal, Fenced,
        Forgotten, KeyReused.
        """
        request_line = request.line
        while True:
            self.require(hold)
            entry = self.keys.find(key, request_line)
            is_ours = entry is None
            if entry is None:
                entry = self.keys.begin(key, request_line, body_digest)
                task = asyncio.get_running_loop().create_task(work())
                call = self._begin(Call(hold, may_cancel, task))
                task.add_done_callback(partial(self._finish, call, key, request, entry))
            elif body_digest is not None and body_digest != entry.body_digest:
                raise reused(key, "the key was first used with another body")
            while not entry.is_finished:
                await Notifier.wait(entry.finished)
            # The first call streamed its body, so this call's body can only be compared now. It is discarded.
            is_streamed = body_digest is None and entry.body_digest is not None
            if is_streamed and entry.is_remembered and not is_ours and await request.digest() != entry.body_digest:
                raise reused(key, "the key was first used with another body")
            if entry.result is not None:
                # a command under the same key has another request line, so it never matches
                assert isinstance(entry.result, StoredReply)
                return entry.result
            if entry.error is not None and (is_ours or entry.is_remembered):
                raise entry.error

    def start(
        self, hold: Hold, key: Key, request_line: str, body_digest: bytes, make: Callable[[Callable[[], None]], Process]
    ) -> Process:
        """Return the process that the call named `key` requested, now or earlier.

        `make` gets a function to call when the process's start has succeeded or failed; until then the call counts as
        in progress. Raises the call's own refusal, Fenced, Forgotten, KeyReused.
        """
        self.require(hold)
        entry = self.keys.find(key, request_line)
        if entry is None:
            entry = self.keys.begin(key, request_line, body_digest)
            call = self._begin(Call(hold, lambda: False))
            try:
                process = make(lambda: self._end(call))
            except Exception as failure:  # noqa: BLE001 - see _refuse
                self._end(call)
                self._refuse(key, entry, failure)
            else:
                self.keys.finish(key, entry, process, None)
        elif entry.body_digest != body_digest:
            raise reused(key, "the key was first used with another body")
        if entry.error is not None:
            raise entry.error
        assert isinstance(entry.result, Process)
        return entry.result

    async def delete(self, hold: Hold, work: Callable[[], Awaitable[None]]) -> None:
        """End the attempt: refuse further calls, wait for those in progress, run `work`, forget the keys.

        A repeated call joins. Raises Fenced.
        """
        self.fence.require(hold)
        self._is_deleted = True
        if self._deletion is None:
            # The deletion is a call in progress, so a new holder waits for its end.
            deletion = self._begin(Call(hold, lambda: False))
            self._deletion = asyncio.get_running_loop().create_task(self._delete(deletion, work))
            self._deletion.add_done_callback(lambda _: self._end(deletion))
        await asyncio.shield(self._deletion)

    async def _delete(self, deletion: Call, work: Callable[[], Awaitable[None]]) -> None:
        try:
            for call in self._calls:
                call.cancel()
            while self._calls != {deletion}:
                await Notifier.wait(self._call_ended)
            await work()
            self.keys.forget_all()
        finally:
            self._deletion = None

    def require(self, hold: Hold) -> None:
        """Raise Fenced unless `hold` is the current one, and Forgotten after the attempt was deleted."""
        self.fence.require(hold)
        if self._is_deleted:
            raise ApiError("Forgotten", f"attempt {self.id!r} was deleted; to start it again, PUT its fence first")

    def _finish(
        self, call: Call, key: Key, request: Request, entry: Entry[Result], task: asyncio.Task[StoredReply]
    ) -> None:
        self._end(call)
        try:
            result = task.result()
        except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001 - see _refuse
            self._refuse(key, entry, failure)
        else:
            entry.body_digest = entry.body_digest or request.body_digest
            self.keys.finish(key, entry, result, None)

    def _refuse(self, key: Key, entry: Entry[Result], failure: BaseException) -> None:
        match failure:
            case ApiError():
                error = failure
            case Disconnected():
                error = bad_request("the connection ended before the end of the body")
            case asyncio.CancelledError():
                error = ApiError("Fenced", f"attempt {self.id!r}: cancelled, because another runner has taken it over")
            case _:
                # The call may have had an effect, so the error is remembered.
                log_defect(entry.request_line)
                error = ApiError("InternalError", "an internal error of the executor; see its standard error")
        self.keys.finish(key, entry, None, error)

    def _begin(self, call: Call) -> Call:
        self._calls.add(call)
        return call

    def _end(self, call: Call) -> None:
        if call in self._calls:
            self._calls.discard(call)
            self._call_ended.notify()


def _dropped(result: Result) -> None:
    # A process is discarded by its workspace, which knows whether it still runs.
    if isinstance(result, StoredReply):
        result.discard()
