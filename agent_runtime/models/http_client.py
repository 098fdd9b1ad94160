"""JSON over HTTP to a model server: one connection pool, retries within a deadline, cancellation that closes the
connection.
"""

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from agent_runtime.executor.timing import working_timeout
from agent_runtime.models.answers import whole
from agent_runtime.models.base import RATE_LIMITED, CallHealth, ModelConfigError, ModelError
from agent_runtime.models.refusals import disabled_route, error_text, final_refusal, is_error, refusal, status_of_error
from agent_runtime.models.retries import is_transient, retry_delay
from rollout_api.cluster import POLICY_VERSION_HEADER, SERVER_NOT_READY
from rollout_api.nesting import read_json

CONNECT_SECONDS = 30.0
"""Time limit for connecting, so that a dropped SYN does not use up the whole deadline."""
LAST_SHARE = 0.1
"""Fraction of the deadline that is reserved for the last attempt, even if the server requests a longer pause."""
ERROR_CHARACTERS = 500  # of a server's error text in a message
ANSWER_BYTES = 256 << 20
"""Longest answer: a million tokens with their ids and log probabilities. A server may send without end."""
EVENT_BYTES = 32 << 20
"""Longest event of a stream: the ids of a prompt of a million tokens take 8 MB."""
KEY_CHARACTERS = 16  # shorter values such as `EMPTY` are not secrets, and may occur in messages


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Limits, headers and health of one call."""

    seconds: float
    tries: int | None = None
    """Number of attempts; None: unlimited within `seconds`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    health: CallHealth = field(default_factory=CallHealth)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with a status that no retry changes. `payload` is the decoded JSON, or text that is not JSON."""

    status: int
    payload: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of a refusal."""

    @property
    def error(self) -> str:
        return error_text(self.payload)[1][:ERROR_CHARACTERS]


class StreamBroken(ModelError):
    """An answer stopped before its end; the received part is valid."""

    def __init__(self, message: str) -> None:
        super().__init__("Interrupted", message)


T = TypeVar("T")


_NO_KEY_ADVICE = (
    ". Set model.endpoint.apiKeyFrom, such as {env: MODEL_API_KEY}, or give --api-key-env; for a ModelServer, remove "
    "VLLM_API_KEY from its spec.env"
)


