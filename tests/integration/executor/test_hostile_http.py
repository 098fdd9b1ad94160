"""Broken, slow and hostile HTTP gets a clear refusal, and no other client is affected."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest


def refusal(reply: bytes) -> tuple[int, str]:
    """Return status and code of a raw reply."""
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "header", ["", "Authorization: Bearer wrong\r\n", "Authorization: Basic abc\r\n", "Authorization: Bearer \r\n"]
)
async def test_request_without_the_token_gets_no_information_and_no_effect(raw: Any, header: str) -> None:
    for line in ("GET /v1/health", "POST /v1/workspaces", "GET /v1/nothing", "DELETE /v1/attempts/a"):
        reply = await raw(f"{line} HTTP/1.1\r\n{header}Connection: close\r\n\r\n".encode())
        assert refusal(reply) == (401, "Unauthorized")


async def test_a_probe_needs_no_token(raw: Any) -> None:
    reply = await raw(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET\r\n\r\n", (400, "BadRequest")),
        (b"GET / HTTP/2.0\r\n\r\n", (400, "BadRequest")),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", (400, "BadRequest")),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", (400, "BadRequest")),
        (b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", (400, "BadRequest")),
        (b"GET / HTTP/1.1\r\nName : space\r\n\r\n", (400, "BadRequest")),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", (400, "BadRequest")),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", (400, "BadRequest")),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", (400, "BadRequest")),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", (400, "BadRequest")),
        (b"GET / HTTP/1.1\r\nLong: " + b"x" * 40_000, (413, "TooLarge")),
    ],
)
async def test_a_malformed_request_is_refused_in_json_and_its_connection_closed(
    raw: Any, request_bytes: bytes, expected: tuple[int, str]
) -> None:
    assert refusal(await raw(request_bytes)) == expected


def head(client: Any, line: str, *more: str) -> bytes:
    lines = [
        f"{line} HTTP/1.1",
        f"Authorization: Bearer {client.token}",
        f"Rollout-Attempt: {client.attempt}",
        f"Rollout-Fence: {client.fence}",
        f"Idempotency-Key: {client.new_key()}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def test_chunked_body_is_complete_with_any_chunks(client: Any, raw: Any) -> None:
    line = f"PUT /v1/workspaces/{client.workspace}/files?path={client.folder}/f"
    start = head(client, line, "Transfer-Encoding: chunked", "Connection: close")
    body = b"5;ext=1\r\nhello\r\n1\r\n \r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
    reply = await raw(start, *(body[n : n + 1] for n in range(len(body))), pause=0.001)
    assert reply.startswith(b"HTTP/1.1 200 OK")
    assert (await client.call("GET", "~/files?path=@/f")).body == b"hello 0123456789"


@pytest.mark.parametrize("body", [b"zz\r\nhello\r\n0\r\n\r\n", b"3\r\nhello\r\n0\r\n\r\n", b"f" * 300, b"-1\r\n\r\n"])
async def test_a_broken_chunked_body_is_refused_and_changes_nothing(client: Any, raw: Any, body: bytes) -> None:
    line = f"PUT /v1/workspaces/{client.workspace}/files?path={client.folder}/f"
    assert refusal(await raw(head(client, line, "Transfer-Encoding: chunked"), body)) == (400, "BadRequest")
    assert (await client.call("GET", "~/stat?path=@/f")).code == "NotFound"


async def test_client_gets_100_continue_only_when_its_body_is_wanted(client: Any, raw: Any) -> None:
    path = f"files?path={client.folder}/f"
    wanted = head(client, f"PUT /v1/workspaces/{client.workspace}/{path}", "Content-Length: 2", "Expect: 100-continue")
    reply = await raw(wanted.replace(b"Expect", b"Connection: close\r\nExpect"), b"ok", pause=0.2)
    assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    unwanted = head(client, f"PUT /v1/workspaces/none/{path}", "Content-Length: 2", "Expect: 100-continue")
    assert refusal(await raw(unwanted)) == (404, "NotFound")


async def test_json_over_its_bound_is_refused_without_being_read(client: Any) -> None:
    answer = await client.call("POST", "/workspaces", data=b" " * (1024 * 1024 + 1))
    assert (answer.status, answer.code) == (413, "TooLarge")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"not json", "body"),
        (b"[]", "body"),
        (b'{"id": "a b"}', "body.id"),
        (b'{"id": "a", "parents": "b"}', "body.parents"),
        (b'{"id": "a", "limits": {"processes": "1"}}', "body.limits.processes"),
        (b'{"id": "a", "env": {"A=B": "c"}}', "body.env"),
    ],
)
async def test_a_wrong_field_is_named(client: Any, body: bytes, named: str) -> None:
    answer = await client.call("POST", "/workspaces", data=body)
    assert (answer.status, answer.code) == (400, "BadRequest")
    assert named in answer.message


async def test_idle_connections_of_other_clients_do_not_block_the_runner(client: Any, executor: Any) -> None:
    strangers = []
    for _ in range(1100):
        _, writer = await asyncio.open_unix_connection(executor.socket)
        writer.write(b"GET /v1/he")
        strangers.append(writer)
    assert (await client.run(["true"]))["exitCode"] == 0
    for writer in strangers:
        writer.transport.abort()


async def test_unread_reply_does_not_stop_the_others(client: Any, executor: Any) -> None:
    await client.run("head -c 50000000 /dev/zero > big")
    readers = []
    for _ in range(5):
        _, writer = await asyncio.open_unix_connection(executor.socket)
        writer.write(head(client, f"GET /v1/workspaces/{client.workspace}/files?path={client.folder}/big").replace(
            b"Idempotency-Key", b"Ignored"
        ))  # fmt: skip
        readers.append(writer)
    await asyncio.sleep(0.3)
    assert (await client.run(["true"]))["exitCode"] == 0
    for writer in readers:
        writer.transport.abort()
    await asyncio.sleep(0.3)
    assert (await client.out("ls")) == "big\n"


async def test_broken_and_finished_calls_leave_no_descriptor_behind(client: Any, executor: Any) -> None:
    folder = f"/proc/{executor.process.pid}/fd"
    # Those of pooled connections come and go with the client's own; a leak grows with every round.
    counts: list[int] = []
    for turn in range(4):
        client.turn = turn
        for _ in range(10):
            await client.run("echo x; exit 1", stdin={"encoding": "utf-8", "data": "y"})
            await client.start(["no-such-program"], stdin="Open")
            await client.run("echo terminal", tty={"rows": 1, "columns": 1})
            await client.call("GET", "~/files?path=@/none")
            await client.call("PUT", "~/files?path=@/.made/below-a-file", data=b"x")
            broken = head(
                client, f"PUT /v1/workspaces/{client.workspace}/files?path={client.folder}/f", "Content-Length: 9"
            )
            _, writer = await asyncio.open_unix_connection(executor.socket)
            writer.write(broken + b"half")
            await writer.drain()
            writer.transport.abort()
        await client.call("PUT", f"/attempts/{client.attempt}/watermark", json={"turn": turn + 1})
        await asyncio.sleep(0.3)
        if counts:
            async with asyncio.timeout(60):
                while len(os.listdir(folder)) > counts[0] + 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        counts.append(len(os.listdir(folder)))
