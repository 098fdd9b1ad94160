"""Replicas killed under load: every reply that a client has received completely is recorded, and no sample twice."""

import asyncio
import contextlib
import gzip
import json
import os
import random
import resource
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from agent_runtime.proxy.admin import traces_view
from agent_runtime.proxy.app import DESCRIPTORS
from agent_runtime.proxy.ownership import SessionStore
from agent_runtime.recording.store import Store
from tests.support.ports import free_port
from tests.support.proxy_replica import ADMIN_KEY

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@dataclass
class Replicas:
    """Proxy processes that share one store."""

    uri: str
    ports: list[int]
    lost_seconds: float = 1.5
    options: tuple[str, ...] = ()
    processes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, port: int) -> None:
        """Start one, and wait until it answers."""
        self.processes[port] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.proxy_replica",
            self.uri,
            str(port),
            str(self.lost_seconds),
            *self.options,
        )
        async with aiohttp.ClientSession() as client:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with client.get(f"http://127.0.0.1:{port}/health") as reply:
                        assert reply.status == 200
                        return
                await asyncio.sleep(0.05)

    async def kill(self, port: int) -> None:
        """SIGKILL."""
        process = self.processes.pop(port)
        process.kill()
        await process.wait()

    async def stop(self, port: int) -> None:
        """SIGTERM."""
        process = self.processes.pop(port)
        process.terminate()
        assert await process.wait() == 0

    def pause(self, port: int, how: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        os.kill(self.processes[port].pid, how)


@pytest.fixture
async def replicas(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Replicas]:
    """Three replicas."""
    options = getattr(request, "param", ())
    started = Replicas(str(tmp_path), [free_port() for _ in range(3)], options=options)
    try:
        await asyncio.gather(*(started.start(port) for port in started.ports))
        yield started
    finally:
        for port in list(started.processes):
            await started.kill(port)


async def test_process_raises_its_limit_of_descriptors(tmp_path: Path) -> None:
    replicas = Replicas(str(tmp_path), [free_port()])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        await replicas.start(replicas.ports[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        given, _ = resource.prlimit(replicas.processes[replicas.ports[0]].pid, resource.RLIMIT_NOFILE)
        assert given == min(hard, DESCRIPTORS), "with none left no model can be reached, and every client waits"
    finally:
        await replicas.kill(replicas.ports[0])


@dataclass
class Agent:
    """Talks to any replica, and sends a request again as the openai package does."""

    client: aiohttp.ClientSession
    replicas: Replicas
    base_path: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    retries: int = 0

    async def turn(self, text: str, *, stream: bool) -> None:
        """Ask a question; return the whole answer."""
        self.messages.append({"role": "user", "content": text})
        body = json.dumps({"model": "tiny", "messages": self.messages, "stream": stream})
        attempt = 0
        while True:
            port = random.choice(self.replicas.ports)
            try:
                self.messages.append(await self._ask(port, body, attempt, stream))
                return
            except (aiohttp.ClientError, ConnectionError):
                attempt += 1
                self.retries += 1
                await asyncio.sleep(0.1)

    async def _ask(self, port: int, body: str, attempt: int, stream: bool) -> dict[str, Any]:
        url = f"http://127.0.0.1:{port}{self.base_path}/chat/completions"
        headers = {"Content-Type": "application/json", "x-stainless-retry-count": str(attempt)}
        async with self.client.post(url, data=body, headers=headers) as reply:
            if reply.status >= 500:
                raise aiohttp.ClientError(await reply.text())
            assert reply.status == 200, await reply.text()
            if not stream:
                message: dict[str, Any] = (await reply.json())["choices"][0]["message"]
                return message
            text, done = "", False
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise aiohttp.ClientError(event["error"]["message"])
                    text += event["choices"][0]["delta"].get("content") or ""
                done = done or line.startswith(b"data: [DONE]")
            if not done:
                raise aiohttp.ClientError("the stream broke off")
            return {"role": "assistant", "content": text}


async def registered(client: aiohttp.ClientSession, replicas: Replicas, name: str) -> Agent:
    """An agent with a session of its own."""
    async with client.post(f"http://127.0.0.1:{replicas.ports[0]}/sessions/{name}", headers=ADMIN) as reply:
        assert reply.status == 201
        return Agent(client, replicas, (await reply.json())["base_path"])


async def metric(client: aiohttp.ClientSession, port: int, name: str) -> float:
    """A metric of a replica."""
    async with client.get(f"http://127.0.0.1:{port}/metrics") as reply:
        [line] = [line for line in (await reply.text()).splitlines() if line.startswith(name)]
        return float(line.split()[-1])


async def recorded(replicas: Replicas, name: str) -> list[str]:
    """Return the answers of a session that count."""
    store = SessionStore(Store.open(replicas.uri, {}))
    settings = await store.settings(name)
    assert settings is not None
    return [
        trace["response_message"]["content"] for trace in traces_view(settings, await store.folder(settings).records())
    ]


async def test_replicas_killed_under_load_lose_no_acknowledged_turn_and_double_none(replicas: Replicas) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        agents = {f"s{i}": await registered(client, replicas, f"s{i}") for i in range(9)}

        async def work(agent: Agent) -> None:
            for number in range(12):
                await agent.turn(f"question {number}", stream=bool(number % 2))

        working = [asyncio.ensure_future(work(agent)) for agent in agents.values()]
        for port in replicas.ports:
            await asyncio.sleep(0.4)
            await replicas.kill(port)
            await asyncio.sleep(0.2)
            await replicas.start(port)
        await asyncio.gather(*working)
    assert sum(agent.retries for agent in agents.values()) > 0
    for name, agent in agents.items():
        acknowledged = [message["content"] for message in agent.messages if message["role"] == "assistant"]
        assert await recorded(replicas, name) == acknowledged


async def test_hung_owner_is_replaced_and_can_acknowledge_nothing_afterwards(replicas: Replicas) -> None:
    owner, other, _ = replicas.ports
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        agent = await registered(client, replicas, "s")
        await agent.turn("first", stream=False)
        replicas.pause(owner, signal.SIGSTOP)
        replicas.ports = [other]
        await agent.turn("second", stream=False)
        replicas.pause(owner, signal.SIGCONT)
        replicas.ports = [owner]
        async with client.post(f"http://127.0.0.1:{owner}/sessions/s/complete", headers=ADMIN) as reply:
            assert reply.status == 503, "an end is the owner's to write"
        await agent.turn("third", stream=True)  # the older owner forwards now
    acknowledged = [message["content"] for message in agent.messages if message["role"] == "assistant"]
    assert await recorded(replicas, "s") == acknowledged


@pytest.mark.parametrize("status", [200, 404])
async def test_program_that_has_the_address_of_a_replica_gets_no_key_and_no_prompt(
    replicas: Replicas, status: int
) -> None:
    owner, other, third = replicas.ports
    got: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        got.append(f"{request.method} {request.path} {request.headers.get('Authorization')}")
        return web.json_response({"status": "ok"}, status=status)

    async with aiohttp.ClientSession() as client:
        agent = await registered(client, replicas, "s")
        replicas.ports = [other]  # which has seen who the owner is
        await agent.turn("first", stream=False)
        await replicas.kill(owner)
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        stranger = web.AppRunner(application)
        await stranger.setup()
        await web.TCPSite(stranger, "127.0.0.1", owner).start()
        await agent.turn("second", stream=True)
        await stranger.cleanup()
    assert set(got) == {"GET /health None"}
    assert len(await recorded(replicas, "s")) == 2
    await replicas.start(owner)
    replicas.ports = [owner, other, third]


async def test_any_replica_serves_a_session_until_it_ends_at_all_replicas(replicas: Replicas) -> None:
    async with aiohttp.ClientSession() as client:
        agent = await registered(client, replicas, "s")
        for number in range(6):
            await agent.turn(f"question {number}", stream=False)
        first, second, third = (f"http://127.0.0.1:{port}" for port in replicas.ports)
        async with client.get(f"{third}/sessions/s", headers=ADMIN) as reply:
            assert len((await reply.json())["turns"]) == 6
        async with client.post(f"{second}/sessions/s/complete", headers=ADMIN) as reply:
            assert (await reply.json())["completed"] is True
        for url in (first, second, third):
            async with client.post(f"{url}{agent.base_path}/chat/completions", json={}) as reply:
                assert reply.status == 409
                assert reply.headers["x-should-retry"] == "false"
        async with client.delete(f"{third}/sessions/s", headers=ADMIN) as reply:
            assert reply.status == 200
        for url in (first, second, third):
            async with client.post(f"{url}{agent.base_path}/chat/completions", json={}) as reply:
                assert reply.status == 401


async def test_session_registered_again_under_its_name_is_served_by_all_replicas(replicas: Replicas) -> None:
    async with aiohttp.ClientSession() as client:
        statuses = []
        for _ in range(2):
            agent = await registered(client, replicas, "s")
            for port in replicas.ports:
                url = f"http://127.0.0.1:{port}{agent.base_path}/chat/completions"
                body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]}
                async with client.post(url, json=body) as reply:
                    statuses.append(reply.status)
            async with client.delete(f"http://127.0.0.1:{replicas.ports[0]}/sessions/s", headers=ADMIN) as reply:
                assert reply.status == 200
    assert statuses == [200] * 6


async def test_session_registered_again_is_its_own_when_an_owner_hangs(replicas: Replicas) -> None:
    first, other, third = replicas.ports
    async with aiohttp.ClientSession() as client:
        old = await registered(client, replicas, "s")
        replicas.ports = [other]  # which learns who the owner is
        await old.turn("of the old session", stream=False)
        async with client.delete(f"http://127.0.0.1:{first}/sessions/s", headers=ADMIN) as reply:
            assert reply.status == 200
        replicas.ports = [third]
        second = await registered(client, replicas, "s")
        replicas.pause(first, signal.SIGSTOP)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "by the old key"}]}
        async with client.post(f"http://127.0.0.1:{other}{old.base_path}/chat/completions", json=body) as reply:
            assert reply.status == 401
        for port in (third, other, third):
            replicas.ports = [port]
            await second.turn(f"through {port}", stream=False)
        replicas.pause(first, signal.SIGCONT)
        acknowledged = [message["content"] for message in second.messages if message["role"] == "assistant"]
        assert await recorded(replicas, "s") == acknowledged

        replicas.pause(third, signal.SIGSTOP)  # it holds the second session, and misses its end
        async with client.delete(f"http://127.0.0.1:{other}/sessions/s", headers=ADMIN) as reply:
            assert reply.status == 200
        replicas.ports = [other]
        latest = await registered(client, replicas, "s")
        replicas.pause(third, signal.SIGCONT)
        async with client.post(f"http://127.0.0.1:{third}{second.base_path}/chat/completions", json=body):
            pass  # whatever it gets, it changes nothing of the latest
        for port in (third, other, third):
            replicas.ports = [port]
            await latest.turn(f"through {port}", stream=False)
    assert latest.retries == 0
    acknowledged = [message["content"] for message in latest.messages if message["role"] == "assistant"]
    assert await recorded(replicas, "s") == acknowledged
    replicas.ports = [first, other, third]


