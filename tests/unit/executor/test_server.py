"""Time limits of the executor for its clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_runtime.executor.http import server
from agent_runtime.executor.http.messages import Reply, Switched
from agent_runtime.executor.http.server import Request, Server


@pytest.mark.parametrize(("is_trusted", "reply"), [(True, b"HTTP/1.1 200 OK\r\n"), (False, b"")])
async def test_upload_waits_for_a_runner_that_waits_for_storage(
    is_trusted: bool, reply: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALL_SECONDS", 0.01)

    async def application(request: Request) -> Reply:
        if is_trusted:
            request.trust()
        return Reply(await request.read(10))

    served = Server(application)
    await served.listen(f"unix:{tmp_path}/socket")
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
    try:
        writer.write(b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(2.5)  # connections are looked at once a second
        writer.write(b"1\r\na\r\n0\r\n\r\n")
        assert await reader.readline() == reply, "the artifacts of a rollout count as a lost sandbox: reward 0"
    finally:
        writer.close()
        served.close()


async def test_server_that_closes_ends_connections_with_other_protocols_too(tmp_path: Path) -> None:
    """Commands that came over them later would fail because their workspaces are being destroyed, which hides that the
    executor was stopped, by an eviction or a drain.
    """

    async def application(request: Request) -> Switched:
        return Switched("test", asyncio.Protocol())

    served = Server(application)
    await served.listen(f"unix:{tmp_path}/socket")
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
    try:
        writer.write(b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: test\r\nContent-Length: 0\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 101 Switching Protocols\r\n"
        served.close()
        async with asyncio.timeout(10):
            await reader.read()
    finally:
        writer.close()
