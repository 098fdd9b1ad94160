"""A ModelServer as one model: many servers with one policy (docs/model-routing.md)."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agent_runtime.models.base import ModelConfigError, ModelError, ModelReply, ModelRequest
from agent_runtime.models.pool.call import Call
from agent_runtime.models.pool.fleet import EMPTY_SECONDS, Directory, Fleet
from agent_runtime.models.pool.server import Engine, Server, refused_limit
from agent_runtime.models.retries import retry_delay
from agent_runtime.models.token_exact.weight_versions import completed

CALL_SECONDS = 600.0
"""Time limit without a token, over all attempts of a call: the default of endpoint.callSeconds."""
UNKNOWN_SECONDS = 10.0
"""Wait for a late status that determines a finished answer's version; after it the version is recorded as unknown."""
TRANSIENT = frozenset(
    {
        "Unreachable",
        "Interrupted",
        "NotReady",
        "OtherPolicy",
        "RateLimited",
        "ServerError",
        "Timeout",
        "UnexpectedStatus",
    }
)
"""Reasons of failures that may not recur at another server or later."""


class ServedModel(Fleet):
    """A `Model` whose calls go to the servers in `directory`. `connect` opens the engine at a server's URL.

    `me` is this runner's key in `policy.mixed`; `sample_seconds` is the interval between two readings of a server's
    metrics; `adapter` is the LoRA adapter of all calls.
    """

    def __init__(
        self,
        name: str,
        directory: Directory,
        connect: Callable[[str], Engine],
        *,
        me: str,
        sample_seconds: float = 1.0,
        adapter: str | None = None,
    ) -> None:
        super().__init__(directory, connect, me=me, sample_seconds=sample_seconds, adapter=adapter)
        self.name = name
        self.token_capture = "TextOnly"
        self.resent = 0
        """Number of times that a call was sent again."""
        self._running: set[Call] = set()

    @property
    def acknowledged(self) -> int | None:
        """Return the latest update for which the version of every token is settled; None before the ModelServer is
        known.
        """
        return self._gate.acknowledged

    @property
    def in_flight(self) -> int:
        return sum(server.in_flight for server in self._places.servers.values())

    @property
    def waiting(self) -> int:
        """Return the calls that wait for the gate, or for a place at a server."""
        return self._places.waiting

    @property
    def spills(self) -> int:
        """Return the calls that did not go to the first server of their group."""
        return self._places.spills

    def waits_for(self) -> str:
        """Return why calls cannot start, other than the queue; empty if they can."""
        if not self.waiting:
            return ""
        if not self._places.is_open:
            return f"{self.waiting} model calls wait for the policy update in progress"
        return "" if self._places.available else f"{self.waiting} model calls wait for a server of {self.name}"

    async def check(self) -> None:
        """Wait for a server, and check how it records token ids. Raises ModelError."""
        self.start()
        deadline = _now() + EMPTY_SECONDS
        while True:
            self.raise_failure()
            if self._places.is_open and (able := self._places.available):
                try:
                    await able[0].engine.check()
                    break
                except ModelConfigError:
                    raise
                except ModelError as error:
                    able[0].suspect(error.message)
            elif self._shut_at is not None:
                deadline = _now() + EMPTY_SECONDS  # the gate may be shut for hours, while the servers sleep
                await self.wait_for_status(within_seconds=1.0)
            elif _now() > deadline:
                raise ModelError("NoServer", f"no server of {self.name} was available for {EMPTY_SECONDS:g} s")
            else:
                await self.wait_for_status(within_seconds=1.0)
        self.token_capture = self._capture = able[0].engine.token_capture
        for server in self._places.servers.values():
            server.engine.token_capture = self.token_capture

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return one answer; see `Model.complete`. It may come from several servers, and from several policy versions."""
        return await self._complete(request, None)

    async def complete_prompt(self, prompt: str | Sequence[int], request: ModelRequest) -> ModelReply:
        """Return one completion of a bare prompt, like `complete`."""
        return await self._complete(request, prompt)

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        """See `SelectiveModel`."""
        servers = self._places.servers.values()
        return next((server.engine.without_effect(fields, prompt=prompt) for server in servers), [])

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """See `TokenCounter`; None while no server can answer."""
        able = self._places.available
        return await able[0].engine.count_tokens(request) if able else None

    async def _complete(self, request: ModelRequest, prompt: str | Sequence[int] | None) -> ModelReply:
        self.raise_failure()
        call = Call(request, _now(), self._gate.begin(streamed=True), prompt)
        try:
            reply = await self._answer(call)
            ids = reply.completion_token_ids
            self._count(call, reply.usage.completion_tokens if ids is None else len(ids))
            await self._settled(call)
            return replace(reply, policy_spans=completed(call.spans.spans(), reply.policy_spans))
        finally:
            call.release(_now())
            self._gate.end(call.spans)

    async def _answer(self, call: Call) -> ModelReply:
        while True:
            server = await self._place(call)
            try:
                return await self._try(call, server)
            except ModelError as error:
                if isinstance(error, ModelConfigError) or error.reason not in TRANSIENT:
                    raise
                failure = error
            finally:
                self._places.give_back(server)
            self._handle_failure(call, server, failure)
            if call.failures > 1:
                await asyncio.sleep(retry_delay(call.failures - 1, None, now=time.time(), jitter=random.random()))

    async def _place(self, call: Call) -> Server:
        """Return a place at a server that is available at this moment."""
        call.hold(_now())
        try:
            while True:
                if self._places.is_open and not self._places.available:
                    call.request.health.note(f"no server of {self.name} is available")
                server = await self._places.take(call.group, call.avoided)
                if self._gate.is_open and server.is_available:
                    return server
                self._places.give_back(server)
        finally:
            call.release(_now())

    async def _try(self, call: Call, server: Server) -> ModelReply:
        engine = server.engine

        def on_tokens(count: int) -> None:
            now = _now()
            call.heard(now)
            server.pulse.beat()
            # A server that has left may still send tokens of the version before the status without it.
            is_member = self._places.servers.get(server.name) is server
            self._gate.arrived(call.spans, count, now, is_known=is_member)

        if not call.spans.tokens:
            self._gate.end(call.spans)
            call.spans = self._gate.begin(streamed=engine.token_capture == "Tokens")
        call.spans.begin_again(self._gate.version)
        call.begin_attempt(_now())
        try:
            async with asyncio.timeout(None) as stream:
                call.stream = stream
                server.streams.add(stream)
                self._running.add(call)
                try:
                    ask = engine.complete if call.prompt is None else partial(engine.complete_prompt, call.prompt)
                    return await ask(
                        call.asked(),
                        progress=call.progress,
                        on_tokens=on_tokens,
                        # Another policy's cached values must not be used.
                        cache_salt=str(self._gate.version),
                        # Calls of later turns come first, because their sandboxes have been in use for longest. Smaller
                        # numbers have priority.
                        priority=-call.request.turn,
                    )
                finally:
                    self._running.discard(call)
                    server.streams.discard(stream)
        except TimeoutError:
            if server.away is not None:
                raise ModelError("Interrupted", server.away) from None
            raise ModelError("Timeout", f"{server.url} sent no token for {CALL_SECONDS:g} s") from None
        finally:
            call.release(_now())

    def _handle_failure(self, call: Call, server: Server, failure: ModelError) -> None:
        """Process a failed attempt. Raises the failure if the call must end with it."""
        call.failed(server.name, str(failure))
        undone = server.restarted or not call.progress.can_continue
        keeps = server.engine.token_capture == "Tokens" and not undone
        if undone:
            # The stream may have begun after a restart, and the new engine may have another policy, so discard its
            # tokens.
            call.discard_attempt()
        if call.silent_seconds(_now()) > CALL_SECONDS or (call.has_spoken and not keeps):
            raise failure
        self.resent += 1
        call.spans.cut(len(call.progress.ids))
        # While the gate is closed, no server accepts calls, so the failure says nothing about this server.
        if failure.reason == "Unreachable" or (failure.reason in ("NotReady", "OtherPolicy") and self._gate.is_open):
            server.suspect(failure.message)
        elif failure.reason == "RateLimited":
            server.limit = refused_limit(server.limit, server.in_flight)

    def _count(self, call: Call, tokens: int) -> None:
        call.spans.cut(tokens)
        if missing := tokens - call.spans.tokens:
            self._gate.arrived(call.spans, missing, _now())

    async def _settled(self, call: Call) -> None:
        """Wait until the version of each token is known. Time behind a closed gate does not count."""
        while call.spans.pending and (not self._gate.is_open or _now() < self._gate.good_until + UNKNOWN_SECONDS):
            call.hold(_now())
            await self.wait_for_status(within_seconds=1.0)
        call.spans.settle(None)

    def _on_gate_change(self, is_open: bool) -> None:
        now = _now()
        for call in self._running:
            if is_open:
                call.release(now)
            else:
                call.hold(now)

    def _end_silent_calls(self, now: float, stood_still: float) -> None:
        for call in self._running:
            call.excuse(stood_still)
            if call.stream is not None and call.silent_seconds(now) > CALL_SECONDS:
                call.stream.reschedule(0)


def _now() -> float:
    return asyncio.get_running_loop().time()