@pytest.mark.parametrize("replicas", [("keyless",)], indirect=True)
async def test_keyless_session_registered_again_is_its_own_when_an_owner_hangs(replicas: Replicas) -> None:
    first, other, third = replicas.ports
    async with aiohttp.ClientSession() as client:
        old, new = (Agent(client, replicas, "/sessions/s/v1") for _ in range(2))
        async with client.post(f"http://127.0.0.1:{first}/sessions/s") as reply:
            assert reply.status == 201
        replicas.ports = [other]  # which learns who the owner is
        await old.turn("of the old session", stream=False)
        replicas.pause(first, signal.SIGSTOP)
        async with client.delete(f"http://127.0.0.1:{third}/sessions/s") as reply:
            assert reply.status == 200
        async with client.post(f"http://127.0.0.1:{third}/sessions/s") as reply:
            assert reply.status == 201
        replicas.pause(first, signal.SIGCONT)
        for port in (first, other, third):
            replicas.ports = [port]
            await new.turn(f"through {port}", stream=False)
    acknowledged = [message["content"] for message in new.messages if message["role"] == "assistant"]
    assert await recorded(replicas, "s") == acknowledged
    replicas.ports = [first, other, third]


async def test_a_client_that_leaves_another_replica_stops_the_model_at_the_owner(replicas: Replicas) -> None:
    owner, other, _ = replicas.ports
    async with aiohttp.ClientSession() as client:
        agent = await registered(client, replicas, "s")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "wait"}]}
        url = f"http://127.0.0.1:{other}{agent.base_path}/chat/completions"
        asking = asyncio.ensure_future(client.post(url, json=body))
        # What is asked is recorded before the model is asked.
        while not list(Path(replicas.uri).rglob("*.zst")):  # noqa: ASYNC110 another process
            await asyncio.sleep(0.05)
        asking.cancel()
        async with asyncio.timeout(120):
            while await metric(client, owner, "session_proxy_cancelled_total") != 1:  # noqa: ASYNC110 another process
                await asyncio.sleep(0.05)


