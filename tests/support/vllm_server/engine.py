"""The engine: requests wait, run and end, and each step samples tokens for all running ones. It implements pause, abort
and priority.

vLLM 0.26, vllm/v1/core/sched/scheduler.py and vllm/v1/engine/async_llm.py: AsyncLLM.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.vllm_server import model
from tests.support.vllm_server.faults import Faults
from tests.support.vllm_server.metrics import Histogram
from tests.support.vllm_server.prefix_cache import BLOCK, PrefixCache
from tests.support.vllm_server.tokenizer import tokenizer
from tests.support.vllm_server.weights import Weights

PauseMode = Literal["abort", "wait", "keep"]
# Tokens of one request in one step when no rate is set: short answers take one step, and others get their turn.
BURST = 32
# With a rate set: short enough for even streams, long enough for a thousand of them.
STEP_SECONDS = 0.005
# Seconds that a paused process makes up for in one step. On a busy machine answers become slower instead of arriving at
# once.
CATCH_UP_SECONDS = 0.1


@dataclass(eq=False)
class Request:
    """One request, and the record of what was really done for it."""

    id: str
    external_id: str
    """The client's own id."""
    route: str
    prompt: array[int]
    """Ids of its prompt, stored compactly because thousands are kept. `prompt_ids` returns them as a list."""
    session: str = ""
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keeps_stop: bool = False
    """Whether the text includes the stop string."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """All requested sampling parameters."""
    cache_salt: str = ""
    priority: int = 0
    adapter: str | None = None
    script_ids: list[int] | None = None
    drop_after: int | None = None
    """Number of tokens after which the connection is cut."""

    ids: list[int] = field(default_factory=list)
    """Sampled ids."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    """[version, first token, token after the last], contiguous: the weights that sampled the tokens."""
    labels: list[tuple[str, int, int]] = field(default_factory=list)
    """(label, first token, token after the last), contiguous: the server's label of the weights that sampled the
    tokens.
    """
    finish: str | None = None
    """`stop`, `length` or `abort`; None while it runs."""
    stopped_by: str | int | None = None
    """The stop string or stop token that ended it."""
    aborted: bool = False
    disconnected: bool = False
    """Whether the client disconnected before the end."""
    tokens_at_disconnect: int | None = None
    cached_tokens: int = 0
    stale_cached_tokens: int = 0
    """Cached tokens that other weights than those at the answer's begin had computed."""
    arrived: float = field(default_factory=time.time)
    first_token: float | None = None
    """Unix seconds, like the other times."""
    last_token: float | None = None
    ended: float | None = None

    _state: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt_ids(self) -> list[int]:
        """Return the ids of the prompt."""
        return self.prompt.tolist()

    @property
    def versions(self) -> list[int]:
        """Return the version of each token."""
        return [version for version, start, end in self.spans for _ in range(start, end)]

    @property
    def orphan_tokens(self) -> int:
        """Return how many tokens were sampled after the client had disconnected."""
        return 0 if self.tokens_at_disconnect is None else len(self.ids) - self.tokens_at_disconnect

    def as_json(self) -> dict[str, Any]:
        """Return the JSON for GET /_standin/served."""
        kept = (
            "id external_id route session prompt_ids ids logprobs spans finish aborted disconnected orphan_tokens cache_salt"
            " priority adapter cached_tokens stale_cached_tokens arrived first_token last_token ended"
        )
        return {name: getattr(self, name) for name in kept.split()}

    async def chunks(self) -> AsyncIterator[tuple[int, int, str | None]]:
        """Yield (first token, token after the last, why it ended or None) as tokens are sampled. The last chunk may be
        empty.
        """
        sent = 0
        while True:
            while len(self.ids) == sent and self.finish is None:
                self._wake.clear()
                await self._wake.wait()
            start, sent = sent, len(self.ids)
            finish = self.finish
            yield start, sent, finish
            if finish is not None:
                return

    async def done(self) -> None:
        """Wait until it has ended."""
        while self.finish is None:
            self._wake.clear()
            await self._wake.wait()


