"""The proxy's end of the relay: a `Model` whose answers come from connected workers."""

import asyncio
import contextlib
import json
import logging
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import WSMsgType, web

from agent_runtime.executor.timing import working_timeout
from agent_runtime.models.base import (
    TOKEN_CAPTURES,
    ContentFiltered,
    ContextExceeded,
    ModelError,
    ModelReply,
    ModelRequest,
    RequestRefused,
)
from agent_runtime.models.pool.routing import choose
from agent_runtime.models.probe import ProbeResult
from agent_runtime.models.vllm.supported_fields import without_effect
from agent_runtime.proxy.relay import schemas
from agent_runtime.proxy.relay.schemas import FormError, Hello, JsonObject, Prompt
from rollout_api.nesting import json_object

WAIT_SECONDS: Final = 30.0
"""Time limit of a call without a connected worker, as in PR #83. Longer than a worker's longest pause before it
reconnects.
"""

HEARTBEAT_SECONDS: Final = 30.0
"""A connection that was silent for this time is pinged, and has half as long to respond. PR #83's value."""

CALL_SECONDS: Final = 600.0
"""Deadline of a call, including waiting; equal to that of an endpoint."""

MOST_WORKERS_LOST: Final = 3
"""A call fails after this many workers were lost while they had it, because it may be the cause."""

_HELLO_SECONDS: Final = 10.0
_DRAIN_SECONDS: Final = 50.0
"""Time for running calls when the proxy ends. aiohttp stops handlers after 60."""
_NO_LIMIT: Final = 1 << 30

_LOG = logging.getLogger(__name__)


class _WorkerLost(Exception):
    """The worker of a call has disconnected, or could not be reached."""


@dataclass
class _Call:
    """A call that was sent to a worker."""

    request: ModelRequest
    prompt: Prompt | None
    reply: asyncio.Future[ModelReply]
    heard: bool = False
    """Whether some text was sent to the client, so that another worker cannot take over."""


@dataclass
class _Waiting:
    """A call that waits for a worker."""

    session: str
    is_prompt: bool
    worker: "asyncio.Future[_Worker]"


@dataclass(eq=False)
class _Worker:
    """One connection."""

    hello: Hello
    socket: web.WebSocketResponse
    taken: int = 0
    calls: dict[str, _Call] = field(default_factory=dict)
    cancelling: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def room(self) -> int:
        return (self.hello.capacity or _NO_LIMIT) - self.taken

    def takes(self, is_prompt: bool) -> bool:
        return self.hello.prompts or not is_prompt

    def answers_for(self, session: str) -> bool:
        """Whether only this worker answers the session."""
        return self.hello.sessions is not None and session.startswith(self.hello.sessions)

    async def send(self, message: JsonObject) -> None:
        """Send a message. Raises _WorkerLost, and RequestRefused if the message is too large for a frame."""
        text = json.dumps(message, separators=(",", ":"))
        # JSON in ASCII, so its length is in bytes.
        if len(text) >= schemas.FRAME_BYTES:
            # No other worker accepts a message of this size either, so this is the client's error.
            raise RequestRefused(
                "TooLarge",
                f"the request has {len(text)} bytes; a message to a worker is limited to {schemas.FRAME_BYTES}",
            )
        try:
            await self.socket.send_str(text)
        except (ConnectionError, RuntimeError) as error:  # aiohttp raises RuntimeError for a closing socket
            raise _WorkerLost from error

    async def answer(self, call: _Call, model: str) -> ModelReply:
        """Return the worker's answer. Cancellation is sent to the worker. Raises the call's error, and _WorkerLost."""
        id = secrets.token_hex(16)
        self.calls[id] = call
        try:
            await self.send(schemas.request_message(id, call.request, model, call.prompt))
            return await call.reply
        except asyncio.CancelledError:
            self._cancel(id)
            raise
        finally:
            del self.calls[id]

    def _cancel(self, id: str) -> None:
        async def tell() -> None:
            with contextlib.suppress(_WorkerLost):  # a lost worker has stopped its calls
                await self.send({"type": "completion_cancel", "request_id": id})

        task = asyncio.ensure_future(tell())
        self.cancelling.add(task)
        task.add_done_callback(self.cancelling.discard)


_MOST_OWN_SESSIONS: Final = 10_000
"""Number of session prefixes that are remembered, of the workers that connected last."""


