"""The model calls of one attempt that is driven turn by turn: what they ask for, and whose time they take.

The model as the program of an attempt has it: the run's current one, which keeps the agent's clock right.

Calls go through the session proxy, and may run side by side.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.assignment import Assignment, Budget
from agent_runtime.engine.attempt.attempt_log import NotReplayable
from agent_runtime.engine.attempt.attribution import REQUESTS_OWN_FAULTS
from agent_runtime.engine.attempt.model_probe import SILENT, probe
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
from rollout_api.records import Message, StopReason


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
        if self._health.failing is not None:
            return ModelError("Unreachable", self._health.failing)
        silence = ModelError("Timeout", SILENT)
        if self._cut_off:
            await self.probe(silence)
        return silence if self._cut_off and not silence.answers_others else None

    async def probe(self, error: ModelError) -> None:
        """See `model_probe.probe`."""
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
        call = object()
        self._health = health = CallHealth(
            on_hold=lambda held: (self._clock.wait if held else self._clock.go_on)(call),
            on_failing=self._on_failing,
        )
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
            with self._assignment.watch.call(health):
                reply = await answered(model.complete(request))
        except asyncio.CancelledError:
            self._cut_off = True
            raise
        finally:
            self._clock.go_on(call)
            if health.failing is not None:
                self._on_failing(None)
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

        def hold(held: bool) -> None:
            (self._clock.wait if held else self._clock.go_on)(call)

        health.on_hold, health.on_failing = hold, self._on_failing
        self._under_way[call] = health
        began = now()
        try:
            with self._watch.call(health):
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
            hold(False)
            if health.failing is not None:
                self._on_failing(None)
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