class Engine:
    """The engine of one start of the server, which starts and closes it."""

    def __init__(
        self,
        weights: Weights,
        faults: Faults,
        served: deque[Request],
        *,
        tokens_per_second: float | None,
        abort_seconds: float,
        max_num_seqs: int,
        kv_blocks: int,
        max_model_len: int,
    ) -> None:
        self.weights, self.faults, self.served = weights, faults, served
        self.tokens_per_second = tokens_per_second
        self.abort_seconds = abort_seconds
        self.max_num_seqs, self.kv_blocks, self.max_model_len = max_num_seqs, kv_blocks, max_model_len
        self.cache = PrefixCache(kv_blocks)
        self.running: list[Request] = []
        self.waiting: list[tuple[int, int, Request]] = []
        self.paused: PauseMode | None = None
        self.asleep: set[str] = set()
        """What sleeps: weights, kv_cache."""
        self.prompt_tokens = self.generation_tokens = self.steps = 0
        self.reported = (0, 0, 0)
        """Running requests, waiting ones and used blocks, as of the last step: vLLM's metrics are no newer."""
        self.ended: dict[str, int] = {}
        self.first_tokens = Histogram()
        self._numbers = itertools.count()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the steps."""
        self._task = asyncio.create_task(self._run(), name="stand-in engine")

    async def close(self) -> None:
        """End everything that runs."""
        self._abort([*self.running, *(request for *_, request in self.waiting)])
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    # -- requests

    def add(self, request: Request) -> None:
        """Queue a request. Its tokens come when the engine reaches it."""
        request._state = model.state_of(request.prompt)
        self.served.append(request)
        heapq.heappush(self.waiting, (request.priority, next(self._numbers), request))
        self.look()

    def disconnected(self, request: Request) -> None:
        """Abort the request of a client that disconnected, after the time that vLLM needs to notice it."""
        if request.finish is not None or request.disconnected:
            return
        request.disconnected, request.tokens_at_disconnect = True, len(request.ids)
        if self.abort_seconds:
            asyncio.get_running_loop().call_later(self.abort_seconds, self._abort, [request])
        else:
            self._abort([request])

    def abort(self, ids: Sequence[str]) -> int:
        """Abort requests by the client's or the server's id, or all when no id is given. Returns how many ids were
        given or found.
        """
        everything = [*self.running, *(request for *_, request in self.waiting)]
        wanted = set(ids)
        found = [r for r in everything if not wanted or r.id in wanted or r.external_id in wanted]
        self._abort(found)
        return len(ids) or len(found)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.finish is None:
                request.aborted = True
                self._end(request, "abort")
        gone = {id(request) for request in requests}
        self.running = [request for request in self.running if id(request) not in gone]
        self.waiting = [entry for entry in self.waiting if id(entry[2]) not in gone]
        heapq.heapify(self.waiting)
        self._report()
        self.look()

    # -- pause and sleep

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause; return when no more tokens are sampled."""
        self.paused = mode
        self.look()
        if mode == "abort":
            self._abort([*self.running, *(request for *_, request in self.waiting)])
        elif mode == "wait":
            while self.running:
                await self.running[0].done()
        if clear_cache:
            self.cache.clear()

    def resume(self) -> None:
        """Continue with kept requests and those that arrived meanwhile."""
        self.paused = None
        self.look()

    async def sleep(self, mode: PauseMode) -> None:
        """Pause, and sample nothing until everything is awake again."""
        await self.pause(mode, clear_cache=True)
        self.asleep = {"weights", "kv_cache"}
        self.look()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Wake the named parts, or all of them. Continue when everything is awake."""
        self.asleep -= set(tags) or set(self.asleep)
        if not self.asleep:
            self.resume()

    def look(self) -> None:
        """Check whether the engine can continue or must stop, after a change."""
        admits = self.waiting and self.paused is None
        frozen = self.paused in ("abort", "keep") or self.asleep or self.faults.hang
        if (self.running or admits) and not frozen:
            self._work.set()
        else:
            self._work.clear()

    # -- steps

    @property
    def kv_blocks_used(self) -> int:
        """Return the blocks of the running requests."""
        return sum((len(request.prompt) + len(request.ids)) // BLOCK + 1 for request in self.running)

    async def _run(self) -> None:
        began = 0.0
        while True:
            if not self._work.is_set():
                await self._work.wait()
                began = time.monotonic()
            if self.tokens_per_second is None:
                self._step(BURST)
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(max(STEP_SECONDS, 1 / self.tokens_per_second))
                if not self._work.is_set():
                    continue
                due = int((time.monotonic() - began) * self.tokens_per_second)
                began += due / self.tokens_per_second
                self._step(min(due, max(1, int(self.tokens_per_second * CATCH_UP_SECONDS))))

    def _step(self, count: int) -> None:
        self._admit()
        now = time.time()
        made = 0
        most, held = self.faults.hang_after, self.faults.hold_at
        limits = [limit for limit in (most, held) if limit is not None]
        for request in self.running:
            left = min([count, *(limit - len(request.ids) for limit in limits)])
            made += self._make(request, left, now)
        if most is not None and any(len(request.ids) >= most for request in self.running):
            self.faults.hang, self.faults.hang_after = True, None
        if made:
            self.steps += 1
            self.generation_tokens += made
        if any(request.finish for request in self.running):
            self.running = [request for request in self.running if request.finish is None]
        self._report()
        self.look()

    def _report(self) -> None:
        self.reported = len(self.running), len(self.waiting), self.kv_blocks_used

    def _admit(self) -> None:
        if self.paused is not None or not self.waiting:
            return
        used = self.kv_blocks_used
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0][2]
            needed = len(request.prompt) // BLOCK + 1
            if self.running and used + needed > self.kv_blocks:
                return
            used += needed
            heapq.heappop(self.waiting)
            version = self.weights.version_for(request.adapter)
            salt = f"{request.cache_salt}\0{request.adapter or ''}"
            request.cached_tokens, request.stale_cached_tokens = self.cache.look_up(request.prompt, salt, version)
            self.cache.add(request.prompt, salt, version)
            self.prompt_tokens += len(request.prompt)
            self.running.append(request)

    def _make(self, request: Request, count: int, now: float) -> int:
        """Sample at most `count` further tokens. Returns how many were sampled."""
        version = self.weights.version_for(request.adapter)
        words = tokenizer()
        ids, logprobs, script = request.ids, request.logprobs, request.script_ids
        limit = min(request.max_tokens, self.max_model_len - len(request.prompt))
        start, state = len(ids), request._state
        stops = {words.eos, *request.stop_token_ids} if not request.ignore_eos else set(request.stop_token_ids)
        while len(ids) - start < count and request.finish is None:
            position = len(ids)
            if script is not None and position < len(script):
                token = script[position]
            else:
                allowed = not request.ignore_eos and position >= request.min_tokens
                previous = ids[-1] if ids else request.prompt[-1]
                token = model.next_id(version, request.seed, state, previous, eos_allowed=allowed)
            ids.append(token)
            logprobs.append(model.logprob_of(version, state, token))
            state = model.state_after(state, token)
            if token in stops and len(ids) > request.min_tokens:
                request.stopped_by = None if token == words.eos else token
                self._end(request, "stop")
            elif request.stop and (found := stop_found(request)) is not None:
                request.stopped_by = found
                self._end(request, "stop")
            elif len(ids) >= limit:
                self._end(request, "length")
        request._state = state
        made = len(ids) - start
        if made:
            if request.first_token is None:
                request.first_token = now
                self.first_tokens.observe(now - request.arrived)
            request.last_token = now
            if request.spans and request.spans[-1][0] == version:
                request.spans[-1][2] = len(ids)
            else:
                request.spans.append([version, start, len(ids)])
            label = self.weights.label
            if request.labels and request.labels[-1][0] == label:
                start = request.labels.pop()[1]
            request.labels.append((label, start, len(ids)))
            request._wake.set()
        return made

    def _end(self, request: Request, why: str) -> None:
        request.finish, request.ended = why, time.time()
        self.ended[why] = self.ended.get(why, 0) + 1
        if request.ids:
            version = self.weights.version_for(request.adapter)
            salt = f"{request.cache_salt}\0{request.adapter or ''}"
            self.cache.add(request.prompt + array("I", request.ids), salt, version)
        request._wake.set()


def stop_found(request: Request) -> str | None:
    """Return the stop string at the end of the answer, or in its last tokens."""
    # A stop string has at most this many of the last tokens.
    tail = tokenizer().decode(request.ids[-(max(map(len, request.stop)) + 1) :])
    return next((stop for stop in request.stop if stop in tail), None)