class Hub:
    """A `Model` named `name`. `serve` is run for each worker that connects.

    Calls of a session prefer the same worker, because it has their prefix in its cache. Calls of a lost worker go to
    another one, unless some of the text was sent to the client: those fail as Interrupted.
    """

    def __init__(
        self, name: str, *, wait_seconds: float = WAIT_SECONDS, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self.name, self.heartbeat_seconds = name, heartbeat_seconds
        self.token_capture = "TextOnly"
        """The lowest capture of the connected workers."""
        self._wait = wait_seconds
        self._workers: dict[str, _Worker] = {}
        self._own_sessions: dict[str, None] = {}
        """Name prefixes of sessions that are reserved for one worker, even while it is not connected."""
        self._waiting: deque[_Waiting] = deque()
        self._alone_since = 0.0
        """Loop time at which the last worker disconnected."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def workers(self) -> int:
        return len(self._workers)

    async def check(self) -> None:
        """Do nothing: workers may connect later."""

    async def close(self) -> None:
        """Wait for running calls, and disconnect the workers, which then reconnect to the next proxy."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self._idle.wait()
        for worker in list(self._workers.values()):
            await worker.socket.close(code=1001, message=b"the proxy ends")  # RFC 6455: going away

    async def test(self, request: ModelRequest, *, may_record: bool) -> ProbeResult:
        """See SelfTesting. Workers may record each call, so this cannot be known."""
        return ProbeResult.UNKNOWN

    async def complete(self, request: ModelRequest) -> ModelReply:
        return await self.complete_prompt(None, request)

    async def complete_prompt(self, prompt: Prompt | None, request: ModelRequest) -> ModelReply:
        """See `PromptModel.complete_prompt`; uses workers that accept prompts. Raises RequestRefused if there are none."""
        try:
            async with working_timeout(CALL_SECONDS):
                return await self._answered(request, prompt)
        except TimeoutError:
            raise ModelError("Timeout", f"no worker has answered within {CALL_SECONDS:g} s") from None

    async def _answered(self, request: ModelRequest, prompt: Prompt | None) -> ModelReply:
        lost = 0
        clock = asyncio.get_running_loop().time
        began, lost_before = clock(), request.health.lost_seconds
        while True:
            worker = await self._taken(request, is_prompt=prompt is not None)
            call = _Call(request, prompt, asyncio.get_running_loop().create_future())
            try:
                return await worker.answer(call, self.name)
            except _WorkerLost:
                lost += 1
                name = worker.hello.worker_id
                if call.heard:
                    raise ModelError(
                        "Interrupted", f"worker {name} was lost in the middle of an answer; send the request again"
                    ) from None
                if lost == MOST_WORKERS_LOST:
                    raise ModelError(
                        "WorkerLost",
                        f"{lost} workers disconnected while they processed this request, the last was {name}",
                    ) from None
                request.health.note(f"WorkerLost: {name}")
                request.health.lost_seconds = lost_before + clock() - began
                _LOG.warning("Worker %s is lost; its calls go to another one.", name)
            finally:
                self._give_back(worker)

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """See `SelectiveModel`. Workers that record token ids serve vLLM's token routes."""
        return without_effect(fields, prompt=prompt) if self.token_capture == "Tokens" else []

    async def serve(self, socket: web.WebSocketResponse) -> None:
        """Serve one worker until its connection ends. The socket must be prepared."""
        try:
            worker = await self._greeted(socket)
        except (_Refused, FormError, TimeoutError) as error:
            code = schemas.REFUSED if isinstance(error, _Refused) else schemas.BROKEN
            await socket.close(code=code, message=_reason(str(error) or "no worker_hello was received"))
            return
        name = worker.hello.worker_id
        older, self._workers[name] = self._workers.get(name), worker
        if worker.hello.sessions is not None:
            self._own_sessions[worker.hello.sessions] = self._own_sessions.pop(worker.hello.sessions, None)
            if len(self._own_sessions) > _MOST_OWN_SESSIONS:
                del self._own_sessions[next(iter(self._own_sessions))]
        self._changed()
        _LOG.info("Worker %s has connected; there are %d.", name, self.workers)
        try:
            await worker.send({"type": "worker_hello_ack", "worker_id": name, "status": "connected"})
            if older is not None:
                _end(older)
                await older.socket.close(code=schemas.REPLACED, message=b"a worker of the same name has connected")
            self._assign_waiting()
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    raise FormError(f"expected text frames, got {message.type.name} {message.data!r:.100}")
                await self._handle_message(worker, _decoded(message.data))
        except FormError as error:
            _LOG.warning("Worker %s: %s", name, error)
            await socket.close(code=schemas.BROKEN, message=_reason(str(error)))
        except _WorkerLost:
            pass
        finally:
            if self._workers.get(name) is worker:
                del self._workers[name]
                self._changed()
                self._alone_since = asyncio.get_running_loop().time()
            _end(worker)
            _LOG.info("Worker %s has left; there are %d.", name, self.workers)

    def _changed(self) -> None:
        given = {worker.hello.token_capture for worker in self._workers.values()}
        self.token_capture = next((least for least in TOKEN_CAPTURES if least in given), TOKEN_CAPTURES[0])

    async def _greeted(self, socket: web.WebSocketResponse) -> _Worker:
        async with asyncio.timeout(_HELLO_SECONDS):
            message = await socket.receive()
        if message.type is not WSMsgType.TEXT:
            raise FormError("expected worker_hello as a text frame")
        said = _decoded(message.data)
        if said.get("type") != "worker_hello":
            raise FormError(f"expected worker_hello, got {said.get('type')!r:.100}")
        found = schemas.hello(said)
        if found.model not in (None, self.name):
            raise _Refused(f"this proxy serves model {self.name!r}, the worker has {found.model!r:.100}")
        return _Worker(found, socket)

    async def _handle_message(self, worker: _Worker, message: JsonObject) -> None:
        match message.get("type"):
            case "completion_chunk":
                call, text = worker.calls.get(str(message.get("request_id"))), message.get("text")
                if not isinstance(text, str):
                    raise FormError(f"completion_chunk: text: expected a string, got {text!r:.100}")
                if call is not None and call.request.on_text is not None:
                    call.request.health.note(None)
                    tokens = message.get("tokens")
                    call.request.health.on_tokens(tokens if isinstance(tokens, int) else 1)
                    if isinstance(prompt_tokens := message.get("prompt_tokens"), int) and prompt_tokens > 0:
                        call.request.health.on_prompt(prompt_tokens)
                    thought = message.get("reasoning")
                    if isinstance(thought, str) and thought and call.request.on_reasoning is not None:
                        call.heard = True
                        call.request.on_reasoning(thought)
                    if text:
                        call.heard = True
                        call.request.on_text(text)
            case "completion_response":
                call = worker.calls.get(str(message.get("request_id")))
                # Ignore responses to cancelled calls.
                if call is not None and not call.reply.done():
                    _settle(call, message)
            case "ping":
                await worker.send({"type": "pong"})
            case "pong":
                pass
            case other:
                raise FormError(f"type: expected a message of the relay, got {other!r:.100}")

    async def _taken(self, request: ModelRequest, *, is_prompt: bool) -> _Worker:
        """Return a worker with room, and count the call. Raises ModelError if none becomes free."""
        clock = asyncio.get_running_loop().time
        session = request.session
        waiting = _Waiting(session, is_prompt, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._assign_waiting()
        came = clock()
        try:
            while not waiting.worker.done():
                able = self._suitable_workers(session).values()
                if able and not any(worker.takes(is_prompt) for worker in able):
                    raise RequestRefused(
                        "NoPrompts",
                        f"the connected workers of model {self.name} support chat messages only, not a bare prompt",
                    )
                if not able:
                    request.health.note(f"NoWorker: no worker of model {self.name} is connected")
                due = max(came, self._alone_since) + self._wait if not able else clock() + self._wait
                if clock() >= due:
                    raise ModelError("NoWorker", f"no worker of model {self.name} was connected for {self._wait:g} s")
                await asyncio.wait([waiting.worker], timeout=due - clock())
            return waiting.worker.result()
        except BaseException:
            if waiting.worker.done():
                self._give_back(waiting.worker.result())
            else:
                self._waiting.remove(waiting)
            raise

    def _suitable_workers(self, session: str) -> dict[str, _Worker]:
        is_own = any(session[:end] in self._own_sessions for end in range(len(session) + 1))
        return {
            name: worker
            for name, worker in self._workers.items()
            if (worker.answers_for(session) if is_own else worker.hello.sessions is None)
        }

    def _assign_waiting(self) -> None:
        """Assign the calls that have waited longest to workers with room."""
        for waiting in list(self._waiting):
            if not any(worker.room > 0 for worker in self._workers.values()):
                break
            able = {
                name: worker
                for name, worker in self._suitable_workers(waiting.session).items()
                if worker.takes(waiting.is_prompt)
            }
            in_flight = {name: worker.taken for name, worker in able.items()}
            limits = {name: worker.taken + worker.room for name, worker in able.items()}
            if (name := choose(waiting.session, in_flight, limits)) is not None:
                able[name].taken += 1
                self._idle.clear()
                self._waiting.remove(waiting)
                waiting.worker.set_result(able[name])

    def _give_back(self, worker: _Worker) -> None:
        worker.taken -= 1
        if not any(other.taken for other in self._workers.values()):
            self._idle.set()
        self._assign_waiting()


class _Refused(Exception):
    """A worker that cannot serve here."""


def _settle(call: _Call, message: Mapping[str, Any]) -> None:
    try:
        call.reply.set_result(schemas.reply_of(message))
    except (ModelError, ContextExceeded, ContentFiltered) as error:
        call.reply.set_exception(error)
    except FormError as error:
        call.reply.set_exception(ModelError("BadResponse", str(error)))


def _end(worker: _Worker) -> None:
    for call in worker.calls.values():
        if not call.reply.done():
            call.reply.set_exception(_WorkerLost())


def _decoded(text: str) -> JsonObject:
    try:
        return json_object(text)
    except ValueError as error:
        raise FormError(f"a frame is {error}") from None


def _reason(words: str) -> bytes:
    """Return a reason for a close frame: at most 123 bytes (RFC 6455, 5.5)."""
    return words.encode(errors="replace")[:123].decode(errors="ignore").encode()