async def test_stopped_owner_releases_its_sessions_without_a_wait(replicas: Replicas) -> None:
    owner, other, third = replicas.ports
    await replicas.kill(other)
    replicas.lost_seconds = 3600
    await replicas.start(other)
    async with aiohttp.ClientSession() as client:
        agent = await registered(client, replicas, "s")
        replicas.ports = [other]  # which has seen who the owner is
        await agent.turn("first", stream=False)
        await replicas.stop(owner)
        await agent.turn("second", stream=True)
    assert agent.retries == 0
    assert len(await recorded(replicas, "s")) == 2
    replicas.ports = [owner, other, third]


async def test_path_of_a_forwarded_request_reaches_no_route_of_replicas(replicas: Replicas) -> None:
    owner, other, _ = replicas.ports
    async with aiohttp.ClientSession() as client:
        async with client.post(f"http://127.0.0.1:{owner}/sessions/one", headers=ADMIN) as reply:
            key = {"Authorization": f"Bearer {(await reply.json())['key']}"}
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        async with client.post(f"http://127.0.0.1:{owner}/v1/chat/completions", headers=key, json=asked) as reply:
            assert reply.status == 200
        for path in (
            "/v1/../sessions/one/turns/0",
            "/sessions/one/v1/../turns/0",
            "/v1/%2e%2e/sessions/one/turns/0",
            "/v1/%252e%252e/sessions/one/turns/0",
            "/v1/models%3F/../../sessions/one/turns/0",
        ):
            url = URL(f"http://127.0.0.1:{other}{path}", encoded=True)
            async with client.post(url, headers=key, json={"delivered": False}) as reply:
                assert reply.status == 404, f"a delivery report of the client itself was accepted at {path}"


async def test_compressed_request_is_answered_by_every_replica(replicas: Replicas) -> None:
    owner, other, _ = replicas.ports
    async with aiohttp.ClientSession() as client:
        async with client.post(f"http://127.0.0.1:{owner}/sessions/one", headers=ADMIN) as reply:
            headers = {"Authorization": f"Bearer {(await reply.json())['key']}", "Content-Encoding": "gzip"}
        body = gzip.compress(b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}')
        for port in (owner, other):
            async with client.post(f"http://127.0.0.1:{port}/v1/chat/completions", headers=headers, data=body) as reply:
                assert reply.status == 200, await reply.text()
                assert len(reply.headers.getall("X-Request-Id")) == 1
