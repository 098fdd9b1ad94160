"""An attempt in the executor: its holder, its calls with their replies, and which calls are in progress.

Fencing: only the newest (epoch, holder) may use an attempt. A repeated call gets the stored reply and never runs twice.
Keys are never evicted, because an evicted key could run a second time. Instead an attempt can have at most MAX_KEYS;
further calls are refused until its runner acknowledges a turn. An entry keeps a digest instead of the request; a
process start keeps a reference to the process, whose output is limited; a reply of more than SMALL_REPLY_BYTES is in a
file of the state folder. So an attempt uses at most MAX_KEYS * (SMALL_REPLY_BYTES + about 1 KiB), 12 MiB, and usually
some kilobytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, Generic, NamedTuple, TypeVar

from agent_runtime.executor.commands.processes import Process
from agent_runtime.executor.errors import NOT_REMEMBERED, ApiError, bad_request
from agent_runtime.executor.http.messages import Reply, StreamedReply
from agent_runtime.executor.http.server import Disconnected, Request, log_defect
from agent_runtime.executor.timing import Notifier

MAX_EPOCH = 2**53
# Valid names of a holder, and of an attempt.
NAME = r"[!-~]{1,200}"
_FENCE = re.compile(rf"(\d{{1,16}}):({NAME})", re.ASCII)


class Hold(NamedTuple):
    """One runner's claim to an attempt."""

    epoch: int
    holder: str

    def __str__(self) -> str:
        return f"epoch {self.epoch} of {self.holder!r}"


# A runner repeats this with every call of an attempt.
@lru_cache(maxsize=1024)
def read_hold(value: str) -> Hold:
    """Parse a Rollout-Fence header. Raises BadRequest."""
    found = _FENCE.fullmatch(value)
    if not found or int(found[1]) > MAX_EPOCH:
        raise bad_request(
            f"Rollout-Fence: EPOCH:HOLDER expected, a whole number and 1 to 200 visible characters, got {value!r}"
        )
    return Hold(int(found[1]), found[2])


