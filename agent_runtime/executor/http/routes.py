"""From a request to its handler: who may ask, under which hold and key, and what is remembered."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any, TypeAlias

from agent_runtime.executor.attempts.attempts import Attempt
from agent_runtime.executor.attempts.fencing import MAX_EPOCH, NAME, Hold, read_hold
from agent_runtime.executor.attempts.idempotency import Key, StoredReply, read_key, whole
from agent_runtime.executor.commands import command_stream
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.http import file_calls, process_calls, workspace_calls
from agent_runtime.executor.http.calls import (
    MAX_INPUT_BYTES,
    MAX_JSON_BYTES,
    Call,
    Change,
    Control,
    Kind,
    Read,
    Repeatable,
    Switch,
)
from agent_runtime.executor.http.messages import Reply, StreamedReply, Switched, json_reply
from agent_runtime.executor.http.server import Request
from agent_runtime.executor.sandbox import Sandbox

_ATTEMPT = re.compile(NAME)

Route: TypeAlias = Read | Change | Repeatable | Control | Switch


async def _raise_fence(call: Call) -> Reply:
    """PUT /attempts/{attempt}/fence"""
    call.no_query()
    fields = call.fields()
    hold = Hold(
        fields.whole("epoch", most=MAX_EPOCH),
        fields.text("holder", pattern=NAME, expected="1 to 200 visible ASCII characters"),
    )
    fields.done()
    attempt = call.sandbox.attempt(call.attempt)
    await attempt.raise_fence(hold)
    call.sandbox.detach_runners(attempt.id, hold)
    return json_reply({"epoch": hold.epoch, "holder": hold.holder, "watermark": attempt.keys.watermark})


async def _acknowledge(call: Call) -> Reply:
    """PUT /attempts/{attempt}/watermark"""
    call.no_query()
    hold = _hold(call.request)
    fields = call.fields()
    turn = fields.whole("turn", most=10**15)
    fields.done()
    attempt = call.sandbox.fenced_attempt(call.attempt, hold)
    call.sandbox.acknowledge(attempt, turn)
    return json_reply({"watermark": attempt.keys.watermark})


async def _delete_attempt(call: Call) -> Reply:
    """DELETE /attempts/{attempt}"""
    call.no_query()
    call.no_fields()
    hold = _hold(call.request)
    attempt = call.sandbox.fenced_attempt(call.attempt, hold)
    await attempt.delete(hold, lambda: call.sandbox.delete_attempt(attempt.id))
    return json_reply({})


# By method and path, with `*` for every second segment, which is a name.
ROUTES: dict[tuple[str, str], Route] = {
    ("PUT", "attempts/*/fence"): Control(_raise_fence),
    ("PUT", "attempts/*/watermark"): Control(_acknowledge),
    ("DELETE", "attempts/*"): Control(_delete_attempt),
    ("POST", "commands"): Switch(command_stream.attach),
    ("POST", "workspaces"): Change(workspace_calls.create),
    ("GET", "workspaces"): Read(workspace_calls.show_all),
    ("GET", "workspaces/*"): Read(workspace_calls.show),
    ("DELETE", "workspaces/*"): Change(workspace_calls.destroy),
    ("POST", "workspaces/*/freeze"): Change(workspace_calls.freeze),
    ("PUT", "workspaces/*/network"): Change(workspace_calls.switch_network),
    ("PUT", "workspaces/*/model"): Repeatable(workspace_calls.open_port),
    ("POST", "workspaces/*/model"): Repeatable(workspace_calls.attach),
    ("GET", "workspaces/*/snapshot"): Read(file_calls.snapshot),
    ("PUT", "workspaces/*/restore"): Change(file_calls.restore, Kind.UPLOAD),
    ("DELETE", "workspaces/*/processes"): Change(workspace_calls.end_processes),
    ("GET", "workspaces/*/processes/*"): Read(process_calls.show),
    ("GET", "workspaces/*/processes/*/output"): Read(process_calls.show_output),
    ("POST", "workspaces/*/processes/*/stdin"): Change(process_calls.write_input, Kind.INPUT, MAX_INPUT_BYTES),
    ("POST", "workspaces/*/processes/*/signal"): Change(process_calls.send_signal),
    ("POST", "workspaces/*/processes/*/resize"): Change(process_calls.resize),
    ("GET", "workspaces/*/files"): Read(file_calls.read),
    ("PUT", "workspaces/*/files"): Change(file_calls.write, Kind.UPLOAD),
    ("DELETE", "workspaces/*/files"): Change(file_calls.remove),
    ("GET", "workspaces/*/stat"): Read(file_calls.show_stat),
    ("GET", "workspaces/*/list"): Read(file_calls.show_list),
    ("GET", "workspaces/*/tar"): Read(file_calls.pack),
    ("PUT", "workspaces/*/tar"): Change(file_calls.unpack, Kind.UPLOAD),
    ("PUT", "workspaces/*/carry"): Change(file_calls.carry, Kind.UPLOAD),
}

# By method, number of segments, and those that are no names.
_BY_SEGMENTS = {
    (method, pattern.count("/") + 1, *pattern.split("/")[::2]): route for (method, pattern), route in ROUTES.items()
}


class Application:
    """What the server serves. `health` gives the health object."""

    def __init__(self, sandbox: Sandbox, token_sha256: str, health: Callable[[], dict[str, Any]]) -> None:
        self._sandbox = sandbox
        self._token_sha256 = token_sha256
        self._health = health

    async def __call__(self, request: Request) -> Reply | StreamedReply | Switched:
        """Answer a request. Raises ApiError."""
        if request.head.path == "/healthz" and request.head.method == "GET":
            return Reply(content_type="text/plain")
        self._authenticate(request)
        activity = self._sandbox.activity
        activity.begin()
        try:
            return await self._answer(request)
        finally:
            activity.end()

    def _authenticate(self, request: Request) -> None:
        scheme, _, token = request.head.headers.get("authorization", "").partition(" ")
        digest = sha256(token.strip().encode("latin-1")).hexdigest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._token_sha256):
            raise ApiError("Unauthorized", "Authorization: 'Bearer TOKEN' with this executor's token expected")
        request.trust()

    async def _answer(self, request: Request) -> Reply | StreamedReply | Switched:
        method = request.head.method
        version, *segments = request.head.segments()
        if version == "v1" and (method, segments) == ("GET", ["health"]):
            return json_reply(self._health())
        route = _BY_SEGMENTS.get((method, len(segments), *segments[::2])) if version == "v1" else None
        if route is None:
            raise ApiError("NotFound", f"{method} {request.head.path}: no such route; docs/executor.md lists them")
        call = Call(self._sandbox, request, segments)
        match route:
            case Control():
                call.attempt = _valid_attempt(segments[1])
                if request.head.headers.get("rollout-attempt", call.attempt) != call.attempt:
                    raise bad_request(
                        f"Rollout-Attempt: the attempt of the path, {call.attempt!r}, or no header expected"
                    )
                call.body = await request.read(MAX_JSON_BYTES)
                reply: Reply = await route.handle(call)
                return reply
            case Change():
                return await self._change(call, route)
            case Repeatable():
                call.hold, attempt = self._held(call)
                call.body = await request.read(MAX_JSON_BYTES)
                # The body took its time, in which another runner may have come.
                attempt.require(call.hold)
                return await route.handle(call)
            case Switch():
                call.body = await request.read(MAX_JSON_BYTES)
                return route.handle(call)
            case Read() if "idempotency-key" in request.head.headers:
                return await self._keyed_read(call, route)
            case Read():
                return await route.handle(call)

    async def _change(self, call: Call, route: Change) -> Reply:
        request = call.request
        hold, attempt, key = self._named(call)
        digest: bytes | None = None
        if route.kind is not Kind.UPLOAD:
            call.body = await request.read(route.max_body_bytes)
            digest = request.body_digest
        stored = await attempt.once(
            hold,
            key,
            request,
            digest,
            lambda: route.handle(call),
            lambda: route.kind is Kind.INPUT or not request.body_complete,
        )
        return stored.reply()

    async def _keyed_read(self, call: Call, route: Read) -> Reply:
        hold, attempt, key = self._named(call)

        async def work() -> StoredReply:
            return self._sandbox.stored(await whole(await route.handle(call)))

        body = await call.request.digest()
        return (await attempt.once(hold, key, call.request, body, work, _yes)).reply()

    def _named(self, call: Call) -> tuple[Hold, Attempt, Key]:
        """The hold, attempt and key in whose name the call is made. Raises BadRequest, Fenced."""
        hold, attempt = self._held(call)
        call.key = read_key(_required(call.request, "idempotency-key", "Idempotency-Key: TURN:NAME"))
        return hold, attempt, call.key

    def _held(self, call: Call) -> tuple[Hold, Attempt]:
        """The hold and attempt in whose name the call is made. Raises BadRequest, Fenced."""
        name = call.request.head.headers.get("rollout-attempt")
        if name is None:
            raise bad_request(
                "Rollout-Attempt is missing: a call that changes something, or has a key, names its attempt"
            )
        call.attempt = _valid_attempt(name)
        hold = _hold(call.request)
        return hold, self._sandbox.fenced_attempt(call.attempt, hold)


def _hold(request: Request) -> Hold:
    """The hold of a request's Rollout-Fence. Raises BadRequest."""
    return read_hold(_required(request, "rollout-fence", "Rollout-Fence: EPOCH:HOLDER"))


def _required(request: Request, header: str, expected: str) -> str:
    value = request.head.headers.get(header)
    if value is None:
        raise bad_request(f"{expected} is missing: a call that changes something needs this header")
    return value


def _valid_attempt(name: str) -> str:
    if not _ATTEMPT.fullmatch(name):
        raise bad_request(f"attempt: 1 to 200 visible ASCII characters expected, got {name[:80]!r}")
    return name


def _yes() -> bool:
    return True
