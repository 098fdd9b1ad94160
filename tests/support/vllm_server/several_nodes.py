"""One server over several nodes, as `vllm serve --nnodes N --node-rank R --master-addr A [--headless]` has it (vLLM
0.26, vllm/config/parallel.py). The others connect to the first one, which answers when all are present. All of them end
together.
"""

from __future__ import annotations

import asyncio
import contextlib

# vLLM 0.26, vllm/config/parallel.py: ParallelConfig.master_port.
MASTER_PORT = 29501
TRY_AGAIN_SECONDS = 0.5


async def gather(nodes: int, port: int) -> asyncio.Event:
    """Run on the first node: return when all others are present. The event is set when one of them has ended."""
    lost, here = asyncio.Event(), asyncio.Semaphore(0)

    async def member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.release()
        await _until_it_ends(reader, writer)
        lost.set()

    await asyncio.start_server(member, "0.0.0.0", port)
    for _ in range(nodes - 1):
        await here.acquire()
    return lost


async def follow(address: str, port: int) -> None:
    """Run on another node: return when the first one has ended after it was reached."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(address, port)
        except OSError:
            await asyncio.sleep(TRY_AGAIN_SECONDS)
            continue
        await _until_it_ends(reader, writer)
        return


async def _until_it_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()
