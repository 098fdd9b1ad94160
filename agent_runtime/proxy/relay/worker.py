"""A worker: connects to a session proxy, and answers its calls with its own model."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

import aiohttp

from agent_runtime.models.base import (
    ContentFiltered,
    ContextExceeded,
    Model,
    ModelConfigError,
    ModelError,
    RequestRefused,
)
from agent_runtime.models.retries import retry_delay
from agent_runtime.proxy.chat import PromptModel
from agent_runtime.proxy.relay import schemas
from agent_runtime.proxy.relay.schemas import FormError, JsonObject

CAPACITY: Final = 1024
"""Concurrent calls: more than a vLLM server processes at once, so that the server's queue is used."""

HEARTBEAT_SECONDS: Final = 30.0
"""A connection that was silent for this time is pinged, and has half as long to respond. PR #83's value."""

_HELLO_SECONDS: Final = 10.0
_LOG = logging.getLogger(__name__)


class Worker:
    """Serves the proxy at `url` (`https://proxy.example`) with a checked `model`.

    With `sessions` it only answers sessions with this name prefix, whatever model name they were registered with.
    `on_change` is called with True when the proxy has accepted the worker, and with False when that connection ends.
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None,
        model: Model,
        name: str,
        *,
        capacity: int = CAPACITY,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        sessions: str | None = None,
        on_change: Callable[[bool], None] = lambda connected: None,
    ) -> None:
        self.url = url.rstrip("/") + schemas.PATH
        self._admin_key, self._model, self._name = admin_key, model, name
        self._capacity, self._heartbeat = capacity, heartbeat_seconds
        self._sessions, self._on_change = sessions, on_change
        self._failures = 0

    async def run(self) -> NoReturn:
        """Connect, and reconnect after each disconnect, with pauses that grow up to half a minute and are reset when
        the proxy accepts the worker. Raises ModelConfigError if the proxy will never accept it.
        """
        async with aiohttp.ClientSession() as client:
            while True:
                try:
                    why = await self._connected(client)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    why = f"{type(error).__name__}: {error}"
                self._failures += 1
                pause = retry_delay(self._failures, None, now=time.time(), jitter=random.random())
                _LOG.warning("%s: not connected (%s); trying again in %.1f s", self.url, why, pause)
                await asyncio.sleep(pause)

    async def _connected(self, client: aiohttp.ClientSession) -> str:
        headers = {} if self._admin_key is None else {"Authorization": f"Bearer {self._admin_key}"}
        try:
            socket = await client.ws_connect(
                self.url, headers=headers, heartbeat=self._heartbeat, max_msg_size=schemas.FRAME_BYTES
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise ModelConfigError("KeyRefused", f"{self.url} refused the admin key with {error.status}") from None
            if error.status == 404:
                raise ModelConfigError(
                    "NotFound", f"{self.url} answers 404; check that it is a session proxy with a relay"
                ) from None
            raise
        async with socket:
            said: JsonObject = {
                "type": "worker_hello",
                "worker_id": self._name,
                "model": self._model.name if self._sessions is None else None,
                "token_capture": self._model.token_capture,
                "capacity": self._capacity,
                "prompts": isinstance(self._model, PromptModel),
                "sessions": self._sessions,
            }
            await socket.send_str(json.dumps(said))
            connection = _Connection(socket, self._model)
            message = await socket.receive(timeout=_HELLO_SECONDS)
            if message.type is aiohttp.WSMsgType.TEXT:
                if (answer := json.loads(message.data).get("type")) != "worker_hello_ack":
                    return f"expected worker_hello_ack, got {answer!r}"
                _LOG.info("%s: connected as worker %s", self.url, self._name)
                self._failures = 0
                self._on_change(True)
                try:
                    message = await connection.serve()
                finally:
                    self._on_change(False)
            return self._ended(message)

    def _ended(self, message: aiohttp.WSMessage) -> str:
        if message.type is not aiohttp.WSMsgType.CLOSE:
            return str(message.data or "the connection broke")
        if message.data == schemas.REFUSED:
            raise ModelConfigError("Refused", f"{self.url}: {message.extra}")
        if message.data == schemas.REPLACED:
            raise ModelConfigError(
                "Replaced", f"{self.url}: another worker has connected as {self._name}; give each a different name"
            )
        return f"closed with {message.data} {message.extra or ''}".rstrip()


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a streamed answer."""

    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    prompt_tokens: int = 0

    def __add__(self, other: "_Piece") -> "_Piece":
        return _Piece(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tokens + other.tokens,
            self.prompt_tokens + other.prompt_tokens,
        )


