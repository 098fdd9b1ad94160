"""The network access of a workspace: what a phase allows, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.ports import free_ports

PLAIN_REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
# A client that knows how to use a proxy and no more; images have neither curl nor python for sure, bash's /dev/tcp is here.
FETCH = "exec 3<>/dev/tcp/127.0.0.1/3128; printf '{request}' >&3; cat <&3"


def fetch(*lines: str) -> list[str]:
    """Return a command that sends one request to the proxy and prints the reply."""
    return ["bash", "-c", FETCH.format(request="\\r\\n".join(lines) + "\\r\\n\\r\\n")]


@asynccontextmanager
async def listening(seen: list[bytes], port: int = 0) -> AsyncIterator[int]:
    """Serve on the machine's loopback: greet by HTTP, then echo."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the executor only checks whether it is reached
            writer.close()
            return
        seen.append(head)
        if head.startswith(b"ECHO"):
            while piece := await reader.read(100):
                writer.write(piece)
        else:
            writer.write(PLAIN_REPLY)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_without_network_there_is_no_proxy_and_no_variable(overlay: Any, connect: Any) -> None:
    async with connect(overlay) as client:
        assert (
            await client.out("env | grep -ci proxy; (exec 3<>/dev/tcp/127.0.0.1/3128) 2>/dev/null; echo $?") == "0\n1\n"
        )


async def test_a_listed_server_is_reached_by_plain_http_and_by_tunnel_and_others_are_not(
    overlay: Any, connect: Any
) -> None:
    seen: list[bytes] = []
    async with listening(seen) as port, connect(overlay, network=[f"localhost:{port}"]) as client:
        assert (await client.out("echo $http_proxy $HTTPS_PROXY")).split() == ["http://127.0.0.1:3128"] * 2
        plain = await client.out(
            fetch(f"GET http://localhost:{port}/file?x=1 HTTP/1.1", "Host: elsewhere", "Proxy-Authorization: secret")
        )
        assert plain.endswith("hello")
        assert seen[0].startswith(b"GET /file?x=1 HTTP/1.1\r\n")
        assert f"Host: localhost:{port}\r\n".encode() in seen[0]
        assert b"elsewhere" not in seen[0]
        assert b"secret" not in seen[0]
        tunnel = await client.out(fetch(f"CONNECT localhost:{port} HTTP/1.1", "", "GET / HTTP/1.1", "Host: x"))
        assert tunnel.startswith("HTTP/1.1 200 ")
        assert tunnel.endswith("hello")
        for target in (f"127.0.0.1:{port}", "localhost:1", "example.org:443"):
            refused = await client.out(fetch(f"CONNECT {target} HTTP/1.1"))
            assert refused.startswith("HTTP/1.1 403 ")
            assert "is not in this phase's list" in refused
        direct = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; echo $?"
        assert await client.out(direct) == "1\n"


async def test_public_reaches_no_private_address_in_any_notation(overlay: Any, connect: Any) -> None:
    seen: list[bytes] = []
    async with listening(seen) as port, connect(overlay, network="Public") as client:
        for host in (
            "127.0.0.1",
            "localhost",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "10.0.0.1",
            "169.254.169.254",
            "2130706433",
        ):
            refused = await client.out(fetch(f"CONNECT {host}:{port} HTTP/1.1"))
            assert refused.startswith("HTTP/1.1 403 "), (host, refused)
            # Metadata addresses are refused by a rule of their own, which says so.
            assert ("metadata address" if host == "169.254.169.254" else "Public") in refused
        assert seen == []


async def test_the_next_phase_ends_only_connections_that_it_does_not_allow(overlay: Any, connect: Any) -> None:
    seen: list[bytes] = []
    async with listening(seen) as one, listening(seen) as two:
        both = [f"localhost:{one}", f"localhost:{two}"]
        async with connect(overlay, network=both) as client:
            processes = []
            for port in (one, two):
                shell = fetch(f"CONNECT localhost:{port} HTTP/1.1", "", "ECHO / HTTP/1.1", "", "said")
                processes.append((await client.start(shell)).json["id"])
            for process in processes:
                await client.output_until(process, b"said")
            switched = await client.call("PUT", "~/network", json={"network": [f"localhost:{two}"]})
            assert switched.status == 200
            assert (await client.status(processes[0], wait=10))["state"] == "Exited"
            assert (await client.status(processes[1]))["state"] == "Running"
            assert (await client.call("PUT", "~/network", json={"network": "None"})).status == 200
            assert (await client.status(processes[1], wait=10))["state"] == "Exited"
            refused = await client.out(fetch(f"CONNECT localhost:{two} HTTP/1.1"))
            assert "the network of this phase is None" in refused
            assert await client.out("env | grep -ci proxy; true") == "0\n"


async def test_a_proxy_request_that_hides_a_second_one_is_not_passed_on(overlay: Any, connect: Any) -> None:
    seen: list[bytes] = []
    async with listening(seen) as port, connect(overlay, network=[f"localhost:{port}"]) as client:
        chunked = fetch(f"POST http://localhost:{port}/ HTTP/1.1", "Transfer-Encoding: chunked", "", "0")
        assert (await client.out(chunked)).startswith("HTTP/1.1 411 ")
        two = fetch(f"GET http://localhost:{port}/1 HTTP/1.1", "", "GET /2 HTTP/1.1", "Host: inner")
        await client.out(two)
        assert len(seen) == 1
        assert b"inner" not in seen[0]
        assert (await client.out(fetch("GET /origin-form HTTP/1.1"))).startswith("HTTP/1.1 400 ")


async def test_a_listed_server_that_was_away_is_asked_again(overlay: Any, connect: Any) -> None:
    async def failed(client: Any) -> dict[str, str | None]:
        found: dict[str, str | None] = (await client.call("GET", "~/network")).json["failed"]
        return found

    seen: list[bytes] = []
    away, other = free_ports(2)
    listed = [f"localhost:{away}", f"127.0.0.1:{other}"]
    async with listening(seen) as port, connect(overlay, network=[*listed, f"localhost:{port}"]) as client:
        for place in (*listed, f"localhost:{port}", "localhost:1"):
            await client.out(fetch(f"GET http://{place}/ HTTP/1.1"))
        found = await failed(client)
        assert set(found) == set(listed)
        assert "cannot be reached" in (found[listed[0]] or "")
        async with listening(seen, away):
            assert (await failed(client))[listed[0]] is None
            assert list(await failed(client)) == listed[1:]
        # A destination that was reached at last counts as reached.
        await client.out(fetch(f"GET http://localhost:{away}/ HTTP/1.1"))
        async with listening(seen, away):
            await client.out(fetch(f"GET http://localhost:{away}/ HTTP/1.1"))
        assert list(await failed(client)) == listed[1:]
        await client.call("PUT", "~/network", json={"network": listed})
        assert await failed(client) == {}


async def test_a_wrong_network_is_named(client: Any) -> None:
    for network in ("public", ["no-port"], ["a:0"], [1], {"x": 1}, ["a b:1"], ["a:99999"]):
        answer = await client.call("PUT", "~/network", json={"network": network})
        assert (answer.status, answer.code) == (400, "BadRequest"), network
        assert "body.network" in answer.message
