"""Calls for started commands (command_stream.py)."""

from __future__ import annotations

import time
from typing import Any

from agent_runtime.executor.commands.processes import Process, signal_number
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.http.messages import Reply
from agent_runtime.executor.routes.calls import MAX_WAIT_SECONDS, Call
from agent_runtime.executor.sandbox import WorkspaceEntry
from agent_runtime.executor.timing import Notifier

# One reply of output; the cursor continues from there.
MAX_OUTPUT_BYTES = 1024 * 1024
MAX_TERMINAL_SIZE = 65535


async def show(call: Call) -> dict[str, Any]:
    return _process(call, call.seen()).status()


async def show_output(call: Call) -> Reply:
    query = call.query()
    stream = query.choice("stream", ("stdout", "stderr"), "stdout")
    cursor = query.whole("cursor", 0)
    limit = min(query.whole("limit", MAX_OUTPUT_BYTES), MAX_OUTPUT_BYTES)
    ends = time.monotonic() + query.seconds("waitSeconds", MAX_WAIT_SECONDS)
    query.done()
    process = _process(call, call.seen())
    output = process.output(stream)
    # The caller limits its wait, and that time runs on in a pause.
    with process.unpaused():
        while output.total <= cursor and not process.is_output_over(stream):
            left = ends - time.monotonic()
            if left <= 0:
                break
            await Notifier.wait(process.changed, seconds=left)
    if cursor > output.total:
        raise bad_request(f"query cursor: {cursor} is beyond the {output.total} bytes of {stream} so far")
    piece = output.read(cursor, limit)
    is_over = process.is_output_over(stream) and piece.next == output.total
    headers = {
        "Rollout-Output-Next": str(piece.next),
        "Rollout-Output-End": "true" if is_over else "false",
        "Rollout-Output-Lost": str(piece.lost),
    }
    return Reply(piece.data, content_type="application/octet-stream", headers=headers)


async def write_input(call: Call) -> dict[str, Any]:
    query = call.query()
    offset = query.whole("offset")
    end = query.choice("end", ("true", "false"), "false") == "true"
    query.done()
    process = _process(call, call.owned())
    with process.unpaused():
        await process.write_input(offset, call.body, end)
    return {"offset": offset + len(call.body)}


async def send_signal(call: Call) -> dict[str, Any]:
    fields = call.fields()
    name = fields.text("signal")
    number = signal_number(name)
    if number is None:
        raise fields.wrong("signal", "a signal's name without SIG, like TERM,")
    tree = fields.flag("tree", True)
    fields.done()
    entry = call.live()
    await _process(call, entry).signal(number, tree)
    return {}


async def resize(call: Call) -> dict[str, Any]:
    fields = call.fields()
    rows, columns = (fields.whole(name, least=1, most=MAX_TERMINAL_SIZE) for name in ("rows", "columns"))
    fields.done()
    _process(call, call.owned()).resize(rows, columns)
    return {}


def _process(call: Call, entry: WorkspaceEntry) -> Process:
    process = entry.processes.get(call.segments[3])
    if process is None:
        raise ApiError(
            "NotFound",
            f"process {call.segments[3]!r} does not exist in workspace {entry.id!r}; ended processes are forgotten "
            "when their turn is acknowledged",
        )
    return process
