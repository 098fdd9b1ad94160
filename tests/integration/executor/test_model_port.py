"""The model port, from a program in a workspace to the runner and back, while connections and processes fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

PYTHON = "/usr/bin/python3"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
POST = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1] + "/v1/x?y=%20", data=sys.argv[2].encode(), timeout=30).read().decode())
"""


class Carrier:
    """A runner's connection to a model port, as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> tuple[bytes, dict[str, str], bytes]:
        """Return request line, headers and body of the next request."""
        async with asyncio.timeout(120):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return first.encode(), headers, body

    async def is_cut(self) -> bool:
        """Whether the executor closes it within the test's time limit."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(120):
                assert await self.reader.read() == b""
        return True

    def answer(self, reply: bytes = OK) -> None:
        self.writer.write(reply)
        self.writer.close()


async def attached(executor: Any, client: Any) -> Carrier | bytes:
    """Return a connection of this client, or the reply if it is refused."""
    reader, writer = await asyncio.open_unix_connection(executor.socket)
    lines = [
        f"POST /v1/workspaces/{client.workspace}/model HTTP/1.1",
        f"Authorization: Bearer {client.token}",
        f"Rollout-Attempt: {client.attempt}",
        f"Rollout-Fence: {client.fence}",
        "Connection: Upgrade",
        "Upgrade: rollout-model",
    ]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 101 "):
        return Carrier(reader, writer)
    writer.close()
    return head + await reader.read(10_000)


async def carrier(executor: Any, client: Any) -> Carrier:
    found = await attached(executor, client)
    assert isinstance(found, Carrier), found
    return found


async def opened(client: Any) -> str:
    """Open the model port; return its URL."""
    answer = await client.call("PUT", "~/model", json={}, keyed=False)
    assert answer.status == 200, answer.body
    return str(answer.json["url"])


async def state(client: Any) -> dict[str, Any]:
    port: dict[str, Any] = (await client.call("GET", "~")).json["modelPort"]
    return port


async def until(client: Any, **expected: int) -> None:
    """Wait until the port reports these numbers of waiting and forwarded requests."""
    async with asyncio.timeout(120):
        while True:
            if expected.items() <= (await state(client)).items():
                return
            await asyncio.sleep(0.01)


