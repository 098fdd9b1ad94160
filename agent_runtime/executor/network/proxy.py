"""The HTTP proxy on a workspace's loopback, its only way out: CONNECT, and absolute-form requests for plain http.

A name is looked up once, and the connection goes to the checked address, so a later change of the name's address has no
effect. One client connection serves one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from dataclasses import dataclass

from agent_runtime.executor.http.messages import MAX_HEAD_BYTES
from agent_runtime.executor.http.server import LINGER_SECONDS, log
from agent_runtime.executor.network.rules import (
    NO_NETWORK,
    Address,
    NetworkRule,
    join_authority,
    normal_host,
    split_authority,
)

# squid's port, which people recognise. It cannot collide: each workspace has its own loopback.
PROXY_PORT = 3128
# More than package managers open. The limit keeps one workspace from using all of the sandbox's descriptors.
MAX_CONNECTIONS = 128
HEAD_SECONDS = 30.0
CONNECT_SECONDS = 15.0
BAD_GATEWAY = "502 Bad Gateway"
_PIECE_BYTES = 64 * 1024
# Hop-by-hop headers, RFC 9110 section 7.6.1.
_HOP_BY_HOP = frozenset(
    {"connection", "proxy-connection", "proxy-authorization", "keep-alive", "te", "trailer", "upgrade", "host"}
)


class Refusal(Exception):
    """The request is refused with this status and explanation."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Target:
    """A client's destination, and its resolved address."""

    host: str
    port: int
    address: Address


@dataclass(frozen=True)
class ProxyRequest:
    """A client's request: a tunnel, or one plain request whose `head` is forwarded with `body_bytes` more."""

    host: str
    port: int
    head: bytes | None
    body_bytes: int


def proxy_variables() -> dict[str, str]:
    """Return the environment that makes programs use the proxy."""
    url, direct = f"http://127.0.0.1:{PROXY_PORT}", "localhost,127.0.0.1,::1"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    return {**dict.fromkeys(names, url), "NO_PROXY": direct, "no_proxy": direct}


def read_request(data: bytes) -> ProxyRequest:
    """Parse the request in this head (with its empty line). Raises Refusal."""
    first, *lines = data.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.rpartition(" ")
    if version not in ("HTTP/1.1", "HTTP/1.0") or b"\0" in data:
        raise Refusal("400 Bad Request", f"not a proxy request: {first[:100]!r}")
    if method == "CONNECT":
        authority = split_authority(target)
        if authority is None or not authority[1]:
            raise Refusal("400 Bad Request", f"CONNECT host:port expected, got {target[:100]!r}")
        return ProxyRequest(*authority, head=None, body_bytes=0)
    scheme, separator, place = target.partition("://")
    if scheme.lower() != "http" or not separator:
        raise Refusal("400 Bad Request", f"CONNECT, or a request for http://host/path, expected; got {target[:100]!r}")
    slash = min((place.find(char) for char in "/?" if char in place), default=len(place))
    authority = split_authority(place[:slash], default_port=80)
    if authority is None:
        raise Refusal("400 Bad Request", f"not a host and port: {place[:slash][:100]!r}")
    path = place[slash:]
    headers = [line for line in lines if line.partition(":")[0].strip().lower() not in _HOP_BY_HOP]
    lengths = {line.partition(":")[2].strip() for line in headers if line.lower().startswith("content-length:")}
    if any(line.partition(":")[0].strip().lower() == "transfer-encoding" for line in headers):
        raise Refusal("411 Length Required", "plain http requests with a body need a Content-Length here")
    if len(lengths) > 1 or not all(length.isascii() and length.isdigit() and len(length) < 19 for length in lengths):
        raise Refusal("400 Bad Request", "one Content-Length, a whole number, expected")
    if any(not line.partition(":")[1] or line[:1] in " \t" or "\n" in line or "\r" in line for line in headers):
        raise Refusal("400 Bad Request", "a malformed header line")
    request_line = f"{method} {path if path.startswith('/') else '/' + path} HTTP/1.1"
    # The server gets the Host that was checked; another Host header would reach an unchecked name.
    head = "\r\n".join([request_line, f"Host: {place[:slash]}", *headers, "Connection: close", "", ""])
    return ProxyRequest(*authority, head=head.encode("latin-1"), body_bytes=int(lengths.pop()) if lengths else 0)


