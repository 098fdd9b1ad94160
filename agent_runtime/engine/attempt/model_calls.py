"""The model calls of one attempt: what they ask for, and whose time they take.

`ModelCalls` are those of an agent that is driven turn by turn. `AttemptModel` is the model of a program; calls come through
the session proxy, and may run side by side. `probe` finds out whether a model that failed at a request answers another one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.assignment import Assignment, Budget
from agent_runtime.engine.attempt.attempt_log import NotReplayable
from agent_runtime.engine.attempt.attribution import REQUESTS_OWN_FAULTS
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.engine.scheduling.model_watch import ModelWatch
from agent_runtime.engine.scheduling.shard import turn_seed
from agent_runtime.models.answers import answered
from agent_runtime.models.base import (
    CallHealth,
    ContentFiltered,
    ContextExceeded,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    TokenPrefix,
)
from agent_runtime.proxy.chat import BadRequest, PromptModel
from agent_runtime.recording.token_history import TokenHistory
from rollout_api.model import Sampling
from rollout_api.records import Message, StopReason

PROBE_SECONDS = 30.0
"""A loaded server answers a few tokens within it; one that does not is failing others too."""
PROBE_TOKENS = 16  # OpenAI's reasoning models refuse fewer
UPDATED = "OtherPolicy"
"""Reason that only an update of the policy brings about, and no request."""

SILENT = "the call had no answer when the agent's time ran out, and neither had another one"


async def probe(error: ModelError, model: Model | None, assignment: Assignment, session: str) -> None:
    """Note in the error whether the model answers a request with nothing of the policy in it.

    Routers send it to the server that failed, because it has the session of that one.
    """
    if model is None or error.answers_others or error.reason == UPDATED:
        return
    rollout = assignment.rollout
    request = ModelRequest(
        messages=[{"role": "user", "content": "Say ok."}],
        tools=[],
        sampling=Sampling(max_tokens=PROBE_TOKENS),
        seed=rollout.seed,
        session=session,
        task=rollout.task.name,
        member=rollout.member,
        turn=0,
        max_tokens=PROBE_TOKENS,
        group=assignment.model_group,
    )
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await answered(model.complete(request))
    except (TimeoutError, ModelError, ContextExceeded, ContentFiltered):
        return
    error.answers_others = True


async def trouble_of(
    failing: ModelError | None, is_asked: bool, ask_again: Callable[[ModelError], Awaitable[None]]
) -> ModelError | None:
    """Why the model had not answered when the agent's time ran out; None where no call waits, or it was only slow."""
    silence = ModelError("Timeout", SILENT)
    if failing is None and is_asked:
        await ask_again(silence)
    return failing or (silence if is_asked and not silence.answers_others else None)


@contextmanager
def _watched(
    clock: AgentClock, watch: ModelWatch, health: CallHealth, on_failing: Callable[[str | None], None]
) -> Iterator[None]:
    """Watch a call. The agent's clock stands still while the call is held; `on_failing` learns that it fails."""
    call = object()

    def hold(held: bool) -> None:
        (clock.wait if held else clock.go_on)(call)

    health.on_hold, health.on_failing = hold, on_failing
    try:
        with watch.call(health):
            yield
    finally:
        hold(False)
        if health.failing is not None:
            on_failing(None)


class ModelCalls:
    """One at a time. A call takes the model of its moment, which may be replaced while the run goes on."""

    def __init__(
        self,
        assignment: Assignment,
        model: Callable[[], Model | None],
        clock: AgentClock,
        on_failing: Callable[[str | None], None],
    ) -> None:
        self._assignment, self._model, self._clock, self._on_failing = assignment, model, clock, on_failing
        self._health = CallHealth()
        self._cut_off = False
        """The latest call was cancelled before it had an answer."""
        self._session = f"rollout-{assignment.rollout.index}"

    async def trouble(self) -> ModelError | None:
        """Why the call that was cut off had no answer; None where there was none, or the model was only slow."""
        failing = None if (why := self._health.failing) is None else ModelError("Unreachable", why)
        return await trouble_of(failing, self._cut_off, self.probe)

    async def probe(self, error: ModelError) -> None:
        """See `probe`."""
        await probe(error, self._model(), self._assignment, self._session)

    async def ask(
        self,
        turn: int,
        tokens: TokenHistory,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        budget: Budget,
    ) -> tuple[ModelReply, float]:
        """The answer, and the seconds that it took. What the server lost by failing is not among them, nor the agent's.

        Raises what `Model.complete` does, and NotReplayable where the job has no model.
        """
        model = self._model()
        if model is None:
            agent = self._assignment.agent.type
            raise NotReplayable(f"agent {agent} calls a model, and spec.model is not given; give one")
        self._health = health = CallHealth()
        rollout, sampling = self._assignment.rollout, self._assignment.sampling
        most, left = sampling.max_tokens, budget.tokens
        request = ModelRequest(
            messages=messages,
            tools=tools,
            sampling=sampling,
            seed=turn_seed(rollout.seed, turn),
            session=self._session,
            task=rollout.task.name,
            member=rollout.member,
            turn=turn,
            group=self._assignment.model_group,
            max_tokens=most if most is None or left is None else min(most, left),
            prefix=TokenPrefix(tokens.messages, tokens.ids) if tokens.messages else None,
            health=health,
        )
        started, began = time.perf_counter(), self._clock.now()
        try:
            with _watched(self._clock, self._assignment.watch, health, self._on_failing):
                reply = await answered(model.complete(request))
        except asyncio.CancelledError:
            self._cut_off = True
            raise
        self._clock.excuse(began, began + health.lost_seconds)
        return reply, time.perf_counter() - started - health.lost_seconds - health.held_seconds


