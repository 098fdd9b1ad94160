"""Dispatches requests to handlers: checks the token, hold and key, and remembers replies."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from agent_runtime.executor.attempts import MAX_EPOCH, NAME, Attempt, Hold, Key, StoredReply, read_hold, read_key, whole
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.http.messages import Reply, StreamedReply, Switched, json_reply
from agent_runtime.executor.http.server import Request
from agent_runtime.executor.routes import command_stream, file_calls, process_calls, workspace_calls
from agent_runtime.executor.routes.calls import MAX_INPUT_BYTES, MAX_JSON_BYTES, Body, Call, Route, Rule
from agent_runtime.executor.sandbox import Sandbox

_ATTEMPT = re.compile(NAME)
# Long enough that a mistake does not end the attempts of other jobs.
_PREFIX = re.compile(r"[!-~]{8,200}")
MAX_PARKING = 2**31 - 1


async def _limit_idle_time(call: Call) -> dict[str, Any]:
    fields = call.fields()
    seconds = fields.number("seconds", least=1)
    fields.done()
    call.sandbox.activity.limit(seconds)
    return {}


async def _drain(call: Call) -> dict[str, Any]:
    call.fields().done()
    call.sandbox.is_draining = True
    return {"live": call.sandbox.live()}


async def _keep_still(call: Call) -> dict[str, Any]:
    fields = call.fields()
    is_still = fields.flag("still")
    parking = fields.whole("parking", least=1, most=MAX_PARKING)
    if_idle_seconds = fields.number("ifIdleSeconds", 0.0)
    restorer = fields.text("restorer", "", pattern=NAME, expected="1 to 200 visible ASCII characters")
    fields.done()
    await call.sandbox.set_still(is_still, parking, if_idle_seconds, restorer)
    return {"still": is_still}


async def _raise_fence(call: Call) -> dict[str, Any]:
    fields = call.fields()
    hold = Hold(
        fields.whole("epoch", most=MAX_EPOCH),
        fields.text("holder", pattern=NAME, expected="1 to 200 visible ASCII characters"),
    )
    fields.done()
    attempt = call.sandbox.attempt(call.attempt)
    await attempt.raise_fence(hold)
    call.sandbox.detach_runners(attempt.id, hold)
    return {"epoch": hold.epoch, "holder": hold.holder, "watermark": attempt.keys.watermark}


async def _acknowledge(call: Call) -> dict[str, Any]:
    hold = _hold(call.request)
    fields = call.fields()
    turn = fields.whole("turn", most=10**15)
    fields.done()
    attempt = call.sandbox.fenced_attempt(call.attempt, hold)
    call.sandbox.acknowledge(attempt, turn)
    return {"watermark": attempt.keys.watermark}


async def _delete_attempt(call: Call) -> dict[str, Any]:
    hold = _hold(call.request)
    attempt = call.sandbox.fenced_attempt(call.attempt, hold)
    await attempt.end(lambda: call.sandbox.delete_attempt(attempt.id), hold)
    return {}


async def _delete_attempts(call: Call) -> dict[str, Any]:
    query = call.query()
    prefix = query.text("prefix")
    query.done()
    if not _PREFIX.fullmatch(prefix):
        raise bad_request(f"query prefix: 8 to 200 visible ASCII characters expected, got {prefix[:80]!r}")
    return {"deleted": await call.sandbox.delete_attempts(prefix)}


# By method and path, with `*` for every second segment, which is a name.
ROUTES: dict[tuple[str, str], Route] = {
    ("PUT", "idle"): Route(Rule.TOKEN, _limit_idle_time, Body.JSON),
    ("PUT", "drain"): Route(Rule.TOKEN, _drain, Body.JSON),
    ("PUT", "still"): Route(Rule.TOKEN, _keep_still, Body.JSON),
    ("DELETE", "attempts"): Route(Rule.TOKEN, _delete_attempts, has_query=True),
    ("PUT", "attempts/*/fence"): Route(Rule.ATTEMPT, _raise_fence, Body.JSON),
    ("PUT", "attempts/*/watermark"): Route(Rule.ATTEMPT, _acknowledge, Body.JSON),
    ("DELETE", "attempts/*"): Route(Rule.ATTEMPT, _delete_attempt),
    ("POST", "commands"): Route(Rule.TOKEN, command_stream.attach),
    ("POST", "workspaces"): Route(Rule.CHANGE, workspace_calls.create, Body.JSON),
    ("GET", "workspaces"): Route(Rule.READ, workspace_calls.show_all),
    ("GET", "workspaces/*"): Route(Rule.READ, workspace_calls.show),
    ("DELETE", "workspaces/*"): Route(Rule.CHANGE, workspace_calls.destroy),
    ("POST", "workspaces/*/freeze"): Route(Rule.CHANGE, workspace_calls.freeze),
    ("PUT", "workspaces/*/network"): Route(Rule.CHANGE, workspace_calls.switch_network, Body.JSON),
    ("GET", "workspaces/*/network"): Route(Rule.READ, workspace_calls.check_network),
    ("PUT", "workspaces/*/steady"): Route(Rule.REPEATABLE, workspace_calls.set_steady, Body.JSON),
    ("PUT", "workspaces/*/pause"): Route(Rule.REPEATABLE, workspace_calls.pause, Body.JSON),
    ("PUT", "workspaces/*/model"): Route(Rule.REPEATABLE, workspace_calls.open_port),
    ("POST", "workspaces/*/model"): Route(Rule.REPEATABLE, workspace_calls.attach),
    ("GET", "workspaces/*/snapshot"): Route(Rule.READ, file_calls.snapshot, has_query=True),
    ("PUT", "workspaces/*/restore"): Route(Rule.CHANGE, file_calls.restore, Body.UPLOAD),
    ("DELETE", "workspaces/*/processes"): Route(Rule.CHANGE, workspace_calls.end_processes),
    ("GET", "workspaces/*/processes/*"): Route(Rule.READ, process_calls.show),
    ("GET", "workspaces/*/processes/*/output"): Route(Rule.READ, process_calls.show_output, has_query=True),
    ("POST", "workspaces/*/processes/*/stdin"): Route(
        Rule.CHANGE, process_calls.write_input, Body.INPUT, has_query=True
    ),
    ("POST", "workspaces/*/processes/*/signal"): Route(Rule.CHANGE, process_calls.send_signal, Body.JSON),
    ("POST", "workspaces/*/processes/*/resize"): Route(Rule.CHANGE, process_calls.resize, Body.JSON),
    ("GET", "workspaces/*/files"): Route(Rule.READ, file_calls.read, has_query=True),
    ("PUT", "workspaces/*/files"): Route(Rule.CHANGE, file_calls.write, Body.UPLOAD, has_query=True),
    ("DELETE", "workspaces/*/files"): Route(Rule.CHANGE, file_calls.remove, has_query=True),
    ("GET", "workspaces/*/stat"): Route(Rule.READ, file_calls.show_stat, has_query=True),
    ("GET", "workspaces/*/list"): Route(Rule.READ, file_calls.show_list, has_query=True),
    ("GET", "workspaces/*/tar"): Route(Rule.READ, file_calls.pack, has_query=True),
    ("PUT", "workspaces/*/tar"): Route(Rule.CHANGE, file_calls.unpack, Body.UPLOAD, has_query=True),
    ("PUT", "workspaces/*/carry"): Route(Rule.CHANGE, file_calls.carry, Body.UPLOAD, has_query=True),
}

# By method, number of segments, and the fixed segments.
_BY_SEGMENTS = {
    (method, pattern.count("/") + 1, *pattern.split("/")[::2]): route for (method, pattern), route in ROUTES.items()
}


class Application:
    """The application of the server. `health` returns the health object."""

    def __init__(self, sandbox: Sandbox, token_sha256: str, health: Callable[[], dict[str, Any]]) -> None:
        self._sandbox = sandbox
        self._token_sha256 = token_sha256
        self._health = health

    async def __call__(self, request: Request) -> Reply | StreamedReply | Switched:
        """Answer a request. Raises ApiError."""
        if request.head.path == "/healthz" and request.head.method == "GET":
            return Reply(content_type="text/plain")
        self._authenticate(request)
        if (request.head.method, request.head.path) == ("PUT", "/v1/still"):
            return await self._answer(request)  # no activity, because it depends on the activity of others
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
        match route.rule:
            case Rule.CHANGE:
                return await self._change(call, route)
            case Rule.READ:
                is_keyed = "idempotency-key" in request.head.headers
                return await (self._keyed_read(call, route) if is_keyed else route.reply(call))
            case Rule.REPEATABLE:
                call.hold, attempt = self._held(call)
                call.body = await request.read(MAX_JSON_BYTES)
                # Another runner may have taken over while the body was read.
                attempt.require(call.hold)
                return await route.reply(call)
            case Rule.ATTEMPT:
                call.attempt = _valid_attempt(segments[1])
                if request.head.headers.get("rollout-attempt", call.attempt) != call.attempt:
                    raise bad_request(
                        f"Rollout-Attempt: the attempt of the path, {call.attempt!r}, or no header expected"
                    )
        call.body = await request.read(MAX_JSON_BYTES)
        return await route.reply(call)

    async def _change(self, call: Call, route: Route) -> Reply:
        request = call.request
        hold, attempt, key = self._named(call)
        digest: bytes | None = None
        if route.body is not Body.UPLOAD:
            call.body = await request.read(MAX_INPUT_BYTES if route.body is Body.INPUT else MAX_JSON_BYTES)
            digest = request.body_digest
        stored = await attempt.once(
            hold,
            key,
            request,
            digest,
            lambda: self._stored(call, route),
            lambda: route.body is Body.INPUT or not request.body_complete,
        )
        return stored.reply()

    async def _keyed_read(self, call: Call, route: Route) -> Reply:
        hold, attempt, key = self._named(call)
        body = await call.request.digest()
        stored = await attempt.once(hold, key, call.request, body, lambda: self._stored(call, route), lambda: True)
        return stored.reply()

    async def _stored(self, call: Call, route: Route) -> StoredReply:
        reply = await route.reply(call)
        if route.rule is Rule.READ and not isinstance(reply, Switched):
            reply = await whole(reply)
        assert isinstance(reply, Reply)
        return self._sandbox.stored(reply)

    def _named(self, call: Call) -> tuple[Hold, Attempt, Key]:
        """Return hold, attempt and key of a call. Raises BadRequest, Fenced."""
        hold, attempt = self._held(call)
        call.key = read_key(_required(call.request, "idempotency-key", "Idempotency-Key: TURN:NAME"))
        return hold, attempt, call.key

    def _held(self, call: Call) -> tuple[Hold, Attempt]:
        """Return hold and attempt of a call. Raises BadRequest, Fenced."""
        name = call.request.head.headers.get("rollout-attempt")
        if name is None:
            raise bad_request(
                "Rollout-Attempt is missing: a call that changes something, or has a key, names its attempt"
            )
        call.attempt = _valid_attempt(name)
        hold = _hold(call.request)
        return hold, self._sandbox.fenced_attempt(call.attempt, hold)


def _hold(request: Request) -> Hold:
    """Return the hold in a request's Rollout-Fence header. Raises BadRequest."""
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
