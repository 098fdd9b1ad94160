"""The calls that start commands, wait for them, and talk with them."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent_runtime.executor.attempts import Result
from agent_runtime.executor.bell import Bell
from agent_runtime.executor.calls import MAX_INPUT_BYTES, MAX_WAIT_SECONDS, Call
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.fields import Fields, decoded
from agent_runtime.executor.messages import Reply, json_reply
from agent_runtime.executor.output import Caps
from agent_runtime.executor.processes import Order, Process, signal_number
from agent_runtime.executor.sandbox import Hosted

# What one status object carries at most of one end of one stream.
MAX_CAP_BYTES = 1024 * 1024
MAX_SPILL_BYTES = 1024**4
# One reply of output; the cursor goes on from there.
MAX_OUTPUT_BYTES = 1024 * 1024
MAX_TERMINAL_SIZE = 65535


def start(call: Call, settled: Callable[[], None]) -> Process:
    """POST /workspaces/{w}/processes"""
    call.no_query()
    order = read_order(call.fields())
    assert call.key is not None
    return call.sandbox.start(call.segments[1], call.attempt, call.key, order, settled)


def read_order(fields: Fields) -> Order:
    """The order of a start's body. Raises BadRequest, TooLarge."""
    argv = fields.texts("argv", None, least=1)
    shell = fields.text("shell", None)
    if (argv is None) == (shell is None):
        raise bad_request('body: either "argv" or "shell" expected')
    if argv is not None and not argv[0]:
        raise bad_request("body.argv: its first item names the program, and is empty")
    caps = fields.object("output")
    standard = Caps()
    order = Order(
        command=shell if argv is None else argv,
        cwd=fields.text("cwd", None, pattern=r"[^\0]+", expected="a path"),
        env=fields.environment("env"),
        user=fields.text("user", None, pattern=r"[^\0]+", expected="a name, a uid or uid:gid"),
        stdin=_stdin(fields),
        tty=_size(fields.object("tty")) if fields.raw("tty", None) is not None else None,
        deadline_seconds=fields.number("deadlineSeconds", None),
        caps=Caps(
            head=caps.whole("headBytes", standard.head, most=MAX_CAP_BYTES),
            tail=caps.whole("tailBytes", standard.tail, most=MAX_CAP_BYTES),
            spill=caps.whole("spillBytes", standard.spill, most=MAX_SPILL_BYTES),
        ),
        wait_seconds=fields.number("waitSeconds", 0, most=MAX_WAIT_SECONDS),
    )
    caps.done()
    fields.done()
    return order


async def show(call: Call) -> Reply:
    """GET /workspaces/{w}/processes/{p}"""
    query = call.query()
    seconds = query.seconds("waitSeconds", MAX_WAIT_SECONDS)
    query.done()
    process = _process(call, call.seen())
    await until_ended(process, seconds)
    return json_reply(process.status())


async def until_ended(process: Process, seconds: float, *others: Bell) -> None:
    """Return when the process has ended, the time is over, or one of the other bells is rung."""
    if not process.is_ended and seconds > 0:
        await Bell.wait(process.over, *others, seconds=seconds)


async def show_output(call: Call) -> Reply:
    """GET /workspaces/{w}/processes/{p}/output"""
    query = call.query()
    stream = query.choice("stream", ("stdout", "stderr"), "stdout")
    cursor = query.whole("cursor", 0)
    limit = min(query.whole("limit", MAX_OUTPUT_BYTES), MAX_OUTPUT_BYTES)
    ends = time.monotonic() + query.seconds("waitSeconds", MAX_WAIT_SECONDS)
    query.done()
    process = _process(call, call.seen())
    output = process.output(stream)
    while output.total <= cursor and not process.is_output_over(stream):
        left = ends - time.monotonic()
        if left <= 0:
            break
        await Bell.wait(process.changed, seconds=left)
    if cursor > output.total:
        raise bad_request(f"query cursor: {cursor} lies beyond the {output.total} bytes that {stream} has said so far")
    piece = output.read(cursor, limit)
    is_over = process.is_output_over(stream) and piece.next == output.total
    headers = {
        "Rollout-Output-Next": str(piece.next),
        "Rollout-Output-End": "true" if is_over else "false",
        "Rollout-Output-Lost": str(piece.lost),
    }
    return Reply(piece.data, content_type="application/octet-stream", headers=headers)


async def write_input(call: Call) -> Result:
    """POST /workspaces/{w}/processes/{p}/stdin"""
    query = call.query()
    offset = query.whole("offset")
    end = query.choice("end", ("true", "false"), "false") == "true"
    query.done()
    process = _process(call, call.owned())
    await process.write_input(offset, call.body, end)
    return call.sandbox.stored(json_reply({"offset": offset + len(call.body)}))


async def send_signal(call: Call) -> Result:
    """POST /workspaces/{w}/processes/{p}/signal"""
    call.no_query()
    fields = call.fields()
    name = fields.text("signal")
    number = signal_number(name)
    if number is None:
        raise fields.wrong("signal", "a signal's name without SIG, like TERM,")
    tree = fields.flag("tree", True)
    fields.done()
    hosted = call.owned()
    hosted.require_live()
    await _process(call, hosted).signal(number, tree)
    return call.sandbox.stored(json_reply({}))


async def resize(call: Call) -> Result:
    """POST /workspaces/{w}/processes/{p}/resize"""
    call.no_query()
    rows, columns = _size(call.fields())
    _process(call, call.owned()).resize(rows, columns)
    return call.sandbox.stored(json_reply({}))


def _process(call: Call, hosted: Hosted) -> Process:
    process = hosted.processes.get(call.segments[3])
    if process is None:
        raise ApiError(
            "NotFound",
            f"process {call.segments[3]!r} does not exist in workspace {hosted.id!r}; those that have ended are forgotten "
            "with their turn",
        )
    return process


def _size(fields: Fields) -> tuple[int, int]:
    size = (
        fields.whole("rows", least=1, most=MAX_TERMINAL_SIZE),
        fields.whole("columns", least=1, most=MAX_TERMINAL_SIZE),
    )
    fields.done()
    return size


def _stdin(fields: Fields) -> bytes | str | None:
    value = fields.raw("stdin", None)
    if value is None or value == "Open":
        return value  # type: ignore[no-any-return]
    data = decoded(value)
    if data is None:
        raise fields.wrong("stdin", 'null, "Open", or {"encoding": "utf-8" or "base64", "data": ...}')
    if len(data) > MAX_INPUT_BYTES:
        raise ApiError(
            "TooLarge",
            f"{fields.name_of('stdin')}: {len(data)} bytes, at most {MAX_INPUT_BYTES}; put it into a file, or start with "
            '"Open" and write it in parts',
        )
    return data