class JsonClient:
    """Calls one server. `key_origin` says where the API key was read, for the message if it is refused."""

    def __init__(self, base_url: str, headers: Mapping[str, str], key_origin: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "User-Agent": "agent-rollouts", **headers}
        self._key_origin = key_origin
        keys = [headers.get(name, "").removeprefix("Bearer ") for name in ("Authorization", "x-api-key")]
        self._keys = [key.encode() for key in keys if len(key) >= KEY_CHARACTERS]
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._urls: dict[str, URL] = {}
        self.own_refusal: Callable[[Answer], Exception | None] = lambda answer: None
        """Returns the error that a response of this server means, if it means something else there than elsewhere."""

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None, options: CallOptions) -> Answer:
        """Make one call with retries.

        Raises ModelError when retries are used up, ModelConfigError for a refused key and a redirect, and
        ContextExceeded and ContentFiltered. Every other status below 500 is returned.
        """
        return await self._send(method, path, body, self._read, options)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        options: CallOptions,
        *,
        is_limited: bool = True,
        event_bytes: int = EVENT_BYTES,
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """Make one POST whose answer is server-sent events, and yield them decoded from JSON up to `[DONE]`. Each has at
        most `event_bytes`; with `is_limited`, all of them have at most `ANSWER_BYTES`.

        Until they begin it behaves as `call`, and raises ModelError for a final status as well; `options.seconds`
        limits only that time. Raises StreamBroken if they end without `[DONE]`. Leaving the block closes the
        connection.
        """
        answer = await self._send("POST", path, body, _unread, options)
        if isinstance(answer, Answer):
            raise final_refusal(f"{self.base_url}{path}", answer.status, answer.error)
        try:
            yield self._events(answer, is_limited=is_limited, event_bytes=event_bytes)
        finally:
            answer.close()

    async def _events(
        self, response: aiohttp.ClientResponse, *, is_limited: bool, event_bytes: int
    ) -> AsyncIterator[Any]:
        rest, begin, received, has_events = b"", b"", 0, False
        try:
            async for data in response.content.iter_any():
                received += len(data)
                if is_limited and received > ANSWER_BYTES:
                    raise self._too_long("a stream", ANSWER_BYTES)
                begin = begin or data[:ERROR_CHARACTERS]
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > event_bytes:
                    raise self._too_long("an event of its stream", event_bytes)
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    has_events = True
                    content = line.removeprefix(b"data:").strip()
                    if content == b"[DONE]":
                        return
                    event = read_json(content)
                    if is_error(event):
                        self._raise_for(Answer(status_of_error(event, 400), event))
                        raise StreamBroken(f"{self.base_url} ended its stream with {error_text(event)[1]}")
                    yield event
        except ValueError as error:
            raise ModelError("BadResponse", f"{self.base_url} streamed something that is not JSON: {error}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise StreamBroken(f"{self.base_url} broke its stream: {type(error).__name__}: {error}") from error
        if not has_events and begin.strip() and not begin.startswith((b"data:", b":", b"event:")):
            raise ModelError(
                "BadResponse",
                f"{self.base_url}: expected a stream of events, got {begin.decode(errors='replace')[:200]!r}",
            )
        raise StreamBroken(f"{self.base_url} ended its stream before it was done")

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        receive: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        options: CallOptions,
    ) -> T | Answer:
        """Return the result of `receive` for a successful response; return other final responses unchanged."""
        data = None if body is None else json.dumps(body).encode()
        salt = None if body is None else body.get("cache_salt")
        headers = options.headers if salt is None else {**options.headers, POLICY_VERSION_HEADER: str(salt)}
        seconds, health = options.seconds, options.health
        failures = 0
        lost_before = health.lost_seconds
        reason, failure = "Timeout", "no answer came"
        try:
            async with working_timeout(seconds) as now:
                started = now()
                while True:
                    retry_after = None
                    try:
                        received = await self._exchange(method, path, data, salt, headers, receive)
                    except (aiohttp.ClientError, ConnectionError) as error:
                        reason, failure = "Unreachable", _connection_error(error)
                    else:
                        if not isinstance(received, Answer) or received.status < 300:
                            health.note(None)
                            return received
                        self._raise_for(received, path)
                        if not is_transient(received.status):
                            return received
                        reason = _reason(received)
                        failure = f"status {received.status}: {received.error}"
                        retry_after = received.headers.get("Retry-After")
                    failures += 1
                    health.note(f"{reason}: {failure}")
                    delay = retry_delay(failures, retry_after, now=time.time(), jitter=random.random())
                    left = started + (1 - LAST_SHARE) * seconds - now()
                    if failures == options.tries or left <= 0:
                        raise ModelError(
                            reason, f"{self.base_url} failed {failures} time{'s' * (failures > 1)}, last with {failure}"
                        )
                    await asyncio.sleep(min(delay, left))
                    health.lost_seconds = lost_before + now() - started
        except TimeoutError:
            after = f" after {failures} failures, the last: {failure}" if failures else ""
            raise ModelError(
                "Timeout", f"{self.base_url} did not answer within {round(seconds, 2):g} s{after}"
            ) from None

    async def close(self) -> None:
        """Close the pool. Calls that start or are retried later end with ModelError."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _exchange(
        self,
        method: str,
        path: str,
        data: bytes | None,
        salt: str | None,
        headers: Mapping[str, str],
        receive: Callable[[aiohttp.ClientResponse], Awaitable[T]],
    ) -> T | Answer:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.base_url + path)
        response = await self._open().request(method, url, data=data, headers=headers, allow_redirects=False)
        try:
            if response.status < 300:
                self._check_policy(salt, response)
                received = await receive(response)
                if isinstance(received, Answer) and is_error(received.payload):
                    return Answer(status_of_error(received.payload, 502), received.payload)
                return received
            words = await self._content(response)
            for key in self._keys:  # some servers repeat the key that they refuse, and messages are recorded
                words = words.replace(key, b"[API key]")
            return _decoded(response.status, words, response.headers)
        except BaseException:
            # Also after a cancellation: closing the connection makes the server stop its work.
            response.close()
            raise

    async def _read(self, response: aiohttp.ClientResponse) -> Answer:
        return _decoded(response.status, await self._content(response), {})

    async def _content(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for data in response.content.iter_any():
            content += data
            if len(content) > ANSWER_BYTES:
                raise self._too_long("an answer", ANSWER_BYTES)
        return bytes(content)

    def _too_long(self, what: str, limit: int) -> ModelError:
        return ModelError("BadResponse", f"{self.base_url} sent more than {limit >> 20} MiB in {what}")

    def _check_policy(self, salt: str | None, response: aiohttp.ClientResponse) -> None:
        """Raise ModelError if a response has another policy version than the caller expects and uses as salt."""
        served = response.headers.get(POLICY_VERSION_HEADER)
        if salt is not None and served is not None and served != salt:
            raise ModelError("OtherPolicy", f"{self.base_url} serves policy version {served}, expected {salt}")

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ModelError(
                "Unreachable", f"the connections to {self.base_url} were closed, so no further call is possible"
            )
        # Created at the first call, because a session belongs to the running event loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                headers=self._headers,
            )
        return self._session

    def _raise_for(self, answer: Answer, path: str = "") -> None:
        if answer.status < 400:
            raise ModelConfigError(
                "Redirected",
                f"{self.base_url} redirects to {answer.headers.get('Location', 'nowhere')}; use that as baseURL",
            )
        if (own := self.own_refusal(answer)) is not None:
            raise own
        if answer.status == 403 and (disabled := disabled_route(f"{self.base_url}{path}", answer.error)) is not None:
            raise disabled
        if answer.status in (401, 403):
            cause = f"the API key from {self._key_origin}" if self._key_origin else "the request: no API key was sent"
            advice = "" if self._key_origin else _NO_KEY_ADVICE
            raise ModelConfigError(
                "KeyRefused", f"{self.base_url} rejected {cause} (status {answer.status}: {answer.error}){advice}"
            )
        if (refused := refusal(answer.status, answer.payload)) is not None:
            raise refused


def _connection_error(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorDNSError():
            return f"the host name {error.host} cannot be resolved ({error.os_error.strerror})"
        case aiohttp.ClientConnectorCertificateError():
            return f"the certificate of {error.host}:{error.port} is not trusted ({error.certificate_error})"
        case aiohttp.ClientConnectorSSLError():
            advice = "; if the server does not use TLS, write http://"
            return f"{error.host}:{error.port} refuses TLS ({error.os_error.strerror}){advice}"
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno
            why = os.strerror(number) if number else str(error.os_error)
            return f"cannot connect to {error.host}:{error.port} ({why})"
    return f"{type(error).__name__}: {error}"


def _reason(answer: Answer) -> str:
    if answer.status == 429:
        return RATE_LIMITED
    return "NotReady" if SERVER_NOT_READY in error_text(answer.payload)[0] else "ServerError"


async def _unread(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    return response


def _decoded(status: int, raw: bytes, headers: Mapping[str, str]) -> Answer:
    try:
        payload = read_json(raw)
        # An escaped half of a surrogate pair, such as an emoji cut off by a token limit, cannot be recorded or sent
        # again.
        if b"\\ud" in raw or b"\\uD" in raw:
            payload = whole(payload)
        return Answer(status, payload, headers)
    except ValueError:
        return Answer(status, raw[:4096].decode(errors="replace"), headers)
