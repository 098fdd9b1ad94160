"""Prints what the executor's HTTP side costs, beside a bare spawn in the same run.

`python -m tests.integration.executor.figures [Overlay|Plain]`
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tests.integration.executor.conftest import ExecutorProcess, open_client

COUNT = 1000
WARM_UP = 100


async def measure(what: str, call: Callable[[int], Awaitable[Any]]) -> None:
    for number in range(WARM_UP):
        await call(number)
    seconds = []
    cpu = time.process_time()
    for number in range(WARM_UP, WARM_UP + COUNT):
        begun = time.perf_counter()
        await call(number)
        seconds.append(time.perf_counter() - begun)
    cpu = (time.process_time() - cpu) / COUNT
    seconds.sort()
    p50, p99 = seconds[COUNT // 2] * 1e3, seconds[COUNT * 99 // 100] * 1e3
    print(f"{what:45} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  client CPU {cpu * 1e3:.2f} ms")


class RawClient:
    """HTTP by hand, so that what is seen is the server's share."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: str) -> None:
        self._reader, self._writer, self._headers = reader, writer, headers

    async def call(self, method: str, path: str, key: str, body: bytes = b"") -> bytes:
        named = f"Idempotency-Key: {key}\r\n" if key else ""
        head = f"{method} /v1{path} HTTP/1.1\r\n{self._headers}{named}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        reply = await self._reader.readuntil(b"\r\n\r\n")
        length = int(reply.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        assert reply.startswith(b"HTTP/1.1 200"), reply
        return await self._reader.readexactly(length)


async def main(mode: str) -> None:
    executor = ExecutorProcess(mode)
    print(
        f"{mode}: ready after {executor.seconds_to_ready * 1e3:.0f} ms, idle {executor.memory_kib() / 1024:.1f} MiB resident"
    )
    try:
        async with open_client(executor) as client:
            true = {"argv": ["true"], "waitSeconds": 30}
            reader, writer = await asyncio.open_unix_connection(executor.socket)
            headers = (
                f"Authorization: Bearer {client.token}\r\nRollout-Attempt: {client.attempt}\r\n"
                f"Rollout-Fence: {client.fence}\r\n"
            )
            raw = RawClient(reader, writer, headers)
            body = json.dumps(true).encode()
            start = f"/workspaces/{client.workspace}/processes"

            async def spawn(_: int) -> None:
                pipe = asyncio.subprocess.PIPE
                child = await asyncio.create_subprocess_exec("true", stdout=pipe, stderr=pipe)
                await child.communicate()

            async def by_hand(turn: int, number: int) -> None:
                await raw.call("POST", start, f"{turn}:{number}", body)

            async def by_aiohttp(turn: int, number: int) -> None:
                await client.run(["true"], f"{turn}:{number}")

            def executor_cpu() -> float:
                with open(f"/proc/{executor.process.pid}/stat", encoding="ascii") as stat:
                    fields = stat.read().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

            async def acknowledge(turn: int) -> None:
                await client.call("PUT", f"/attempts/{client.attempt}/watermark", json={"turn": turn})

            for turn in (1, 3):
                await measure("asyncio: spawn `true`, read its output", spawn)
                before = executor_cpu()
                await measure("executor: `true`, raw client", partial(by_hand, turn))
                spent = (executor_cpu() - before) / (COUNT + WARM_UP) * 1e3
                await acknowledge(turn + 1)
                await measure("executor: `true`, aiohttp client", partial(by_aiohttp, turn + 1))
                await acknowledge(turn + 2)
                await measure(
                    "executor: list workspaces, raw client", lambda _: raw.call("GET", "/workspaces", "", b"")
                )
                print(f"executor's own CPU: {spent:.2f} ms a `true`")
            writer.close()
    finally:
        executor.end()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["Overlay"]))