def post(body: bytes = b"{}", *headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: model", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@contextlib.asynccontextmanager
async def program(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect as a program in the workspace does. In Plain, the workspace's loopback is the test's own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(120):
        return await reader.read()


@pytest.fixture(scope="module")
def plain(executor_process: Any) -> Iterator[Any]:
    """An executor in Plain, whose model port the test itself can reach with any bytes."""
    process = executor_process("Plain")
    yield process
    log = process.log.read_text()
    process.end()
    assert '"event": "defect"' not in log, log


@pytest.fixture
async def agent(plain: Any, connect: Any) -> AsyncIterator[Any]:
    """An attempt with a workspace in Plain."""
    async with connect(plain) as client:
        yield client


async def test_a_program_without_network_reaches_the_runner_that_serves_it(client: Any, executor: Any) -> None:
    url = await opened(client)
    runner = await carrier(executor, client)
    process = (await client.start([PYTHON, "-c", POST, url, "a question"])).json["id"]
    line, headers, body = await runner.request()
    assert (line, body) == (b"POST /v1/x?y=%20 HTTP/1.1", b"a question")
    assert headers["content-type"] == "application/x-www-form-urlencoded"
    runner.answer()
    ended = await client.status(process, wait=20)
    assert (ended["exitCode"], ended["stdout"]["head"]["data"]) == (0, "hello\n")


async def test_model_port_exists_only_from_the_runners_request_to_the_phases_end(client: Any, executor: Any) -> None:
    assert await state(client) is None
    refused = await attached(executor, client)
    assert isinstance(refused, bytes)
    assert refused.startswith(b"HTTP/1.1 409 ")
    url = await opened(client)
    assert await opened(client) == url
    connects = f"(exec 3<>/dev/tcp/127.0.0.1/{url.rpartition(':')[2]}) 2>/dev/null; echo $?"
    assert await client.out(["bash", "-c", connects]) == "0\n"
    runner = await carrier(executor, client)
    assert (await client.call("PUT", "~/network", json={"network": "None"})).status == 200
    assert await runner.is_cut()
    assert await client.out(["bash", "-c", connects]) == "1\n"
    assert await state(client) is None


async def test_another_workspace_cannot_reach_the_model_port(overlay: Any, connect: Any) -> None:
    async with connect(overlay) as client, connect(overlay) as other:
        port = (await opened(client)).rpartition(":")[2]
        connects = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; echo $?"
        assert await client.out(["bash", "-c", connects]) == "0\n"
        assert await other.out(["bash", "-c", connects]) == "1\n"


async def test_runner_is_released_when_its_workspace_is_frozen_or_deleted(overlay: Any, connect: Any) -> None:
    async with connect(overlay) as client:
        await opened(client)
        runner = await carrier(overlay, client)
        assert (await client.call("POST", "~/freeze", json={})).status == 200
        assert await runner.is_cut()
        refused = await client.call("PUT", "~/model", json={}, keyed=False)
        assert (refused.status, refused.code) == (409, "Conflict")
    async with connect(overlay) as client:
        await opened(client)
        runner = await carrier(overlay, client)
        assert (await client.call("DELETE", "~")).status == 200
        assert await runner.is_cut()


async def test_parts_of_an_answer_arrive_as_the_model_sends_them(agent: Any, plain: Any) -> None:
    runner = await carrier(plain, agent) if await opened(agent) else None
    assert runner is not None
    async with program((await state(agent))["url"]) as (reader, writer):
        writer.write(post())
        await runner.request()
        runner.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for word in (b"one", b"two"):
            runner.writer.write(b"3\r\n" + word + b"\r\n")
            async with asyncio.timeout(120):
                await reader.readuntil(word)
        runner.answer(b"0\r\n\r\n")
        assert await rest(reader) == b"\r\n0\r\n\r\n"


async def test_each_of_many_concurrent_requests_gets_its_own_answer(agent: Any, plain: Any) -> None:
    url = await opened(agent)

    async def ask(number: int) -> bytes:
        async with program(url) as (reader, writer):
            writer.write(post(b"%d" % number))
            return await rest(reader)

    async def serve() -> None:
        runner = await carrier(plain, agent)
        _, _, body = await runner.request()
        await asyncio.sleep(0.001 * (int(body) % 7))
        runner.answer(b"HTTP/1.1 200 OK\r\n\r\nanswer to " + body)

    answers, _ = await asyncio.gather(
        asyncio.gather(*map(ask, range(60))), asyncio.gather(*(serve() for _ in range(60)))
    )
    assert [answer.rpartition(b"\n")[2] for answer in answers] == [b"answer to %d" % n for n in range(60)]


async def test_request_of_a_disconnected_program_is_withdrawn_from_the_runner(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    for has_begun in (False, True):
        runner = await carrier(plain, agent)
        async with program(url) as (reader, writer):
            writer.write(post())
            await runner.request()
            if has_begun:
                runner.writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst words")
                await reader.readuntil(b"words")
        assert await runner.is_cut()
    async with program(url) as (_, writer):
        writer.write(post())
        await until(agent, waiting=1)
    await until(agent, waiting=0, answering=0)


async def test_request_waits_for_a_runner_and_is_sent_again_before_an_answer(agent: Any, plain: Any) -> None:
    body = os.urandom(200_000)
    async with program(await opened(agent)) as (reader, writer):
        writer.write(post(body))
        await until(agent, waiting=1)
        seen = []
        for _ in range(3):
            runner = await carrier(plain, agent)
            seen.append(await runner.request())
            runner.writer.transport.abort()
            await until(agent, waiting=1)
        runner = await carrier(plain, agent)
        seen.append(await runner.request())
        runner.answer()
        assert (await rest(reader)).endswith(b"hello")
    assert seen == [seen[0]] * 4
    assert seen[0][2] == body
    assert seen[0][1]["idempotency-key"]


async def test_interrupted_answer_never_looks_complete_and_the_retry_is_answered(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    async with program(url) as (reader, writer):
        writer.write(post(b"{}", "Idempotency-Key: mine"))
        runner = await carrier(plain, agent)
        await runner.request()
        runner.writer.write(OK[:-2])
        await reader.readuntil(b"hel")
        runner.writer.transport.abort()
        assert await rest(reader) == b""
    async with program(url) as (reader, writer):
        writer.write(post(b"{}", "Idempotency-Key: mine"))
        runner = await carrier(plain, agent)
        assert (await runner.request())[1]["idempotency-key"] == "mine"
        runner.answer()
        assert await rest(reader) == OK


async def test_next_runner_gets_requests_that_the_old_one_had_not_begun(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    old, idle, late = [await carrier(plain, agent) for _ in range(3)]
    async with program(url) as (begun, begin), program(url) as (reader, writer):
        begin.write(post(b"begun"))
        await until(agent, answering=1)
        writer.write(post(b"held"))
        await until(agent, answering=2)
        asked = {asyncio.create_task(runner.request()): runner for runner in (old, idle, late)}
        while len(carried := {task.result()[2]: asked[task] for task in asked if task.done()}) < 2:
            await asyncio.wait([task for task in asked if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        carried[b"begun"].writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst words")
        await begun.readuntil(b"words")
        new = agent.held_by("2:new")
        assert (await new.raise_fence()).status == 200
        for runner in (old, idle, late):
            assert await runner.is_cut()
        refused = await attached(plain, agent)
        assert isinstance(refused, bytes)
        assert b'"Fenced"' in refused
        assert (await agent.call("PUT", "~/model", json={}, keyed=False)).code == "Fenced"
        assert await rest(begun) == b""
        assert await opened(new) == url
        runner = await carrier(plain, new)
        assert (await runner.request())[2] == b"held"
        runner.answer()
        assert (await rest(reader)).endswith(b"hello")


async def test_request_that_ends_several_runners_is_dropped(agent: Any, plain: Any) -> None:
    async with program(await opened(agent)) as (reader, writer):
        writer.write(post())
        for _ in range(5):
            runner = await carrier(plain, agent)
            await runner.request()
            runner.writer.transport.abort()
        assert await rest(reader) == b""
    await until(agent, waiting=0, answering=0)


async def test_ambiguous_requests_never_reach_the_runner(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    runner = await carrier(plain, agent)
    for request in (
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nA: b\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"CONNECT elsewhere:80 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    ):
        async with program(url) as (reader, writer):
            writer.write(request)
            assert (await rest(reader)).startswith(b"HTTP/1.1 400 "), request
    async with program(url) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nLong: " + b"x" * 40_000)
        assert (await rest(reader)).startswith(b"HTTP/1.1 413 ")
    async with program(url) as (reader, writer):
        chunked = b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: x-secret\r\nTE: trailers\r\n\r\n"
        writer.write(chunked + b"2\r\nhi\r\n0\r\nTrailer: t\r\n\r\n" + b"GET /smuggled HTTP/1.1\r\n\r\n")
        line, headers, body = await runner.request()
        assert (line, body) == (b"POST /1 HTTP/1.1", b"hi")
        assert headers.keys() == {"idempotency-key", "content-length", "connection"}
        runner.answer()
        assert (await rest(reader)).endswith(b"hello")
        assert await runner.reader.read() == b""
    assert (await state(agent))["waiting"] == 0


async def test_a_flood_of_requests_fills_only_its_own_workspaces_places(agent: Any, plain: Any, client: Any) -> None:
    url = await opened(agent)
    before = plain.memory_kib()
    async with contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(program(url)) for _ in range(300)]
        for number, (_, writer) in enumerate(slow):
            # An incomplete head, a body that is never sent, and endless garbage.
            writer.write(
                (b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"x" * 30_000)[number % 3]
            )
        reader, writer = await stack.enter_async_context(program(url))
        writer.write(post())
        runner = await carrier(plain, agent)
        await runner.request()
        runner.answer()
        assert (await rest(reader)).endswith(b"hello")
        assert (await agent.run(["true"]))["exitCode"] == 0
        assert (await client.run(["true"]))["exitCode"] == 0
    print(f"{plain.memory_kib() - before} KiB more")
    assert plain.memory_kib() - before < 64 * 1024


async def test_large_requests_lie_on_disk_and_are_refused_over_their_bounds(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    before = plain.memory_kib()
    large = b"x" * 20_000_000
    async with program(url) as (one, first), program(url) as (two, second), program(url) as (three, third):
        for writer in (first, second, third):
            writer.write(post(large))
            await writer.drain()
        await until(agent, waiting=3)
        assert plain.memory_kib() - before < 16 * 1024
        async with program(url) as (reader, writer):
            writer.write(post(large))
            assert (await rest(reader)).startswith(b"HTTP/1.1 503 ")
        async with program(url) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: 40000000\r\n\r\n")
            assert (await rest(reader)).startswith(b"HTTP/1.1 413 ")
        async with program(url) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1312D00\r\n" + large)
            assert (await rest(reader)).startswith(b"HTTP/1.1 503 ")
        for reader in (one, two, three):
            runner = await carrier(plain, agent)
            assert (await runner.request())[2] == large
            runner.answer()
            assert (await rest(reader)).endswith(b"hello")
    async with program(url) as (reader, writer):
        writer.write(post(large))
        runner = await carrier(plain, agent)
        await runner.request()
        runner.answer()
        assert (await rest(reader)).endswith(b"hello")


async def test_unread_answer_waits_with_the_runner_and_not_in_the_executor(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    runner = await carrier(plain, agent)
    async with program(url) as (reader, writer):
        writer.write(post())
        await runner.request()
        before = plain.memory_kib()
        runner.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while True:
                    runner.writer.write(b"x" * 1_000_000)
                    sent += 1_000_000
                    await runner.writer.drain()
        assert sent < 32_000_000
        assert plain.memory_kib() - before < 16 * 1024
        runner.writer.close()
        received = 0
        async with asyncio.timeout(120):
            while piece := await reader.read(1_000_000):
                received += len(piece)
        assert received > sent


async def test_runner_that_takes_no_request_delays_no_other(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    deaf = await carrier(plain, agent)
    async with program(url) as (_, large), program(url) as (reader, writer):
        large.write(post(b"x" * 20_000_000))
        await until(agent, answering=1)
        writer.write(post(b"small"))
        runner = await carrier(plain, agent)
        assert (await runner.request())[2] == b"small"
        runner.answer()
        assert (await rest(reader)).endswith(b"hello")
        assert (await agent.run(["true"]))["exitCode"] == 0
    assert b"POST" in await deaf.reader.readuntil(b"\r\n")


async def test_early_answers_are_accepted_and_unsolicited_ones_end_the_connection(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    unasked = await carrier(plain, agent)
    unasked.writer.write(OK)
    assert await unasked.is_cut()
    runner = await carrier(plain, agent)
    async with program(url) as (reader, writer):
        writer.write(post(b"x" * 20_000_000))
        await until(agent, answering=1)
        runner.writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(120):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")


async def test_broken_model_calls_leave_no_descriptor_behind(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    folder = f"/proc/{plain.process.pid}/fd"
    counts: list[int] = []
    for _ in range(4):
        for has_runner in (True, False):
            runner = await carrier(plain, agent) if has_runner else None
            async with program(url) as (_, writer):
                writer.write(post(b"x" * 100_000))
                await until(agent, **({"answering": 1} if has_runner else {"waiting": 1}))
            await until(agent, waiting=0, answering=0)
            if runner is not None:
                assert b"POST" in await runner.reader.readuntil(b"\r\n")
                runner.writer.close()
            async with program(url) as (_, writer):
                writer.write(post(b"x" * 100_000)[:-1])
                await asyncio.sleep(0.02)
        deadline = time.monotonic() + 60
        while len(os.listdir(folder)) > (counts[0] if counts else 0) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            if not counts:
                break
        counts.append(len(os.listdir(folder)))
    assert counts[-1] <= counts[0]


async def test_model_port_survives_random_failures_without_loss_or_leak(agent: Any, plain: Any) -> None:
    url = await opened(agent)
    chance = random.Random(5)

    async def ask(number: int) -> bytes | None:
        async with program(url) as (reader, writer):
            request = post(b"%d" % number + b" " * chance.choice([0, 100_000]))
            patience = chance.choice([0.0, 0.001, 0.01, 0.05, 20, 20])
            writer.write(request[: len(request) - (patience < 20 and chance.random() < 0.2)])
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(patience):
                    return (await reader.read(-1 if patience == 20 else 1)).strip().rpartition(b"\n")[2]
        return None

    async def serve() -> None:
        while True:
            runner = await carrier(plain, agent)
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(0.3):
                    _, _, body = await runner.request()
                    if chance.random() < 0.9:
                        await asyncio.sleep(chance.choice([0, 0.003]))
                        runner.answer(b"HTTP/1.1 200 OK\r\n\r\nanswer to " + body.strip())
                        continue
            runner.writer.transport.abort()

    serving = [asyncio.create_task(serve()) for _ in range(8)]
    complete = await asyncio.gather(*map(ask, range(100)))
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    whole = {number: answer for number, answer in enumerate(complete) if answer and len(answer) > 1}
    assert len(whole) > 5
    assert all(answer == b"answer to %d" % number for number, answer in whole.items())
    await until(agent, waiting=0, answering=0)
    async with program(url) as (reader, writer):
        writer.write(post(b"x" * 30_000_000))
        runner = await carrier(plain, agent)
        assert len((await runner.request())[2]) == 30_000_000
        runner.answer()
        assert (await rest(reader)).endswith(b"hello")


async def test_refusal_has_the_format_of_model_apis(agent: Any) -> None:
    async with program(await opened(agent)) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n")
        error = json.loads((await rest(reader)).partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "BadRequest"
    assert "Content-Length" in error["message"]