class Fence:
    """The fence of one attempt. It only decides; `Attempt` waits. `current` only increases."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self.current: Hold | None = None

    def raise_to(self, hold: Hold) -> bool:
        """Make `hold` the current one; False if it already was. Raises Fenced if a newer one, or another of the same
        epoch, is current.
        """
        current = self.current
        if current == hold:
            return False
        if current is not None and hold.epoch <= current.epoch:
            raise self._fenced(hold)
        self.current = hold
        return True

    def require(self, hold: Hold) -> None:
        """Raise Fenced unless `hold` is the current one."""
        if hold != self.current:
            raise self._fenced(hold)

    def _fenced(self, hold: Hold) -> ApiError:
        if self.current is None:
            return ApiError(
                "Fenced",
                f"attempt {self._attempt!r} was never fenced here; PUT /v1/attempts/{{attempt}}/fence comes first",
            )
        advice = (
            "PUT its fence before using it" if hold.epoch > self.current.epoch else "another runner has taken it over"
        )
        return ApiError(
            "Fenced", f"attempt {self._attempt!r} is held by {self.current}, and this call is of {hold}: {advice}"
        )


# A turn makes a few calls, and a runner acknowledges every turn or two, so this is hundreds of times more than needed.
MAX_KEYS = 4096
SMALL_REPLY_BYTES = 2048

MAX_NAME_LENGTH = 200
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_KEY = re.compile(r"(\d{1,15}):(.+)", re.DOTALL | re.ASCII)

ResultT = TypeVar("ResultT")


class Key(NamedTuple):
    """Name of a call, which is the same whenever the runner repeats it."""

    turn: int
    name: str

    def process_id(self) -> str:
        """The id of the process that this call starts: safe in a path and unique to the key."""
        plain = f"{self.turn}-{self.name}"
        safe = _UNSAFE.sub("_", plain)
        if safe == plain and len(safe) <= 100:
            return safe
        return f"{safe[:80]}~{sha256(plain.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def read_key(header: str) -> Key:
    """Parse an Idempotency-Key header. Raises BadRequest."""
    found = _KEY.fullmatch(header)
    if not found or len(found[2]) > MAX_NAME_LENGTH:
        raise bad_request(
            f"Idempotency-Key: 'TURN:NAME' expected, a whole number and up to {MAX_NAME_LENGTH} characters, "
            f"got {header[:60]!r}"
        )
    return Key(int(found[1]), found[2])


@dataclass
class Entry(Generic[ResultT]):
    """One call. `body_digest` is set once its whole body was read; `result` or `error` once `is_finished`."""

    request_line: str
    body_digest: bytes | None
    result: ResultT | None = None
    error: ApiError | None = None
    is_finished: bool = False
    finished: Notifier = field(default_factory=Notifier)

    @property
    def is_remembered(self) -> bool:
        """Whether a repeat gets the same outcome: true except for errors of calls that did nothing."""
        return self.error is None or self.error.code not in NOT_REMEMBERED


class KeyMemory(Generic[ResultT]):
    """The keys of one attempt. `dropped` is called with each forgotten result."""

    def __init__(self, dropped: Callable[[ResultT], None] = lambda _: None) -> None:
        self.watermark = 0
        self._entries: dict[Key, Entry[ResultT]] = {}
        self._dropped = dropped

    def find(self, key: Key, request_line: str) -> Entry[ResultT] | None:
        """Return the call of this key, in progress or finished; None if it must be made. Raises Forgotten, KeyReused."""
        if key.turn < self.watermark:
            raise ApiError(
                "Forgotten",
                f"Idempotency-Key {key.turn}:{key.name}: turns below {self.watermark} were acknowledged, so it is not "
                "known whether this call was made; it is not made again",
            )
        entry = self._entries.get(key)
        if entry is not None and entry.request_line != request_line:
            raise reused(key, f"it was used for {entry.request_line}, now for {request_line}")
        return entry

    def begin(self, key: Key, request_line: str, body_digest: bytes | None) -> Entry[ResultT]:
        """Record that this call begins. Raises TooLarge if too many are remembered."""
        if len(self._entries) >= MAX_KEYS:
            raise ApiError(
                "TooLarge",
                f"{MAX_KEYS} keys of this attempt are remembered and no more fit; acknowledge the finished turns with "
                "PUT /v1/attempts/{attempt}/watermark",
            )
        entry: Entry[ResultT] = Entry(request_line, body_digest)
        self._entries[key] = entry
        return entry

    def finish(self, key: Key, entry: Entry[ResultT], result: ResultT | None, error: ApiError | None) -> None:
        """Record the call's result or error. A call that did nothing is not remembered and may be made again."""
        entry.result, entry.error = result, error
        entry.is_finished = True
        if self._entries.get(key) is not entry:
            if result is not None:
                self._dropped(result)
        elif not entry.is_remembered:
            del self._entries[key]
        entry.finished.notify()

    def forget_below(self, turn: int) -> None:
        """Raise the watermark; a lower value changes nothing."""
        self.watermark = max(self.watermark, turn)
        for key in [key for key in self._entries if key.turn < self.watermark]:
            self._drop(key)

    def forget_all(self) -> None:
        """Forget every key, and keep the watermark."""
        for key in list(self._entries):
            self._drop(key)

    def _drop(self, key: Key) -> None:
        result = self._entries.pop(key).result
        if result is not None:
            self._dropped(result)


def reused(key: Key, how: str) -> ApiError:
    """Return the refusal of a key that was used for two different calls."""
    return ApiError("KeyReused", f"Idempotency-Key {key.turn}:{key.name} names another call already: {how}")


# docs/executor.md: a read of more than this must not have a key.
MAX_KEYED_REPLY_BYTES = 1024 * 1024


class StoredReply:
    """A stored reply; a large body is kept in a file."""

    def __init__(self, reply: Reply, path: str) -> None:
        self._content_type, self._headers = reply.content_type, reply.headers
        self._body: bytes | None = reply.body
        self._path = path
        if len(reply.body) > SMALL_REPLY_BYTES and self._written(reply.body):
            self._body = None

    def reply(self) -> Reply:
        """Return the reply again."""
        body = self._body
        if body is None:
            with open(self._path, "rb") as file:
                body = file.read()
        return Reply(body, content_type=self._content_type, headers=self._headers)

    def discard(self) -> None:
        """Remove its file."""
        if self._body is None:
            # In `Plain`, commands may run as the executor's own user and damage its files.
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _written(self, body: bytes) -> bool:
        try:
            with open(self._path, "xb") as file:
                file.write(body)
        except OSError:
            # A full disk must not lose a reply: it then stays in memory.
            return False
        return True


