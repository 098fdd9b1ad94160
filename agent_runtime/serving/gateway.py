"""The gateway of a model server's pod: `python -m agent_runtime.serving.gateway`.

The engine listens only on the pod's loopback. The gateway forwards two ports to it: one for runners, with the inference
server's `routes.data`, and one for the operator, with its `routes.control` and the gateway's own `routes.OWN`, which
requires the token. A NetworkPolicy also restricts the second port, but some clusters do not enforce it.

A restarted engine has its initial weights again, which may not match the ModelServer's status. So calls are refused
until the operator has verified and reported which policy this process serves.
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import aiohttp
from aiohttp import web
from pydantic import Field

from agent_runtime.serving import routes
from agent_runtime.serving.adapters import Adapters, NotLoaded, WantedAdapters
from agent_runtime.serving.engine import Engine
from agent_runtime.serving.forward import engine_session, forward, unavailable
from agent_runtime.serving.json_calls import CallFailed, HookRequest, ask_hook, weights_digest
from agent_runtime.serving.policies import Policies, PolicyRequest
from agent_runtime.shared_tasks import until_stopped
from rollout_api.base import ApiModel
from rollout_api.cluster import (
    ENGINE_PROCESS_HEADER,
    MODEL_CONTROL_PORT,
    MODEL_ENGINE_PORT,
    MODEL_PORT,
    POLICY_VERSION_HEADER,
)
from rollout_api.inference.description import Description, EngineType
from rollout_api.inference.engines import DESCRIPTIONS
from rollout_api.inference.vllm import VLLM
from rollout_api.nesting import json_object

log = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=ApiModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

END_SECONDS = 10.0
"""Time for running answers when the gateway ends. As a sidecar it ends after the engine, so usually there are none."""


class _BadBody(Exception):
    """The request's body does not match its route."""


class ServedPolicy(ApiModel):
    """Body of POST /policy/served."""

    engine: str
    """The verified process, by its name from GET /policy/served."""
    version: Annotated[int, Field(ge=0, le=2**53)]


MOST_BODY = 256 * 2**20
"""Most bytes of a request that is read whole, to find its model: a conversation with many images."""


def data_app(http: aiohttp.ClientSession, engine: Engine, adapters: Adapters | None) -> web.Application:
    """Return the runners' application."""
    described = engine.description.routes

    async def handle(request: web.Request) -> web.StreamResponse:
        route = (request.method, request.rel_url.raw_path)
        if route not in described.data:
            return _refused(404, f"{request.method} {request.path} is not supported on this port")
        samples = route in described.sampling
        if request.method != "POST" or (adapters is None and not samples):
            return await forward(request, http, engine.url, lambda: None, {})
        if adapters is not None and not engine.was_open:
            return unavailable("this gateway does not know the names of adapters yet; use another server")
        # Read the body first, because the engine's policy may change meanwhile.
        asked = _asked(await request.read()) if adapters is not None and adapters.exist else None
        version, process = engine.version, engine.process
        if samples and (version is None or process is None):
            return unavailable("the policy of this server's engine is not verified yet; use another server")

        def refusal() -> web.Response | None:
            if engine.process == process or not samples:
                return None
            return unavailable("this server's engine has ended and lost its policy; use another server")

        with engine.call() if samples else nullcontext():
            if adapters is None or asked is None:
                return await forward(request, http, engine.url, refusal, _version(version))
            try:
                with adapters.call(asked, request.headers.get(POLICY_VERSION_HEADER)) as chosen:
                    served = _version(version if chosen is None else chosen)
                    return await forward(request, http, engine.url, refusal, served, json.dumps(asked).encode())
            except NotLoaded as error:
                return unavailable(f"{error}; use another server")

    return _app(handle, MOST_BODY)


