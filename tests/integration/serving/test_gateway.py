"""The gateway in front of a real HTTP engine: which requests pass, and whether answers arrive as the engine sends them."""

import asyncio
import gzip
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from agent_runtime.models.base import ModelError, ModelReply, ModelRequest
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.token_exact.routes import Progress
from agent_runtime.serving import engine as serving_engine
from agent_runtime.serving import routes
from agent_runtime.serving.gateway import serve
from agent_runtime.serving.policies import Policies
from rollout_api.inference.vllm import VLLM
from rollout_api.model import Sampling
from rollout_api.records import Message
from tests.support.vllm_server import VllmStandIn

TOKEN = "a-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CHAT = "/v1/chat/completions"
CUT_OFF = b"cut off"


@dataclass
class Engine:
    """An engine whose answers the test releases piece by piece."""

    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    pieces: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.raw_path}")
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.read())
        self.began.set()
        if request.path != CHAT:
            return web.json_response({})
        try:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Engine": "kept"})
            await answer.prepare(request)
            while (piece := await self.pieces.get()) is not None:
                if piece is CUT_OFF:
                    assert request.transport is not None
                    request.transport.abort()
                    return answer
                await answer.write(piece)
            return answer
        except asyncio.CancelledError:
            self.gone.set()
            raise


@dataclass(frozen=True)
class Gateway:
    engine: Engine
    data: str
    control: str
    http: aiohttp.ClientSession
    stop_engine: AsyncExitStack
    engine_port: int


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    engine = Engine()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.answer)
    async with AsyncExitStack() as stack, AsyncExitStack() as engine_stack:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        engine_stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ports = await serve(stack, TOKEN, Policies(tmp_path / "policies", dict), url, 0, 0)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        data, control = (f"http://127.0.0.1:{port}" for port in ports)
        gateway = Gateway(engine, data, control, http, engine_stack, runner.addresses[0][1])
        await open_for(gateway, 7)
        yield gateway


async def served(gateway: Gateway) -> dict[str, object]:
    """Return the process that the gateway knows, and the policy for which it admits calls."""
    async with gateway.http.get(f"{gateway.control}/policy/served", headers=BEARER) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, object] = await response.json()
        return answer


async def open_for(gateway: Gateway, version: int, process: object = None) -> int:
    """Set the policy that the engine was verified to serve, as the operator does."""
    body = {"engine": process or (await served(gateway))["engine"], "version": version}
    return await status(gateway, "POST", f"{gateway.control}/policy/served", json=body, headers=BEARER)


async def restart_engine(port: int) -> tuple[asyncio.Server, asyncio.Event]:
    """Open another process's socket at the engine's address. The event is set when it receives something."""
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            asked.set()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port), asked


async def status(gateway: Gateway, method: str, url: str, **options: object) -> int:
    async with gateway.http.request(method, url, **options) as response:  # type: ignore[arg-type]
        return response.status


@pytest.mark.parametrize(("method", "path"), sorted(VLLM.routes.data - {("POST", CHAT)}))
async def test_runners_reach_the_routes_of_a_rollout(gateway: Gateway, method: str, path: str) -> None:
    async with gateway.http.request(method, URL(f"{gateway.data}{path}?a=%2F", encoded=True)) as response:
        assert response.status == 200
    assert gateway.engine.asked == [f"{method} {path}?a=%2F"]


async def test_runners_get_no_control_route_not_even_with_the_token(gateway: Gateway) -> None:
    for method, path in VLLM.routes.control - VLLM.routes.data | routes.OWN:
        for headers in ({}, BEARER):
            assert await status(gateway, method, gateway.data + path, headers=headers) == 404, path
    assert gateway.engine.asked == []