class AttemptModel:
    """Implements Model and PromptModel. `group` is that of all calls of the rollout's group (`ModelRequest.group`)."""

    def __init__(
        self,
        current: Callable[[], Model],
        group: str,
        clock: AgentClock,
        drain: Drain,
        on_failing: Callable[[str | None], None] = lambda why: None,
        watch: ModelWatch | None = None,
    ) -> None:
        self._on_failing, self._watch = on_failing, watch or ModelWatch()
        self._current, self._group, self._clock, self._drain = current, group, clock, drain
        self.name, self.token_capture = current().name, current().token_capture
        self.failure: ModelError | None = None
        """Why the latest call has no answer; None after one that has, and where the request itself was to blame."""
        self.refusal: StopReason | None = None
        """Why the model would not answer the latest call; None after one that it did answer."""
        self.parked = 0
        """Calls that wait for the runner that comes after this one."""
        self._failing_since: float | None = None
        self._under_way: dict[object, CallHealth] = {}

    async def complete(self, request: ModelRequest) -> ModelReply:
        """See Model."""
        return await self._ask(request, lambda model, asked: answered(model.complete(asked)))

    async def complete_prompt(self, prompt: str | Sequence[int], request: ModelRequest) -> ModelReply:
        """See PromptModel. Raises BadRequest where the model is none."""

        def ask(model: Model, asked: ModelRequest) -> Awaitable[ModelReply]:
            if not isinstance(model, PromptModel):
                raise BadRequest(f"model {model.name} takes chat messages only, no bare prompt")
            return answered(model.complete_prompt(prompt, asked))

        return await self._ask(request, ask)

    async def check(self) -> None:
        """It was checked when the run was opened."""

    async def close(self) -> None:
        """The run closes it."""

    def trouble(self) -> ModelError | None:
        """Why a call has had no answer so far, or at all; None while nothing fails."""
        failing = next((health.failing for health in self._under_way.values() if health.failing is not None), None)
        return self.failure if failing is None else ModelError("Unreachable", failing)

    @property
    def is_asked(self) -> bool:
        """A call waits for its answer."""
        return bool(self._under_way)

    def failing_seconds(self, now: float) -> float:
        """For how long no call has been answered, from the beginning of the first that failed."""
        return 0.0 if self._failing_since is None else now - self._failing_since

    async def _ask(
        self, request: ModelRequest, ask: Callable[[Model, ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        if self._drain.requested:
            await self._park()
        now, health, call = self._clock.now, request.health, object()
        self._under_way[call] = health
        began = now()
        try:
            with _watched(self._clock, self._watch, health, self._on_failing):
                reply = await ask(self._current(), replace(request, group=self._group))
        except asyncio.CancelledError:
            # The program has its own patience, and may run out of it before a server that fails is given up here.
            if health.failing is not None:
                self._failed(ModelError("Unreachable", health.failing), began, now())
            raise
        except ModelError as error:
            self.refusal = None
            if error.reason in REQUESTS_OWN_FAULTS:
                self.failure = None
            else:
                self._failed(error, began, now())
            raise
        except (ContextExceeded, ContentFiltered) as error:
            self.failure, self._failing_since = None, None
            is_long = isinstance(error, ContextExceeded)
            self.refusal = StopReason.CONTEXT_EXCEEDED if is_long else StopReason.CONTENT_FILTER
            raise
        finally:
            del self._under_way[call]
        self.failure, self.refusal, self._failing_since = None, None, None
        self._clock.excuse(began, began + health.lost_seconds + health.held_seconds)
        return reply

    def _failed(self, error: ModelError, began: float, now: float) -> None:
        """All of that call's time was lost."""
        self.failure = error
        if self._failing_since is None:
            self._failing_since = began
        self._clock.excuse(began, now)

    async def _park(self) -> None:
        """Wait until the connection is cut: the program's request then goes to the next runner."""
        self.parked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.parked -= 1