def control_app(
    http: aiohttp.ClientSession, engine: Engine, token: str, policies: Policies | None, adapters: Adapters | None
) -> web.Application:
    """Return the operator's application, with `token` as bearer token. `policies` is None in mode Push."""
    expected = hashlib.sha256(token.encode()).digest()

    async def handle(request: web.Request) -> web.StreamResponse:
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(hashlib.sha256(shown.strip().encode(errors="surrogateescape")).digest(), expected)
        if scheme.lower() != "bearer" or not known:
            return _refused(401, "send the field `token` of the ModelServer's control Secret as bearer token")
        route = (request.method, request.rel_url.raw_path)
        if route == routes.FETCH_POLICY and policies is not None:
            return await _fetch(request, policies)
        if route == routes.SERVED_POLICY:
            return await _served(engine, adapters)
        if route == routes.SERVE_POLICY:
            return await _serve_policy(request, engine)
        if route == routes.CALL_HOOK:
            return await _call_hook(request, http)
        if route not in engine.description.routes.control and route not in (routes.DIGEST_POLICY, routes.WANT_ADAPTERS):
            return _refused(404, f"{request.method} {request.path} is not supported on this port")
        meant = request.headers.get(ENGINE_PROCESS_HEADER)

        def refusal() -> web.Response | None:
            return None if meant is None or engine.process == meant else _ended(meant)

        if route == routes.DIGEST_POLICY:
            return await _digest(http, engine, refusal)
        if route == routes.WANT_ADAPTERS:
            return await _want_adapters(request, adapters, refusal)
        changes = route in engine.description.routes.changes
        try:
            if changes:
                engine.close_gate()
            return await forward(request, http, engine.url, refusal, {})
        finally:
            if changes:
                engine.close_gate()  # what was verified before does not apply to the current process

    return _app(handle)


async def serve(
    stack: AsyncExitStack,
    token: str,
    policies: Policies | None,
    engine_url: str,
    data_port: int,
    control_port: int,
    described: Description = VLLM,
) -> tuple[int, int]:
    """Serve both ports until the stack is closed. Returns their numbers, which matters for port 0."""
    http = await stack.enter_async_context(engine_session())
    engine = Engine(engine_url, described)
    stack.callback(engine.close)
    ports, adapters = [], None
    if policies is not None:
        adapters = Adapters(http, engine, policies.folder, policies.environ)
        stack.push_async_callback(adapters.close)
    data, control = data_app(http, engine, adapters), control_app(http, engine, token, policies, adapters)
    for app, port in ((data, data_port), (control, control_port)):
        # handler_cancellation: when a client disconnects, its request at the inference server ends too.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=END_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, port=port).start()
        # With port 0, IPv4 and IPv6 get different ports; return the IPv4 one.
        ports.append(int(min(runner.addresses, key=len)[1]))
    return ports[0], ports[1]


