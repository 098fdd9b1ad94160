"""The server: `async with VllmStandIn(...) as server`, then `server.url`. `server.served` records what it really did."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.support.vllm_server import control_routes, openai_routes, standin_routes, token_routes
from tests.support.vllm_server.answering import ConnectionCut
from tests.support.vllm_server.context import SERVER
from tests.support.vllm_server.engine import Engine, Request
from tests.support.vllm_server.errors import ApiError
from tests.support.vllm_server.faults import Faults
from tests.support.vllm_server.model import Script
from tests.support.vllm_server.weights import Weights

# vLLM 0.26, vllm/entrypoints/serve/middleware/authenticate.py: GUARDED_PREFIX.
GUARDED = ("/v1", "/v2", "/inference")
# Larger than any conversation of a test; vLLM has no limit of its own.
BODY_BYTES = 64 << 20


class VllmStandIn:
    """Answers as vLLM does where we use it; see README.md.

    model: name under which it serves. max_model_len: tokens. script: what is answered, else words made from the prompt.
    tokens_per_second: of each request, None for as fast as it can. load_seconds: what loading weights takes.
    abort_seconds: how long the engine goes on for a client that has gone. base_version: version of the weights that it
    starts and restarts with. scale_out: whether render, derender and generate are enabled. weight_checker: whether that
    route is there. weight_versions: answers of generate say which weights made them, as 0.32 and newer do.
    routed_experts: answers of generate say which experts processed their tokens, as with --enable-return-routed-experts.
    tool_parser: whether tool calls are parsed. reasoning_parser: any name: reasoning is parsed in whole answers.
    drops_streamed_ids: streamed chat with tools loses ids, as before vLLM's pull request 29074. max_num_seqs: requests
    that run at once. kv_blocks: of 16 tokens. keep_served: how many requests the record keeps. transfer_port: where a
    trainer's tensors come in, 0 for any.
    """

    def __init__(
        self,
        *,
        model: str = "policy",
        max_model_len: int = 32768,
        api_key: str | None = None,
        script: Script | None = None,
        tokens_per_second: float | None = None,
        load_seconds: float = 0.0,
        abort_seconds: float = 0.0,
        base_version: int = 0,
        scale_out: bool = True,
        weight_checker: bool = True,
        weight_versions: bool = False,
        routed_experts: bool = False,
        tool_parser: bool = True,
        reasoning_parser: str | None = None,
        drops_streamed_ids: bool = True,
        priority_scheduling: bool = True,
        max_num_seqs: int = 256,
        kv_blocks: int = 65536,
        keep_served: int = 20_000,
        faults: Faults | None = None,
        flags: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        transfer_port: int = 0,
    ) -> None:
        self.model, self.max_model_len, self.api_key, self.script = model, max_model_len, api_key, script
        self.tokens_per_second, self.load_seconds, self.abort_seconds = tokens_per_second, load_seconds, abort_seconds
        self.base_version, self.scale_out = base_version, scale_out
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self.weight_checker, self.weight_versions = weight_checker, weight_versions
        self.routed_experts = routed_experts
        self.drops_streamed_ids, self.priority_scheduling = drops_streamed_ids, priority_scheduling
        self.max_num_seqs, self.kv_blocks = max_num_seqs, kv_blocks
        self.faults = faults or Faults()
        self.flags = list(flags)
        self.host, self.port, self.transfer_port = host, port, transfer_port
        self.engine_version = "0.26.0"
        self.served: deque[Request] = deque(maxlen=keep_served)
        """Every request that reached an engine, in order, restarts included."""
        self.boots = 0
        """How often it has been started."""
        self.started = time.time()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Return http://host:port, without a path."""
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def routes(self) -> Iterator[Iterable[web.AbstractRouteDef]]:
        """Return the server's routes."""
        yield from (openai_routes.routes, token_routes.routes, control_routes.routes)
        yield token_routes.scale_out_routes if self.scale_out else token_routes.disabled_routes
        if self.weight_checker:
            yield control_routes.weight_checker_routes

    async def start(self) -> None:
        """Serve with the base weights, on the same port as before."""
        self.weights = Weights(self.base_version, self.load_seconds, self.faults, transfer_port=self.transfer_port)
        self.engine = Engine(
            self.weights,
            self.faults,
            self.served,
            tokens_per_second=self.tokens_per_second,
            abort_seconds=self.abort_seconds,
            max_num_seqs=self.max_num_seqs,
            kv_blocks=self.kv_blocks,
            max_model_len=self.max_model_len,
        )
        app = web.Application(middlewares=[_guard], client_max_size=BODY_BYTES)
        app[SERVER] = self
        for table in (*self.routes(), standin_routes.routes):
            app.add_routes(table)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, self.host, self.port, backlog=2048)
        await site.start()
        self.port = runner.addresses[0][1]
        self._runner = runner
        self.engine.start()
        self.started = time.time()
        self.boots += 1

    async def stop(self) -> None:
        """Stop like a killed process: connections break off, and nothing is answered."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        if runner.server is not None:
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        await self.engine.close()
        await runner.cleanup()

    async def restart(self, *, down_seconds: float = 0.0) -> None:
        """Kill the server, and start it again with the base weights on the same port. Record and faults are kept."""
        await self.stop()
        await asyncio.sleep(down_seconds)
        await self.start()

    def served_in(self, session: str) -> list[Request]:
        """Return the record of one session. A run has its tag before the names of its sessions."""
        return [request for request in self.served if f"-{request.session}".endswith(f"-{session}")]


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    server = request.app[SERVER]
    if server.api_key is not None and request.path.startswith(GUARDED) and not _authorised(request, server.api_key):
        return web.json_response({"error": "Unauthorized"}, status=401)
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status, headers=error.headers)
    except ConnectionCut:
        return web.Response()
    except web.HTTPException as error:
        # vLLM 0.26, vllm/entrypoints/serve/exception_handling/handlers/http.py.
        body = ApiError(error.reason, error.status, error.reason).body()
        return web.json_response(body, status=error.status)


def _authorised(http: web.Request, key: str) -> bool:
    scheme, _, given = http.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
