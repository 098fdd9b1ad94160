"""The route at which workers connect to the proxy."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from agent_runtime.proxy import keys
from agent_runtime.proxy.http import request_key
from agent_runtime.proxy.relay import schemas
from agent_runtime.proxy.relay.hub import Hub


def workers_route(hub: Hub, admin_key: str | None) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Let in whoever has the admin key as bearer; everybody where it is None."""
    digest = None if admin_key is None else keys.digest(admin_key)

    async def connect(request: web.Request) -> web.StreamResponse:
        key = request_key(request.headers)
        if digest is not None and (key is None or not keys.matches(key, digest)):
            return web.json_response(
                {"error": {"message": "a worker needs the proxy's admin key as bearer"}}, status=401
            )
        # Answers do not compress well enough to be worth the time of both ends.
        socket = web.WebSocketResponse(
            heartbeat=hub.heartbeat_seconds, max_msg_size=schemas.FRAME_BYTES, compress=False, autoping=True
        )
        await socket.prepare(request)
        await hub.serve(socket)
        return socket

    return connect
