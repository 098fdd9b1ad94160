"""Requests forwarded to the replica that owns their session, and detection of its failure.

A model may take minutes to answer, so the owner's `/health` is polled while a request waits. An address may belong to
another program by now, which must get no key and no prompt, so each answer of `/health` proves that it is a replica's.
"""

import asyncio
import contextlib
import hmac
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from agent_runtime.proxy.call import RETRY_COUNT
from agent_runtime.proxy.chat import ErrorKind, Refused
from agent_runtime.proxy.http import Incoming, Reply
from agent_runtime.proxy.session import SessionSettings
from agent_runtime.shared_tasks import ended_before

LOST_SECONDS: Final = 5.0
"""An owner that does not respond for this time loses its sessions. Longer than a stall of its event loop or of a
network.
"""

FORWARDED: Final = "x-session-proxy-forwarded"
"""Header of a request that another replica forwards; it is not forwarded again. Its value is derived from the replicas'
secret: delivery reports determine which tokens are trained on, so a program with the session's key must not be able to
send them.
"""

TURN: Final = "x-session-proxy-turn"
"""Header with the turn that a reply answers, so that its delivery can be reported."""

MISDIRECTED: Final = 421
"""Another replica owns the session (RFC 9110, 421 Misdirected Request)."""

_CHALLENGE: Final = "x-session-proxy-challenge"
_PROOF: Final = "x-session-proxy-proof"

_ASK_SECONDS: Final = 1.0
"""Interval of the requests to `/health`, and how long an answer counts."""
_AGAIN_SECONDS: Final = 0.25
_END_SECONDS: Final = 0.5
"""Owners end a stream together with its last event."""
_MOST_TRIES: Final = 3
"""Limit of attempts for a request whose connection broke although the owner responds."""

_OF_ONE_CONNECTION: Final = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "date"}
)

_NOT_FORWARDED: Final = _OF_ONE_CONNECTION | {"content-encoding", "expect"}
"""The server has decoded the body."""

T = TypeVar("T")


class PeerLost(Exception):
    """The owner has not responded for 5 s, or another program has its address."""


@dataclass(eq=False)
class _Peer:
    address: str
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    answered: float = field(default_factory=time.monotonic)
    """Monotonic time of its latest response, or of the first request."""
    proven: float = -math.inf
    """Monotonic time of its latest proof."""
    waiting: int = 0
    watcher: "asyncio.Task[None] | None" = None


