"""A gateway's requests to its engine and to the trainer's hook: answers are complete, bounded, and never from another
address.
"""

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from agent_runtime.serving import json_calls
from agent_runtime.serving.forward import engine_session
from agent_runtime.serving.json_calls import CallFailed, HookRequest, ask_hook, weights_digest
from rollout_api.inference.vllm import VLLM

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Peer:
    """An engine or a trainer that answers what the test sets."""

    url: str
    http: aiohttp.ClientSession
    answer: Answer

    async def hook(self) -> dict[str, object]:
        asked = HookRequest(url=f"{self.url}/hook", question={"update": 1}, seconds=30)
        return await ask_hook(self.http, asked)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await found.answer(request)

    async def nothing(request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with engine_session() as http:
        found = Peer("http://{}:{}".format(*runner.addresses[0][:2]), http, nothing)
        yield found
    await runner.cleanup()


async def test_hook_answer_of_half_a_megabyte_arrives_whole(peer: Peer) -> None:
    answer = {"updates": [{"names": [f"model.layers.{number}.weight" for number in range(30_000)]}]}

    async def hook(request: web.Request) -> web.Response:
        assert await request.json() == {"update": 1}
        return web.json_response(answer)

    peer.answer = hook
    assert await peer.hook() == answer


async def test_hook_redirect_is_not_followed(peer: Peer) -> None:
    asked = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/metadata"})

    peer.answer = redirect
    with pytest.raises(CallFailed, match=r"weightTransfer.push.hook: POST .*/hook answered 307"):
        await peer.hook()
    assert asked == ["/hook"]


@pytest.mark.parametrize(
    ("body", "error"), [(b'{"updates": [', "malformed JSON"), (b"[]", "expected an object"), (b"", "malformed JSON")]
)
async def test_hook_answer_that_is_not_an_object_fails_the_call(peer: Peer, body: bytes, error: str) -> None:
    async def hook(request: web.Request) -> web.Response:
        return web.Response(body=body)

    peer.answer = hook
    with pytest.raises(CallFailed, match=error):
        await peer.hook()


async def test_hook_answer_without_end_is_read_to_a_bound(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_calls, "MOST_HOOK_ANSWER", 1 << 16)

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 4096)

    peer.answer = endless
    with pytest.raises(CallFailed, match="answered more than 65536 bytes"):
        await peer.hook()


async def test_weights_digest_is_equal_for_servers_that_list_tensors_in_another_order(peer: Peer) -> None:
    tensors = [f"model.layers.{number}.weight" for number in range(10_000)]
    digests = set()
    for seed in range(2):
        random.Random(seed).shuffle(tensors)
        body = json.dumps({"checksums": dict.fromkeys(tensors, "a" * 64)}).encode()

        async def checksums(request: web.Request, body: bytes = body) -> web.Response:
            return web.Response(body=body, content_type="application/json")

        peer.answer = checksums
        digests.add(await weights_digest(peer.http, peer.url, VLLM))
    assert len(digests) == 1


async def test_weights_digest_keeps_the_status_of_an_engine_without_checksums(peer: Peer) -> None:
    async def missing(request: web.Request) -> web.Response:
        return web.Response(status=404)

    peer.answer = missing
    with pytest.raises(CallFailed) as raised:
        await weights_digest(peer.http, peer.url, VLLM)
    assert raised.value.status == 404
