"""The proxy as an aiohttp application: passes requests to the handler, and has the route to which workers connect."""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agent_runtime.proxy import keys
from agent_runtime.proxy.chat import BadRequest
from agent_runtime.proxy.handler import Handler
from agent_runtime.proxy.http import BodyTooLarge, Incoming, Reply, request_key
from agent_runtime.proxy.peers import PeerLost
from agent_runtime.proxy.relay import schemas
from agent_runtime.proxy.relay.hub import Hub


def workers_route(hub: Hub, admin_key: str | None) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Accept clients with the admin key as bearer token; all clients if it is None."""
    digest = None if admin_key is None else keys.digest(admin_key)

    async def connect(request: web.Request) -> web.StreamResponse:
        key = request_key(request.headers)
        if digest is not None and (key is None or not keys.matches(key, digest)):
            return web.json_response(
                {"error": {"message": "a worker needs the proxy's admin key as bearer token"}}, status=401
            )
        # No compression: it takes more time than it saves.
        socket = web.WebSocketResponse(
            heartbeat=hub.heartbeat_seconds, max_msg_size=schemas.FRAME_BYTES, compress=False, autoping=True
        )
        await socket.prepare(request)
        await hub.serve(socket)
        return socket

    return connect


DELIVERY_SECONDS: Final = 120.0
"""Time without reading after which a client counts as disconnected."""

DESCRIPTORS: Final = 65_536
"""Enough for some 20,000 streams, the most that one process can handle."""

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(handler: Handler, hub: Hub | None = None, admin_key: str | None = "") -> web.Application:
    """Return an application that answers every path. If its model is a hub, workers connect with the admin key. Serve
    it with `serving`, which detects that a client disconnects.
    """
    app = web.Application(client_max_size=0)
    if hub is not None:

        async def close_hub(_: web.Application) -> None:
            await hub.close()

        app.router.add_get(schemas.PATH, workers_route(hub, admin_key))
        app.on_shutdown.append(close_hub)
    app.router.add_route("*", "/{path:.*}", _request_handler(handler))
    return app


_MALFORMED: Final = (HttpProcessingError, web.RequestPayloadError)
_LOG: Final = logging.getLogger(__name__)
_LOG.addFilter(lambda entry: not (entry.exc_info and isinstance(entry.exc_info[1], _MALFORMED)))


def server_runner(app: web.Application, shutdown_seconds: float = 60.0) -> web.AppRunner:
    """Serve an application; a client's disconnect cancels its handler. Paths and malformed requests are not logged,
    because they may contain keys and clients could fill a log with them.
    """
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, logger=_LOG, shutdown_timeout=shutdown_seconds
    )


async def serving(
    handler: Handler, host: str, port: int, hub: Hub | None = None, admin_key: str | None = ""
) -> tuple[web.AppRunner, int]:
    """Serve until the runner is cleaned up; return the listening port."""
    _allow_descriptors()
    runner = server_runner(make_app(handler, hub, admin_key))
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024).start()
    return runner, int(runner.addresses[0][1])


def _allow_descriptors() -> None:
    """Raise this process's limit of descriptors: a stream has one for its client and one for the model, and many
    systems give a process only 1,024 by default. Without free descriptors the model is unreachable, and every client
    waits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _request_handler(handler: Handler) -> Handle:
    async def carry(request: web.Request) -> web.StreamResponse:
        reply = await handler.handle(_incoming(request))
        delivered = False
        try:
            response = await _send(request, reply)
            delivered = True
        except (aiohttp.ClientError, ConnectionError, TimeoutError, PeerLost):
            # The client or the forwarding replica has disconnected. Abort the connection, so that an interrupted reply
            # does not look complete.
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            reply.done(delivered)
        return response

    return carry


async def _send(request: web.Request, reply: Reply) -> web.StreamResponse:
    if isinstance(reply.body, bytes):
        whole = web.Response(status=reply.status, headers=reply.headers, body=reply.body)
        async with asyncio.timeout(DELIVERY_SECONDS):
            await whole.prepare(request)
            await whole.write_eof()
        return whole
    response = web.StreamResponse(status=reply.status, headers=reply.headers)
    await response.prepare(request)
    async for chunk in reply.body:
        async with asyncio.timeout(DELIVERY_SECONDS):
            await response.write(chunk)
    await response.write_eof()
    return response


def _incoming(request: web.Request) -> Incoming:
    body: bytes | None = None

    async def read(most: int) -> bytes:
        nonlocal body
        if body is None:
            if (request.content_length or 0) > most:
                raise BodyTooLarge(most)
            received = bytearray()
            try:
                async for chunk in request.content.iter_any():
                    received += chunk
                    if len(received) > most:
                        raise BodyTooLarge(most)
            except web.RequestPayloadError as error:
                raise BadRequest(f"the body cannot be read: {error}") from error
            body = bytes(received)
        return body

    headers = {name.lower(): value for name, value in request.headers.items()}
    return Incoming(request.method, request.path, headers, read, request.rel_url.raw_query_string)
