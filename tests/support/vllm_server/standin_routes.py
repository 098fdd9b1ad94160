"""Routes that vLLM does not have: a record of what really happened, and faults."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from aiohttp import web

from tests.support.vllm_server.context import server_of
from tests.support.vllm_server.errors import bad_request, json_object
from tests.support.vllm_server.model import answers_from_json

routes = web.RouteTableDef()

_restarts: set[asyncio.Task[None]] = set()


@routes.get("/_standin/served")
async def served(http: web.Request) -> web.Response:
    """Return every request that reached the engine, in order; ?session= selects one session, ?after=N skips the first
    N.
    """
    server = server_of(http)
    found = list(server.served)[int(http.query.get("after", "0")) :]
    session = http.query.get("session")
    return web.json_response([r.as_json() for r in found if session is None or r.session == session])


@routes.get("/_standin/state")
async def state(http: web.Request) -> web.Response:
    """Return which weights are really loaded, which loads were tried, and counts."""
    server = server_of(http)
    weights, engine = server.weights, server.engine
    return web.json_response(
        {
            "version": weights.version,
            "label": weights.label,
            "updating": weights.updating,
            "loads": weights.loads,
            "adapters": {name: found.version for name, found in weights.adapters.items()},
            "paused": engine.paused,
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "tokens": engine.generation_tokens,
            "orphan_tokens": sum(request.orphan_tokens for request in server.served),
            "boots": server.boots,
        }
    )


@routes.get("/_standin/flags")
async def flags(http: web.Request) -> web.Response:
    """Return the command line with which it was started, vLLM's flags included."""
    return web.json_response(server_of(http).flags)


@routes.get("/_standin/faults")
async def faults(http: web.Request) -> web.Response:
    """Return the current faults."""
    return web.json_response(asdict(server_of(http).faults))


@routes.post("/_standin/faults")
async def set_faults(http: web.Request) -> web.Response:
    """Set the named faults, and keep the others."""
    server = server_of(http)
    try:
        server.faults.update(await json_object(http))
    except ValueError as error:
        raise bad_request(str(error)) from None
    server.engine.look()
    return web.json_response(asdict(server.faults))


@routes.post("/_standin/tensors")
async def tensors(http: web.Request) -> web.Response:
    """{version}: a trainer sends these weights by its own channel. /update_weights takes the last ones that were sent."""
    server_of(http).weights.tensors = int((await json_object(http))["version"])
    return web.json_response({})


@routes.post("/_standin/script")
async def script(http: web.Request) -> web.Response:
    """{session or *: [answer, ...]}: each answer is a text or {text, tool_calls: [{name, arguments}]}."""
    server_of(http).script = answers_from_json(await json_object(http))
    return web.json_response({})


@routes.post("/_standin/speed")
async def speed(http: web.Request) -> web.Response:
    """{tokens_per_second}: of each request from now on, running ones included."""
    server_of(http).engine.tokens_per_second = float((await json_object(http))["tokens_per_second"])
    return web.json_response({})


@routes.post("/_standin/restart")
async def restart(http: web.Request) -> web.Response:
    """{down_seconds}: break connections off, and return with the base weights on the same port."""
    down_seconds = float((await json_object(http)).get("down_seconds", 0))
    task = asyncio.create_task(server_of(http).restart(down_seconds=down_seconds))
    _restarts.add(task)
    task.add_done_callback(_restarts.discard)
    return web.json_response({})