async def test_no_other_spelling_leads_to_a_control_route(gateway: Gateway) -> None:
    host, _, port = gateway.data.removeprefix("http://").partition(":")
    spellings = [
        *("//pause", "/./pause", "/v1/../pause", "/v1/models/../../pause", "/%70ause", "/pause/", "/PAUSE"),
        *("/v1/models/%2e%2e/%2e%2e/pause", "/pause;x=1", "/health/../pause", "/v1/chat/completions/../../../pause"),
        *("http://127.0.0.1/pause", "/v1\\..\\pause", "/health%00/../pause", "/version#/../pause"),
    ]
    for spelling in spellings:
        for method in ("GET", "POST"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"{method} {spelling} HTTP/1.1\r\nHost: x\r\nX-Original-URL: /pause\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            assert await reader.readline(), f"{spelling} is not answered"
            writer.close()
            await writer.wait_closed()
    assert set(gateway.engine.asked) <= {"GET /version"}, "a fragment is no part of a path"


async def test_control_routes_require_the_token(gateway: Gateway) -> None:
    for method, path in VLLM.routes.control | routes.OWN:
        for shown in ("", "Bearer wrong", f"Basic {TOKEN}", "Bearer ", f"Bearer {TOKEN}x"):
            found = await status(gateway, method, gateway.control + path, headers={"Authorization": shown})
            assert found == 401, (path, shown)
    assert gateway.engine.asked == []


async def test_the_operator_gets_every_control_route_and_the_engine_never_sees_the_token(gateway: Gateway) -> None:
    for method, path in VLLM.routes.control:
        assert await status(gateway, method, gateway.control + path, headers=BEARER) == 200
    assert set(gateway.engine.asked) == {f"{method} {path}" for method, path in VLLM.routes.control}
    assert TOKEN not in json.dumps(gateway.engine.headers)


async def test_the_operator_samples_nothing(gateway: Gateway) -> None:
    assert await status(gateway, "POST", gateway.control + CHAT, headers=BEARER) == 404


async def test_each_piece_of_an_answer_arrives_before_the_next_one_is_made(gateway: Gateway) -> None:
    async with gateway.http.post(gateway.data + CHAT, json={"stream": True}) as response:
        assert (response.status, response.headers["X-Engine"]) == (200, "kept")  # before any byte of the body
        for piece in (b"data: one\n\n", b"data: two\n\n"):
            gateway.engine.pieces.put_nowait(piece)
            assert await asyncio.wait_for(response.content.readany(), 5) == piece
        gateway.engine.pieces.put_nowait(None)
        assert await response.content.read() == b""
    assert json.loads(gateway.engine.bodies[0]) == {"stream": True}


@pytest.mark.parametrize("pieces", [0, 1])
async def test_a_client_that_goes_away_ends_the_request_at_the_engine(gateway: Gateway, pieces: int) -> None:
    async def ask() -> None:
        async with gateway.http.post(gateway.data + CHAT, json={}) as response:
            await response.read()

    asking = asyncio.create_task(ask())
    for _ in range(pieces):
        gateway.engine.pieces.put_nowait(b"data: one\n\n")
    await asyncio.wait_for(gateway.engine.began.wait(), 5)
    asking.cancel()
    await asyncio.wait_for(gateway.engine.gone.wait(), 5)


async def test_an_answer_that_the_engine_cuts_off_does_not_look_whole(gateway: Gateway) -> None:
    async with gateway.http.post(gateway.data + CHAT, json={}) as response:
        gateway.engine.pieces.put_nowait(b"data: one\n\n")
        await response.content.readany()
        gateway.engine.pieces.put_nowait(CUT_OFF)
        with pytest.raises((aiohttp.ClientPayloadError, ConnectionResetError)):
            await asyncio.wait_for(response.content.read(), 5)


async def test_unreachable_engine_is_reported(gateway: Gateway) -> None:
    await gateway.stop_engine.aclose()
    async with gateway.http.get(f"{gateway.data}/health") as response:
        assert response.status == 503
        assert "does not answer" in (await response.json())["error"]["message"]


async def test_answer_names_its_policy_version(gateway: Gateway) -> None:
    gateway.engine.pieces.put_nowait(None)
    async with gateway.http.post(gateway.data + CHAT, json={}) as response:
        assert response.headers["X-Policy-Version"] == "7"


async def test_calls_are_refused_until_the_served_policy_is_known(gateway: Gateway) -> None:
    """The gateway has just started."""
    async with AsyncExitStack() as stack:
        engine_url = f"http://127.0.0.1:{gateway.engine_port}"
        data, control = await serve(stack, TOKEN, None, engine_url, 0, 0)
        fresh = replace(gateway, data=f"http://127.0.0.1:{data}", control=f"http://127.0.0.1:{control}")
        for _, path in VLLM.routes.sampling:
            async with fresh.http.post(fresh.data + path, json={}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "5")
                assert (await response.json())["error"]["type"] == "server_not_ready"
        assert gateway.engine.asked == []
        assert await status(fresh, "GET", f"{fresh.data}/health") == 200
        assert await status(fresh, "POST", f"{fresh.data}/tokenize", json={}) == 200
        assert (await served(fresh))["version"] is None


@pytest.mark.parametrize("path", sorted(path for _, path in VLLM.routes.changes))
async def test_gateway_admits_no_call_from_a_pause_or_load_to_its_verification(gateway: Gateway, path: str) -> None:
    async with gateway.http.post(gateway.data + CHAT, json={}) as held:
        assert await status(gateway, "POST", gateway.control + path, headers=BEARER) == 200
        assert await status(gateway, "POST", f"{gateway.control}/resume", headers=BEARER) == 200
        assert await status(gateway, "POST", gateway.data + CHAT, json={}) == 503
        assert (await served(gateway))["calls"] == 1
        gateway.engine.pieces.put_nowait(b"held")
        gateway.engine.pieces.put_nowait(None)
        assert await held.read() == b"held"
    assert (await served(gateway))["calls"] == 0
    assert await open_for(gateway, 8) == 200
    gateway.engine.pieces.put_nowait(None)
    async with gateway.http.post(gateway.data + CHAT, json={}) as response:
        assert response.headers["X-Policy-Version"] == "8"


async def test_restarted_engine_gets_no_request_until_it_is_verified(gateway: Gateway) -> None:
    old = (await served(gateway))["engine"]
    await gateway.stop_engine.aclose()
    server, asked = await restart_engine(gateway.engine_port)
    # `async with` would wait, from Python 3.12 on, until the last client has hung up.
    with closing(server):
        assert await status(gateway, "POST", gateway.data + CHAT, json={}) == 503
        assert not asked.is_set()
        # The verification of the old process does not apply to the new one, and requests for the old one do not reach
        # it.
        assert await open_for(gateway, 7, old) == 412
        meant = {**BEARER, "X-Engine-Process": str(old)}
        assert await status(gateway, "POST", f"{gateway.control}/update_weight_version", headers=meant) == 412
        assert not asked.is_set()
        new = await served(gateway)
        assert new["engine"] != old
        assert new["version"] is None


async def test_calls_of_an_ended_engine_are_not_counted_for_the_next_one(gateway: Gateway) -> None:
    engine = serving_engine.Engine(f"http://127.0.0.1:{gateway.engine_port}")
    with closing(engine):
        await engine.find()
        with engine.call():  # its client reads slowly, so the end of the stream is noticed late
            assert engine.calls == 1
            engine.close()
            await engine.find()
            with engine.call():
                assert engine.calls == 1
            assert engine.calls == 0


@pytest.mark.parametrize("capture", ["Tokens", "TextOnly"])
async def test_runner_records_no_token_of_an_unverified_policy(capture: str) -> None:
    async with VllmStandIn() as engine, AsyncExitStack() as stack:
        ports = await serve(stack, TOKEN, None, engine.url, 0, 0)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        data, control = (f"http://127.0.0.1:{port}" for port in ports)
        gateway = Gateway(Engine(), data, control, http, stack, engine.port)
        model = InferenceClient(f"{data}/v1", "policy", headers={}, key_origin="nowhere", call_seconds=60)
        stack.push_async_callback(model.close)
        model.token_capture = capture
        messages: list[Message] = [{"role": "user", "content": "Hi."}]
        sampling = Sampling(max_tokens=4)
        request = ModelRequest(
            messages=messages, tools=[], sampling=sampling, seed=0, session="s", task="t", member=0, turn=0
        )

        async def ask(believed: int) -> ModelReply:
            return await model.complete(request, progress=Progress(), cache_salt=str(believed))

        with pytest.raises(ModelError) as raised:
            await ask(0)
        assert raised.value.reason == "NotReady"
        await open_for(gateway, 3)
        with pytest.raises(ModelError, match="serves policy version 3, expected 2") as raised:
            await ask(2)
        assert raised.value.reason == "OtherPolicy"
        assert (await ask(3)).usage.completion_tokens == 4


async def test_large_body_is_forwarded_in_both_directions(gateway: Gateway) -> None:
    body = os.urandom(20 << 20)
    assert await status(gateway, "POST", f"{gateway.data}/tokenize", data=io.BytesIO(body)) == 200
    assert gateway.engine.bodies == [body]


async def test_compressed_body_reaches_the_engine_whole(gateway: Gateway) -> None:
    body, headers = b'{"prompt": "' + b"x" * 50_000 + b'"}', {"Content-Encoding": "gzip"}
    async with gateway.http.post(f"{gateway.data}/tokenize", data=gzip.compress(body), headers=headers) as answer:
        assert answer.status == 200
    assert gateway.engine.bodies[-1] == body


async def test_a_policy_is_fetched_once_and_whole(gateway: Gateway, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "version.json").write_text('{"version": 3}')
    body = {"version": 3, "uri": source.as_uri()}

    async def fetch() -> dict[str, object]:
        async with gateway.http.post(f"{gateway.control}/policy/fetch", json=body, headers=BEARER) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, object] = await response.json()
            return answer

    answers = await asyncio.gather(*(fetch() for _ in range(3)))
    folder = tmp_path / "policies" / "3"
    assert answers == [{"version": 3, "path": str(folder)}] * 3
    assert (folder / "version.json").read_text() == '{"version": 3}'


