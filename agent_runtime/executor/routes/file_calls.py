"""Calls that transfer files and archives. Bytes go through a pipe to or from a process inside the workspace; no path is
opened here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from agent_runtime.executor.commands.streams import PIPE_BYTES
from agent_runtime.executor.errors import translating
from agent_runtime.executor.http.fields import Query
from agent_runtime.executor.http.messages import Reply, StreamedReply
from agent_runtime.executor.http.server import Request
from agent_runtime.executor.overlay.workspace import Workspace
from agent_runtime.executor.routes.calls import Call
from agent_runtime.executor.timing import until_ready

# A longer body is sent in chunks; up to this many bytes, in one reply with Content-Length.
_WHOLE_BYTES = 64 * 1024
# A killed helper ends within a millisecond, or later on an overloaded machine.
KILL_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.002
_TAR = "application/x-tar"


# Reads an operation's arguments from the query.
_ReadQuery = Callable[[Query], dict[str, Any]]


def _arguments(call: Call, read_query: _ReadQuery) -> dict[str, Any]:
    query = call.query()
    arguments = read_query(query)
    query.done()
    return arguments


async def _operation(
    workspace: Workspace, operation: str, arguments: Mapping[str, Any], stream: int | None = None
) -> dict[str, Any]:
    with translating():
        return await workspace.file(operation, arguments, stream)


def _showing(operation: str, read_query: _ReadQuery) -> Callable[[Call], Awaitable[dict[str, Any]]]:
    """Return a handler that answers with an operation's result for a path."""

    async def show(call: Call) -> dict[str, Any]:
        arguments = _arguments(call, read_query)
        entry = call.seen()
        entry.require_working()
        return await _operation(entry.workspace, operation, arguments)

    return show


def _downloading(
    operation: str, content_type: str, read_query: _ReadQuery
) -> Callable[[Call], Awaitable[Reply | StreamedReply]]:
    """Return a handler that answers with the bytes that an operation writes."""

    async def download(call: Call) -> Reply | StreamedReply:
        arguments = _arguments(call, read_query)
        entry = call.seen()
        entry.require_working()
        source = _Download(entry.workspace, operation, arguments)
        is_handed_over = False
        try:
            parts, size = [], 0
            async for piece in source:
                parts.append(piece)
                size += len(piece)
                if size > _WHOLE_BYTES:
                    is_handed_over = True
                    source.put_back(parts)
                    return StreamedReply(source, content_type)
        finally:
            if not is_handed_over:
                await source.aclose()
        return Reply(b"".join(parts), content_type=content_type)

    return download


class _Download:
    """Output of an operation in pieces. Raises the operation's failure at its end."""

    def __init__(self, workspace: Workspace, operation: str, arguments: Mapping[str, Any]) -> None:
        self._descriptor, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._descriptor, False)
        self._put_back: list[bytes] = []
        self._is_closed = False
        self._task = asyncio.get_running_loop().create_task(_operation(workspace, operation, arguments, write_end))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    def put_back(self, pieces: list[bytes]) -> None:
        """Return these pieces again before further ones."""
        self._put_back = pieces

    async def __anext__(self) -> bytes:
        if self._put_back:
            return self._put_back.pop(0)
        while True:
            try:
                piece = os.read(self._descriptor, PIPE_BYTES)
            except BlockingIOError:
                await until_ready(self._descriptor)
                continue
            if piece:
                return piece
            await self._task
            raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the operation if it still runs."""
        if self._is_closed:
            return
        self._is_closed = True
        # The operation may be blocked in a write, which ends when its reader is closed.
        os.close(self._descriptor)
        await _ended(self._task)


def _uploading(
    operation: str, read_query: _ReadQuery, replied: Sequence[str] = ()
) -> Callable[[Call], Awaitable[dict[str, Any]]]:
    """Return a handler whose body an operation reads; the answer has these fields of its result."""

    async def upload(call: Call) -> dict[str, Any]:
        arguments = _arguments(call, read_query)
        entry = call.live()
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        work = loop.create_task(_operation(entry.workspace, operation, arguments, read_end))
        try:
            # Let the operation start first: only then may it close its own end of the pipe.
            await asyncio.sleep(0)
            await _pour(call.request, write_end)
        except BaseException:
            # End it before closing its pipe, so that it never mistakes an incomplete body for a complete one.
            await _ended(work)
            await _reader_gone(write_end)
            raise
        finally:
            os.close(write_end)
        reply = await work
        return {name: reply[name] for name in replied}

    return upload


async def _pour(request: Request, descriptor: int) -> None:
    async for chunk in request.chunks():
        data = memoryview(chunk)
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                await until_ready(descriptor, writable=True)
            except BrokenPipeError:
                # The operation ended before the body: its own failure has the reason.
                return


async def _reader_gone(descriptor: int) -> None:
    """Wait until no process has the pipe's reading end open, for at most KILL_SECONDS."""
    poll = select.poll()
    poll.register(descriptor, 0)
    for _ in range(int(KILL_SECONDS / _LOOK_AGAIN_SECONDS)):
        if poll.poll(0):
            return
        # The event loop cannot wait for this: it considers a writable pipe ready.
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def _ended(task: asyncio.Task[dict[str, Any]]) -> None:
    task.cancel()
    with contextlib.suppress(BaseException):
        await task


async def remove(call: Call) -> dict[str, Any]:
    arguments = _arguments(call, _path_and_owner)
    await _operation(call.live().workspace, "remove", arguments)
    return {}


def _path_and_owner(query: Query) -> dict[str, Any]:
    return {"path": query.text("path"), "owner": query.user("owner")}


show_stat, show_list = _showing("stat", _path_and_owner), _showing("list", lambda query: {"path": query.text("path")})
read = _downloading(
    "read",
    "application/octet-stream",
    lambda query: {
        "path": query.text("path"),
        "offset": query.whole("offset", 0),
        "limit": query.whole("limit", None),
        "owner": query.user("owner"),
    },
)
pack = _downloading("tar", _TAR, lambda query: {"path": query.text("path"), "parts": query.many("part")})
snapshot = _downloading("snapshot", _TAR, lambda query: {"paths": query.many("path")})
write = _uploading(
    "write",
    lambda query: {
        "path": query.text("path"),
        "mode": query.mode("mode"),
        "replace": query.choice("replace", ("true", "false"), "false") == "true",
        "owner": query.user("owner"),
    },
)
unpack = _uploading(
    "untar",
    lambda query: {
        "path": query.text("path"),
        "ancestors": query.choice("ancestors", ("refuse", "replace", "follow"), "refuse"),
        "owner": query.user("owner"),
    },
)
carry = _uploading("carry", lambda query: {"path": query.text("path")}, ("dropped", "more", "changes"))
restore = _uploading("restore", lambda query: {})
