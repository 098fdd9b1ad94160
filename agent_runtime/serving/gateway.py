"""The gateway of a model server's pod: `python -m agent_runtime.serving.gateway`.

The engine listens on the pod's loopback alone, with all its routes. Two ports lead to it: one for runners, with the routes
of `routes.DATA`, and one for the operator, with those of `routes.CONTROL` and `/policy/fetch`, for who has the token. A
network policy guards the second one too; where a cluster enforces none, the token still does.
"""

import argparse
import asyncio
import hashlib
import hmac
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from aiohttp import web

from agent_runtime.serving import routes
from agent_runtime.serving.forward import engine_session, forward
from agent_runtime.serving.policies import Policies, PolicyRequest
from rollout_api.cluster import MODEL_CONTROL_PORT, MODEL_ENGINE_PORT, MODEL_PORT

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

END_SECONDS = 10.0
"""For answers that are under way when the gateway ends; as a sidecar it ends after the engine, so there are none."""


def data_app(engine: aiohttp.ClientSession, engine_url: str) -> web.Application:
    """What runners reach."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if (request.method, request.rel_url.raw_path) not in routes.DATA:
            return _refused(404, f"{request.method} {request.path} is not offered here")
        return await forward(request, engine, engine_url)

    return _app(handle)


def control_app(
    engine: aiohttp.ClientSession, engine_url: str, token: str, policies: Policies | None
) -> web.Application:
    """What the operator reaches.

    Args:
        engine: connections to the engine.
        engine_url: its address.
        token: who shows it as bearer may ask.
        policies: fetches policies; None in mode Push.
    """
    expected = hashlib.sha256(token.encode()).digest()

    async def handle(request: web.Request) -> web.StreamResponse:
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(hashlib.sha256(shown.strip().encode()).digest(), expected)
        if scheme.lower() != "bearer" or not known:
            return _refused(401, "a bearer token is needed: the field `token` of the ModelServer's control Secret")
        route = (request.method, request.rel_url.raw_path)
        if route == routes.FETCH_POLICY and policies is not None:
            return await _fetch(request, policies)
        if route not in routes.CONTROL:
            return _refused(404, f"{request.method} {request.path} is not offered here")
        return await forward(request, engine, engine_url)

    return _app(handle)


async def serve(
    stack: AsyncExitStack, token: str, policies: Policies | None, engine_url: str, data_port: int, control_port: int
) -> tuple[int, int]:
    """Open both ports until the stack is closed. Returns their numbers, for a port 0."""
    engine = await stack.enter_async_context(engine_session())
    ports = []
    for app, port in (
        (data_app(engine, engine_url), data_port),
        (control_app(engine, engine_url, token, policies), control_port),
    ):
        # With cancellation: a client that goes ends its request at the engine at once.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=END_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, port=port).start()
        # IPv4 and IPv6 have a port each when any port will do.
        ports.append(int(min(runner.addresses, key=len)[1]))
    return ports[0], ports[1]


def _app(handle: Handler) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    return app


async def _fetch(request: web.Request, policies: Policies) -> web.Response:
    try:
        wanted = PolicyRequest.model_validate_json(await request.read())
    except ValueError as error:
        return _refused(400, f"expected version, uri and perhaps digest: {error}")
    try:
        folder = await policies.fetch(wanted)
    except Exception as error:  # noqa: BLE001 - whatever it is, the operator has to be told
        log.warning("fetching policy %d from %s: %s", wanted.version, wanted.uri, error)
        return _refused(502, f"policy {wanted.version} could not be fetched from {wanted.uri}: {error}")
    return web.json_response({"version": wanted.version, "path": str(folder)})


def _refused(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "invalid_request_error", "code": status}}, status=status
    )


async def _run(options: argparse.Namespace) -> None:
    token = options.token_file.read_text().strip()
    if not token:
        raise SystemExit(f"{options.token_file} is empty; it must hold the token of the control port")
    policies = Policies(options.policy_folder, dict(os.environ)) if options.policy_folder else None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        ports = await serve(stack, token, policies, options.engine_url, options.port, options.control_port)
        print("listening on ports {} and {}".format(*ports), flush=True)
        await stop.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m agent_runtime.serving.gateway", description=__doc__)
    parser.add_argument("--token-file", type=Path, required=True, help="file with the token of the control port")
    parser.add_argument("--policy-folder", type=Path, help="where policies are fetched to; without it none are")
    parser.add_argument("--engine-url", default=f"http://127.0.0.1:{MODEL_ENGINE_PORT}", help="the engine's address")
    parser.add_argument("--port", type=int, default=MODEL_PORT, help="for runners")
    parser.add_argument("--control-port", type=int, default=MODEL_CONTROL_PORT, help="for the operator")
    asyncio.run(_run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