async def test_two_policies_are_kept_and_older_ones_are_deleted(gateway: Gateway, tmp_path: Path) -> None:
    for version in (1, 2, 1, 3):  # 1 is asked for again, as when an update goes back
        source = tmp_path / f"source-{version}"
        source.mkdir(exist_ok=True)
        (source / "weights").write_text(str(version))
        body = {"version": version, "uri": source.as_uri()}
        assert await status(gateway, "POST", f"{gateway.control}/policy/fetch", json=body, headers=BEARER) == 200
    assert sorted(path.name for path in (tmp_path / "policies").iterdir()) == ["1", "3"]


@pytest.mark.parametrize(
    ("body", "expected", "words"),
    [
        ({"version": 1}, 400, "uri"),
        ({"version": 1, "uri": "file:///there/is/none"}, 502, "the folder does not exist"),
        ({"version": 1, "uri": "ftp://x"}, 502, "expected hf://, s3://"),
    ],
)
async def test_failed_fetch_is_reported(gateway: Gateway, body: dict[str, object], expected: int, words: str) -> None:
    async with gateway.http.post(f"{gateway.control}/policy/fetch", json=body, headers=BEARER) as response:
        assert response.status == expected
        assert words in await response.text()


async def test_process_serves_an_engine_on_its_loopback_until_stopped(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with VllmStandIn() as engine, aiohttp.ClientSession() as http:
        options = ["--port=0", "--control-port=0", f"--token-file={tmp_path / 'token'}", f"--engine-url={engine.url}"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent_runtime.serving.gateway", *options), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            words = (await process.stdout.readline()).decode().split()
            data, control = (f"http://127.0.0.1:{port}" for port in (words[3], words[5]))
            async with http.get(f"{control}/policy/served", headers=BEARER) as response:
                verified = {"engine": (await response.json())["engine"], "version": 0}
            async with http.post(f"{control}/policy/served", headers=BEARER, json=verified) as response:
                assert response.status == 200
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            async with http.post(f"{data}{CHAT}", json=body) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 4
            async with http.post(f"{control}/pause?mode=keep", headers=BEARER) as response:
                assert response.status == 200
            async with http.get(f"{control}/is_paused", headers=BEARER) as response:
                assert await response.json() == {"is_paused": True}
        finally:
            process.terminate()
            assert await process.wait() == 0


async def test_control_port_refuses_a_large_body(gateway: Gateway) -> None:
    too_large = io.BytesIO(b" " * (2**20 + 1))
    assert await status(gateway, "POST", f"{gateway.control}/policy/served", data=too_large, headers=BEARER) == 413