class Peers:
    """The other replicas. Only replicas of one store know `secret`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._peers: dict[str, _Peer] = {}
        self._client: aiohttp.ClientSession | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        if self._telling:
            await asyncio.wait(self._telling)
        if self._client is not None:
            await self._client.close()

    def sent(self, headers: Mapping[str, str], settings: SessionSettings) -> bool:
        """Whether another replica sent this request about the session. Header names are in lower case."""
        return hmac.compare_digest(headers.get(FORWARDED, "").encode(errors="replace"), self._mark(settings).encode())

    def proof(self, headers: Mapping[str, str], address: str) -> dict[str, str]:
        """Return the headers of an answer of `/health` at this replica's own address; none if no replica asks."""
        challenge = headers.get(_CHALLENGE)
        return {} if challenge is None else {_PROOF: self._proof(challenge, address)}

    def _proof(self, challenge: str, address: str) -> str:
        text = f"{challenge} {address}".encode(errors="surrogateescape")
        return hmac.digest(self._secret, text, "sha256").hex()

    async def _check(self, peer: _Peer) -> None:
        """Raise PeerLost if another program answers at the address, and the errors of a request."""
        challenge = secrets.token_hex(16)
        timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)
        asked = self._open().get(f"{peer.address}/health", headers={_CHALLENGE: challenge}, timeout=timeout)
        async with asked as response:
            given = response.headers.get(_PROOF, "").encode(errors="replace")
        if not hmac.compare_digest(given, self._proof(challenge, peer.address).encode()):
            peer.lost.set()
            raise PeerLost(peer.address)
        peer.answered = peer.proven = time.monotonic()

    def _mark(self, settings: SessionSettings) -> str:
        # Derived from the session's key digest, so that it is invalid for a later session of the same name.
        return hmac.digest(self._secret, settings.key_digest.encode(), "sha256").hex()

    async def forward(
        self, address: str, settings: SessionSettings, request: Incoming, has_moved: Callable[[], Awaitable[bool]]
    ) -> Reply:
        """Return the owner's reply, or status 421 if the session has moved: `has_moved` checks that for an unreachable
        owner.

        Raises PeerLost and Refused if no part of a reply was sent yet.
        """
        body = await request.read(settings.limits.body_bytes)
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_FORWARDED}
        headers[FORWARDED] = self._mark(settings)
        url = _exact_url(address, request)
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(self._watched(address))
            response = await self._send(peer, request.method, url, headers, body, has_moved)
            if response is None:
                return Reply(MISDIRECTED, {}, b"")
            stream = _ForwardedStream(peer, response) if _is_stream(response) else None
            content: bytes | AsyncIterator[bytes] = await response.read() if stream is None else stream.pieces()
            watching = stack.pop_all()
        turn = response.headers.get(TURN)

        async def finish(delivered: bool) -> None:
            # A client that has the last event may close the connection before the owner's end has arrived here.
            is_whole = delivered or (stream is not None and await stream.was_passed_on())
            watching.close()
            response.close()
            if turn is not None:
                await self._tell(address, settings.id, headers, turn, is_whole)

        def done(delivered: bool) -> None:
            task = asyncio.ensure_future(finish(delivered))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

        internal = {*_OF_ONE_CONNECTION, TURN}
        kept = {name.lower(): value for name, value in response.headers.items() if name.lower() not in internal}
        return Reply(response.status, kept, content, done)

    async def _send(
        self,
        peer: _Peer,
        method: str,
        url: URL,
        headers: dict[str, str],
        body: bytes,
        has_moved: Callable[[], Awaitable[bool]],
    ) -> aiohttp.ClientResponse | None:
        """Return the beginning of a stream, or a complete reply; None if the session has moved."""
        failures = 0
        while True:
            try:
                if time.monotonic() - peer.proven > _ASK_SECONDS:
                    await _unless_lost(peer, self._check(peer))
            except (aiohttp.ClientError, OSError, TimeoutError):
                if await has_moved():
                    return None
                await _unless_lost(peer, asyncio.sleep(_AGAIN_SECONDS))
                continue
            try:
                return await _unless_lost(peer, self._exchange(method, url, headers, body))
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                if await has_moved():  # nothing was sent
                    return None
            except (aiohttp.ClientError, ConnectionError) as error:
                failures += 1
                if failures == _MOST_TRIES:
                    raise Refused(
                        ErrorKind.UNAVAILABLE, f"the owner of this session closed the connection: {error}"
                    ) from error
                # Mark it as a retry, so that the owner returns an answer that it may have recorded.
                headers[RETRY_COUNT] = str(failures)
            await _unless_lost(peer, asyncio.sleep(_AGAIN_SECONDS))

    async def _exchange(self, method: str, url: URL, headers: dict[str, str], body: bytes) -> aiohttp.ClientResponse:
        response = await self._open().request(method, url, headers=headers, data=body, allow_redirects=False)
        try:
            if not _is_stream(response):
                await response.read()  # aiohttp stores the body in `response`
            return response
        except BaseException:
            response.close()
            raise

    async def _tell(self, address: str, session: str, headers: dict[str, str], turn: str, delivered: bool) -> None:
        """Report to the owner whether the client has its reply; without a report the owner keeps the answer for a
        retry.
        """
        url = f"{address}/sessions/{session}/turns/{turn}"
        timeout = aiohttp.ClientTimeout(total=LOST_SECONDS)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._open().post(url, headers=headers, json={"delivered": delivered}, timeout=timeout):
                pass

    @contextlib.contextmanager
    def _watched(self, address: str) -> Iterator[_Peer]:
        peer = self._peers.setdefault(address, _Peer(address))
        peer.waiting += 1
        if peer.watcher is None:
            peer.watcher = asyncio.ensure_future(self._watch(peer))
        try:
            yield peer
        finally:
            peer.waiting -= 1
            if not peer.waiting and peer.watcher is not None:
                peer.watcher.cancel()
                # A lost owner is checked again: it may have recovered.
                del self._peers[address]

    async def _watch(self, peer: _Peer) -> None:
        while time.monotonic() - peer.answered < LOST_SECONDS and not peer.lost.is_set():
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, PeerLost):
                await self._check(peer)
            await asyncio.sleep(_ASK_SECONDS)
        peer.lost.set()

    def _open(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ASK_SECONDS),
                auto_decompress=False,
            )
        return self._client


def _exact_url(address: str, request: Incoming) -> URL:
    """Return the URL of a request at another replica. Resolving `..` in its path would make it a request to another
    route there, such as a delivery report, with this replica's authentication.
    """
    query = f"?{request.query}" if request.query else ""
    return URL(address + quote(request.path, safe="/", errors="surrogateescape") + query, encoded=True)


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream"


async def _unless_lost(peer: _Peer, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine. Raises PeerLost as soon as the peer is lost."""
    if (ended := await ended_before(peer.lost.wait(), work)) is None:
        raise PeerLost(peer.address)
    return ended.result()


class _ForwardedStream:
    """A stream of the owner, on its way to the client."""

    def __init__(self, peer: _Peer, response: aiohttp.ClientResponse) -> None:
        self._peer, self._response = peer, response
        self._passed_on = 0

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream. Raises if it breaks off, so that the client's connection is aborted too."""
        while chunk := await _unless_lost(self._peer, self._response.content.readany()):
            self._peer.answered = time.monotonic()
            yield chunk
            self._passed_on += len(chunk)

    async def was_passed_on(self) -> bool:
        """Whether the owner's stream has ended, and all of it was written to the client."""
        content = self._response.content
        try:
            async with asyncio.timeout(_END_SECONDS):
                await content.wait_eof()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False
        return content.exception() is None and self._passed_on == content.total_bytes
