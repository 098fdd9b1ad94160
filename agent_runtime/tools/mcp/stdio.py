"""MCP's stdio transport to a server in the workspace, with one connection for each call.

The official SDK's session uses two streams of messages, which are connected to input and output of a process at the
executor. A repeated call writes the same bytes at the same offsets with the same keys, and reads the answer from the
output again. So after a crash, the server does not get a request twice.

Protocol: https://modelcontextprotocol.io/specification (stdio: JSON-RPC 2.0 messages, one a line).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter

from agent_runtime.sandboxes.base import FileError, ProcessStatus
from agent_runtime.tools.base import ToolProcesses

WAIT_SECONDS = 20.0
"""Longest single wait for output; it is repeated."""
INPUT_SECONDS = 10.0
"""Time limit for a server to accept a message. The policy may have stopped the server, which must not count as a lost
sandbox.
"""
MESSAGE_BYTES = 8 << 20
"""Most bytes of one message; a server that sends more is disconnected."""

Received = SessionMessage | Exception


@asynccontextmanager
async def connect(
    processes: ToolProcesses, status: ProcessStatus, call: str
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]]:
    """Yield the streams of a session that continues at the process's `status`.

    `call` identifies the call in the attempt: the ids of its requests include it, and answers to other calls are
    skipped.
    """
    to_session, received = anyio.create_memory_object_stream[Received](0)
    sent, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_write(processes, status, call, from_session, to_session)),
        asyncio.create_task(_read(processes, status, call, to_session)),
    ]
    try:
        yield received, sent
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (to_session, received, sent, from_session):
            stream.close()
        for outcome in outcomes:
            # An error of the sandbox, which concerns the attempt and not this call.
            if isinstance(outcome, Exception) and not isinstance(outcome, anyio.BrokenResourceError):
                raise outcome


async def _write(
    processes: ToolProcesses,
    status: ProcessStatus,
    call: str,
    messages: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[Received],
) -> None:
    offset = status.input_bytes
    async for item in messages:
        message = item.message
        if isinstance(message, JSONRPCRequest):
            message = message.model_copy(update={"id": f"{call}/{message.id}"})
        data = message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        try:
            async with asyncio.timeout(INPUT_SECONDS):
                await processes.write_input(status.id, offset, data)
        except (FileError, TimeoutError):
            await to_session.aclose()  # no reader is left
            return
        offset += len(data)


async def _read(
    processes: ToolProcesses, status: ProcessStatus, call: str, to_session: MemoryObjectSendStream[Received]
) -> None:
    cursor, pending = status.output_bytes, b""
    async with to_session:
        while True:
            piece = await processes.read_output(status.id, cursor, wait_seconds=WAIT_SECONDS)
            cursor = piece.next
            *lines, pending = (pending + piece.data).split(b"\n")
            for line in lines:
                if line.strip() and (message := _message(line, call)) is not None:
                    await to_session.send(message)
            if piece.ended or len(pending) > MESSAGE_BYTES:
                return


def _message(line: bytes, call: str) -> Received | None:
    """Return a line in the session's format; None for the answer to another call."""
    try:
        message: JSONRPCMessage = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError as error:
        return error
    if isinstance(message, JSONRPCResponse | JSONRPCError):
        name, _, number = str(message.id).rpartition("/")
        if name != call or not number.isdecimal() or len(number) > 9:
            return None
        message = message.model_copy(update={"id": int(number)})
    return SessionMessage(message)