def _app(handle: Handler, most_body: int = 2**20) -> web.Application:
    """Return an application with one handler, which reads at most `most_body` bytes of a body and forwards any number."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handle(request)
        except _BadBody as error:
            return _refused(400, str(error))

    app = web.Application(client_max_size=most_body)
    app.router.add_route("*", "/{path:.*}", answer)
    return app


def _version(version: int | None) -> dict[str, str]:
    return {} if version is None else {POLICY_VERSION_HEADER: str(version)}


def _asked(body: bytes) -> dict[str, Any]:
    try:
        return json_object(body)
    except ValueError as error:
        raise _BadBody(f"the body is {error}") from None


async def _body(request: web.Request, kind: type[BodyT], expected: str) -> BodyT:
    try:
        return kind.model_validate_json(await request.read())
    except ValueError as error:
        raise _BadBody(f"expected {expected}: {error}") from None


async def _fetch(request: web.Request, policies: Policies) -> web.Response:
    wanted = await _body(request, PolicyRequest, "version, uri and optionally digest")
    try:
        folder = await policies.fetch(wanted)
    except Exception as error:  # noqa: BLE001 - the operator must get the error
        log.warning("fetching policy %d from %s: %s", wanted.version, wanted.uri, error)
        return _refused(502, f"policy {wanted.version} could not be fetched from {wanted.uri}: {error}")
    return web.json_response({"version": wanted.version, "path": str(folder)})


async def _call_hook(request: web.Request, http: aiohttp.ClientSession) -> web.Response:
    """Call the trainer's hook from this pod, under the network rules of its namespace. The operator itself never
    connects to addresses from manifests.
    """
    asked = await _body(request, HookRequest, "url, question and seconds")
    try:
        return web.json_response(await ask_hook(http, asked))
    except CallFailed as error:
        # Statuses of the hook must not look like this gateway's own.
        return _refused(422 if 300 <= error.status < 500 else 502, error.message)


async def _digest(
    http: aiohttp.ClientSession, engine: Engine, refusal: Callable[[], web.Response | None]
) -> web.Response:
    if (refused := refusal()) is not None:
        return refused
    try:
        answer = web.json_response({"digest": await weights_digest(http, engine.url, engine.description)})
    except CallFailed as error:
        answer = _refused(error.status or 502, error.message)
    # If the inference server was restarted meanwhile, the digest is that of other weights.
    return answer if (refused := refusal()) is None else refused


async def _want_adapters(
    request: web.Request, adapters: Adapters | None, refusal: Callable[[], web.Response | None]
) -> web.Response:
    wanted = await _body(request, WantedAdapters, "adapters and seconds")
    if adapters is None:
        return _refused(422, "this server has no adapters of several versions")
    if (refused := refusal()) is not None:
        return refused
    try:
        await adapters.want(wanted)
    except CallFailed as error:
        return _refused(error.status or 502, error.message)
    return web.json_response({})


async def _served(engine: Engine, adapters: Adapters | None) -> web.Response:
    process = await engine.find()
    if process is None:
        return unavailable("the engine does not answer")
    served = {"engine": process, "version": engine.version, "calls": engine.calls}
    return web.json_response(served if adapters is None else {**served, "adapters": adapters.report()})


async def _serve_policy(request: web.Request, engine: Engine) -> web.Response:
    verified = await _body(request, ServedPolicy, "engine and version")
    if not engine.open(verified.engine, verified.version):
        return _ended(verified.engine)
    return web.json_response({"engine": verified.engine, "version": verified.version})


def _ended(process: str) -> web.Response:
    return _refused(412, f"the engine's process {process} has ended; verify the current process")


def _refused(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "invalid_request_error", "code": status}}, status=status
    )


def environment(credentials: Path | None) -> Callable[[], Mapping[str, str]]:
    """Return a function that returns this process's variables, with those of the mounted Secret `credentials` as they are
    now. A variable that was removed from the Secret is absent.
    """
    if credentials is None:
        return lambda: os.environ
    others = {name: value for name, value in os.environ.items() if name not in _mounted(credentials)}
    return lambda: others | _mounted(credentials)


def _mounted(secret: Path) -> dict[str, str]:
    # The kubelet replaces all files at once by replacing the link `..data`.
    data = secret / "..data"
    files = (data.resolve() if data.exists() else secret).iterdir()
    return {file.name: file.read_text(errors="surrogateescape") for file in files if file.is_file()}


async def _run(options: argparse.Namespace) -> None:
    token = options.token_file.read_text().strip()
    if not token:
        raise SystemExit(f"{options.token_file} is empty; it must contain the token of the control port")
    described = DESCRIPTIONS[options.engine]
    policies = None
    if options.policy_folder:
        checked = not described.updates.survives_bad_weights
        policies = Policies(options.policy_folder, environment(options.credentials), checked=checked)
    with until_stopped() as stop:
        async with AsyncExitStack() as stack:
            ports = (options.port, options.control_port)
            found = await serve(stack, token, policies, options.engine_url, *ports, described)
            print("listening on ports {} and {}".format(*found), flush=True)
            await stop.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m agent_runtime.serving.gateway", description=__doc__)
    parser.add_argument("--token-file", type=Path, required=True, help="file with the token of the control port")
    parser.add_argument(
        "--policy-folder", type=Path, help="folder for fetched policies; without it, policies cannot be fetched"
    )
    parser.add_argument("--credentials", type=Path, help="mounted Secret with the variables of the policies' store")
    parser.add_argument(
        "--engine", type=EngineType, default=EngineType.VLLM, choices=list(EngineType), help="the inference server"
    )
    parser.add_argument("--engine-url", default=f"http://127.0.0.1:{MODEL_ENGINE_PORT}", help="the engine's address")
    parser.add_argument("--port", type=int, default=MODEL_PORT, help="for runners")
    parser.add_argument("--control-port", type=int, default=MODEL_CONTROL_PORT, help="for the operator")
    asyncio.run(_run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