async def whole(reply: Reply | StreamedReply) -> Reply:
    """Read a streamed reply completely. Raises TooLarge over MAX_KEYED_REPLY_BYTES."""
    if isinstance(reply, StreamedReply):
        parts, size = [], 0
        try:
            async for chunk in reply.chunks:
                parts.append(chunk)
                size += len(chunk)
                if size > MAX_KEYED_REPLY_BYTES:
                    break
        finally:
            await reply.chunks.aclose()
        reply = Reply(b"".join(parts), content_type=reply.content_type)
    if len(reply.body) > MAX_KEYED_REPLY_BYTES:
        raise ApiError(
            "TooLarge",
            f"the reply is over {MAX_KEYED_REPLY_BYTES} bytes, too many to remember: read it in parts, or without "
            "a key",
        )
    return reply


# The remembered result of a call: a reply, or a process whose status is fetched each time.
Result = StoredReply | Process
Work = Callable[[], Coroutine[Any, Any, StoredReply]]


@dataclass(eq=False)
class Call:
    """A call in progress. `may_cancel` says whether cancelling it leaves a repeat safe. The operator's has no hold."""

    hold: Hold | None
    may_cancel: Callable[[], bool]
    task: asyncio.Task[StoredReply] | None = None

    def cancel(self) -> None:
        """End the call early if that is harmless."""
        if self.task is not None and self.may_cancel():
            self.task.cancel()


@dataclass
class Stillness:
    """Whether nothing may change in the whole sandbox, because it is being parked or brought back."""

    is_on: bool = False
    restorer: str = ""
    """Holder whose changes are accepted all the same: the newest try to bring the sandbox back."""

    def require_moving(self, hold: Hold | None) -> None:
        """Raise Conflict if a change of this holder is refused. Check this before a call is begun, so that no key remembers
        it.
        """
        if self.is_on and not (self.restorer and hold is not None and hold.holder == self.restorer):
            raise ApiError("Conflict", self.reason)

    @property
    def reason(self) -> str:
        """Return why changes are refused, and what to do."""
        if self.restorer:
            return "its Sandbox is being brought back; wait until it is Ready"
        return "its Sandbox is being parked; set running: true to use it again"


class Attempt:
    """Makes each call once; its work outlives the caller's connection."""

    def __init__(self, attempt_id: str, stillness: Stillness | None = None) -> None:
        self.id = attempt_id
        self.fence = Fence(attempt_id)
        self.keys: KeyMemory[Result] = KeyMemory(_dropped)
        # Notified when a newer hold was raised.
        self.superseded = Notifier()
        self._call_ended = Notifier()
        self._calls: set[Call] = set()
        self.is_deleted = False
        self._stillness = stillness or Stillness()
        self._deletion: asyncio.Task[None] | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether a call is in progress, also one whose caller has disconnected."""
        return bool(self._calls)

    async def raise_fence(self, hold: Hold) -> None:
        """Make `hold` the current one; returns when no call of an older one is in progress. Raises Fenced, and Conflict if
        its sandbox is being brought back by another holder.
        """
        if self._stillness.restorer:
            self._stillness.require_moving(hold)
        if self.fence.raise_to(hold):
            self.superseded.notify()
            for call in self._calls:
                if call.hold != hold:
                    call.cancel()
        while any(call.hold != hold for call in self._calls):
            await Notifier.wait(self._call_ended)
        self.fence.require(hold)
        self.is_deleted = False

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

    async def end(self, work: Callable[[], Awaitable[None]], hold: Hold | None = None) -> None:
        """End the attempt: refuse further calls, wait for those in progress, run `work`, forget the keys. `hold` is that of
        the caller; the operator has none.

        A repeated call joins. Raises Conflict while it is still.
        """
        self._stillness.require_moving(hold)
        self.is_deleted = True
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
        """Raise Fenced unless `hold` is the current one, Conflict while it is still, and Forgotten after the attempt was
        deleted.
        """
        self.fence.require(hold)
        self._stillness.require_moving(hold)
        if self.is_deleted:
            raise ApiError("Forgotten", f"attempt {self.id!r} was deleted; to start it again, PUT its fence first")

    async def settled(self) -> None:
        """Wait until no call is in progress. Those that wait for the rest of their body are cancelled."""
        for call in self._calls:
            call.cancel()
        while self._calls:
            await Notifier.wait(self._call_ended)

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
                why = self._stillness.reason if self._stillness.is_on else "another runner has taken it over"
                error = ApiError("Fenced", f"attempt {self.id!r}: cancelled, because {why}")
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