class NetworkProxy:
    """The proxy of one workspace. `rule` changes with the phase."""

    def __init__(self, rule: NetworkRule) -> None:
        self._rule = rule
        self._open: dict[asyncio.StreamWriter, tuple[asyncio.Task[None], Target | None]] = {}
        self._failed: dict[tuple[str, int], str] = {}
        """Listed destinations to which the last connection of this phase failed, and why."""
        self._server: asyncio.Server | None = None

    async def start(self, listener: int) -> None:
        """Take over and serve the listening socket of this descriptor."""
        self._server = await asyncio.start_server(
            self._serve, sock=socket.socket(fileno=listener), limit=MAX_HEAD_BYTES
        )

    def switch(self, rule: NetworkRule) -> None:
        """Switch to the next phase: open connections that are no longer allowed are closed."""
        self._rule = rule
        self._failed = {}
        for writer, (_, target) in list(self._open.items()):
            # A client whose name is still being looked up is checked again before it is connected.
            if target is not None and self._refusal(target):
                self._cut(writer)

    async def check_failed(self) -> dict[str, str | None]:
        """Connect again to each listed destination to which the last connection of this phase failed. Returns them as
        `host:port`, each with why it cannot be reached now, or None.
        """
        return dict(await asyncio.gather(*(self._check(*destination) for destination in self._failed)))

    async def _check(self, host: str, port: int) -> tuple[str, str | None]:
        try:
            _, _, to_remote = await self._connect(host, port)
        except Refusal as refusal:
            return join_authority(host, port), refusal.reason
        to_remote.transport.abort()
        return join_authority(host, port), None

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._rule = NO_NETWORK
        self.pause()

    def pause(self) -> None:
        """Stop listening until the next `start`, and close all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            self._cut(writer)

    def _refusal(self, target: Target) -> str | None:
        return self._rule.refusal_of_name(target.host, target.port) or self._rule.refusal_of_address(
            target.host, target.port, target.address
        )

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self._open[writer][0].cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open[writer] = task, None
        try:
            await self._answer(reader, writer)
        except Refusal as refusal:
            writer.write(
                f"HTTP/1.1 {refusal.status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
                f"Content-Length: {len(refusal.reason.encode()) + 1}\r\nConnection: close\r\n\r\n{refusal.reason}\n".encode()
            )
            with contextlib.suppress(OSError, TimeoutError):
                writer.write_eof()
                # A client that still sends its body would lose the reply to a reset.
                async with asyncio.timeout(LINGER_SECONDS):
                    while await reader.read(_PIECE_BYTES):
                        pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()
        except asyncio.CancelledError:
            # Cancelled by a change of phase. No other task awaits this one, so the exception can be dropped.
            writer.transport.abort()
        finally:
            del self._open[writer]
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        request = read_request(head)
        target, remote, to_remote = await self._connect(request.host, request.port)
        try:
            if refusal := self._refusal(target):
                raise Refusal("403 Forbidden", refusal)
            self._open[writer] = self._open[writer][0], target
            if request.head is None:
                writer.write(b"HTTP/1.1 200 Connection Established\r\n\r\n")
                upwards = _relay(reader, to_remote, None)
            else:
                to_remote.write(request.head)
                upwards = _relay(reader, to_remote, request.body_bytes)
            await asyncio.gather(upwards, _relay(remote, writer, None))
        finally:
            to_remote.transport.abort()

    async def _connect(self, host: str, port: int) -> tuple[Target, asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises Refusal."""
        rule, destination = self._rule, (normal_host(host), port)
        try:
            target = await self._look_up(host, port)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    remote, to_remote = await asyncio.open_connection(str(target.address), target.port)
            except (OSError, TimeoutError) as error:
                reason = f"{host}:{port} ({target.address}) cannot be reached: {error or 'no answer in time'}"
                raise Refusal(BAD_GATEWAY, reason) from error
        except Refusal as refusal:
            # Of a phase without a list, the workspace's programs choose the destinations, also some that never exist.
            if refusal.status == BAD_GATEWAY and rule is self._rule and rule.kind == "List":
                self._failed[destination] = refusal.reason
            raise
        if rule is self._rule:
            self._failed.pop(destination, None)
        return target, remote, to_remote

    async def _look_up(self, host: str, port: int) -> Target:
        if refusal := self._rule.refusal_of_name(host, port):
            raise Refusal("403 Forbidden", refusal)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Refusal(BAD_GATEWAY, f"{host} cannot be looked up: {error}") from error
        targets = [Target(host, port, ipaddress.ip_address(info[4][0])) for info in found]
        refusals = [self._refusal(target) for target in targets]
        for target, refused in zip(targets, refusals, strict=True):
            if refused is None:
                return target
        log(event="network refused", host=host, port=port, reason=refusals[0])
        raise Refusal("403 Forbidden", refusals[0] or f"{host} has no address")


async def _relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: int | None) -> None:
    """Relay bytes until end-of-file, or `count` of them; then signal end-of-file to the other side if all were sent."""
    while count is None or count > 0:
        piece = await source.read(_PIECE_BYTES if count is None else min(count, _PIECE_BYTES))
        if not piece:
            break
        if count is not None:
            count -= len(piece)
        sink.write(piece)
        await sink.drain()
    if count is None and sink.can_write_eof():
        sink.write_eof()
