"""The trainer's own channel, as in vLLM's NCCL backend (vLLM 0.26, vllm/distributed/weight_transfer/nccl_engine.py).

An engine is one member of the trainer's group. It connects to `master_address:master_port`, as to a TCPStore, and says
where it listens. The trainer sends tensors to that port over a connection of its own, as NCCL's rank 0 does. Each side
first sends one line of JSON. After it come plain bytes, as many as names, types and shapes require. The stand-in's
weights are one number, so every tensor consists of that number, 8 bytes little-endian, repeated.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
NUMBER_BYTES = 8
# Both ends are programs that run already; NCCL itself waits for minutes.
JOIN_SECONDS = 30


class TransferError(RuntimeError):
    """The trainer could not be reached, disconnected, or sent something other than it had announced."""


class Channel:
    """A connection from the trainer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self, dtype_names: list[str], shapes: list[list[int]]) -> int:
        """Receive the tensors of one update, all of one version; return that version. Raises TransferError."""
        sizes = [ITEM_BYTES[name] * math.prod(shape) for name, shape in zip(dtype_names, shapes, strict=True)]
        try:
            sent = await self._reader.readexactly(sum(sizes))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise TransferError(f"NCCL error: remote process exited or there was a network error: {error}") from error
        number = sent[:NUMBER_BYTES]
        if sent != number * (len(sent) // NUMBER_BYTES):
            raise TransferError("the tensors are not those of one version")
        return int.from_bytes(number, "little")

    def close(self) -> None:
        """Leave the trainer's group."""
        self._writer.close()


async def join(init_info: Mapping[str, Any], port: int) -> Channel:
    """Become a member of the trainer's group, listening on `port` (0: any). Raises TransferError."""
    incoming: asyncio.Queue[Channel] = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: incoming.put_nowait(Channel(r, w)), "0.0.0.0", port)
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            _, out = await asyncio.open_connection(init_info["master_address"], int(init_info["master_port"]))
            own = [out.get_extra_info("sockname")[0], server.sockets[0].getsockname()[1]]
            out.write(json.dumps({"rank": init_info.get("rank_offset"), "address": own}).encode() + b"\n")
            await out.drain()
            channel = await incoming.get()
            out.close()
            return channel
    except (OSError, TimeoutError) as error:
        where = f"{init_info['master_address']}:{init_info['master_port']}"
        raise TransferError(f"the trainer's group at {where} cannot be joined: {error!r}") from error
    finally:
        server.close()