class _Connection:
    """Requests in progress over one connection. They end with it, and the proxy gives them to another worker."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, model: Model) -> None:
        self._socket, self._model = socket, model
        self._working: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> aiohttp.WSMessage:
        """Answer until the connection ends; return its last message."""
        try:
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.TEXT:
                await self._handle_message(json.loads(message.data))
            return message
        finally:
            working = list(self._working.values())
            for task in working:
                task.cancel()
            # Wait for them, because the model's connections are closed afterwards.
            await asyncio.gather(*working, return_exceptions=True)

    async def _handle_message(self, message: Any) -> None:
        match message:
            case {"type": "completion_request", "request_id": str(id)}:
                task = asyncio.ensure_future(self._answer(id, message))
                self._working[id] = task
                task.add_done_callback(lambda _: self._working.pop(id, None))
            case {"type": "completion_cancel", "request_id": str(id)} if id in self._working:
                self._working[id].cancel()
            case {"type": "ping"}:
                await self._socket.send_str('{"type":"pong"}')
            case _:
                pass  # from a newer proxy

    async def _answer(self, id: str, message: JsonObject) -> None:
        try:
            response = await self._response(id, message)
        except (ModelError, ContextExceeded, ContentFiltered) as error:
            response = schemas.error_message(id, error)
        except FormError as error:
            response = schemas.error_message(
                id, ModelError("BadRequest", f"the worker cannot read the request: {error}")
            )
        except ConnectionError:
            return  # `serve` notices the closed socket
        except Exception as error:  # noqa: BLE001 the proxy must get an error response
            _LOG.exception("A request could not be answered.")
            response = schemas.error_message(id, ModelError("WorkerFailed", f"{type(error).__name__} in the worker"))
        text = json.dumps(response, separators=(",", ":"))
        if len(text) >= schemas.FRAME_BYTES:
            large = ModelError(
                "TooLarge", f"the answer has {len(text)} bytes; a message is limited to {schemas.FRAME_BYTES}"
            )
            text = json.dumps(schemas.error_message(id, large))
        with contextlib.suppress(ConnectionError):
            await self._socket.send_str(text)

    async def _response(self, id: str, message: JsonObject) -> JsonObject:
        request, prompt = schemas.request_of(message), schemas.prompt_of(message)
        ask = self._model.complete
        if prompt is not None:
            if not isinstance(self._model, PromptModel):
                raise RequestRefused(
                    "NoPrompts", f"model {self._model.name} supports chat messages only, not a bare prompt"
                )
            ask = partial(self._model.complete_prompt, prompt)
        if not message.get("stream"):
            return schemas.reply_message(id, await ask(request))
        pieces: asyncio.Queue[_Piece | None] = asyncio.Queue()
        request.health.on_tokens = lambda count: pieces.put_nowait(_Piece(tokens=count))
        request.health.on_prompt = lambda count: pieces.put_nowait(_Piece(prompt_tokens=count))
        sending = asyncio.ensure_future(self._send_text(id, pieces))
        try:
            streamed = dataclasses.replace(
                request,
                on_text=lambda text: pieces.put_nowait(_Piece(text=text)),
                on_reasoning=lambda text: pieces.put_nowait(_Piece(reasoning=text)),
            )
            reply = await ask(streamed)
            pieces.put_nowait(None)
            await sending
        finally:
            sending.cancel()
        return schemas.reply_message(id, reply)

    async def _send_text(self, id: str, pieces: "asyncio.Queue[_Piece | None]") -> None:
        """Send the answer's pieces and numbers of tokens from the queue until None. Pieces that arrive during a transfer
        are combined.
        """
        while (piece := await pieces.get()) is not None:
            while not pieces.empty():
                if (next_piece := pieces.get_nowait()) is None:
                    pieces.put_nowait(None)
                    break
                piece = piece + next_piece
            chunk = {"type": "completion_chunk", "request_id": id, **dataclasses.asdict(piece)}
            await self._socket.send_str(json.dumps(chunk, separators=(",", ":")))
