"""The model calls of one attempt, and which part of their time counts for the agent. `ModelCalls` makes the calls of an
agent that works in turns. `AttemptModel` is the model of a program, whose concurrent calls come through the session
proxy. `probe` tests whether a model that failed at one request answers another one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from agent_runtime.engine.attempt.agent_clock import AgentClock, last_timed
from agent_runtime.engine.attempt.assignment import Assignment, Budget
from agent_runtime.engine.attempt.attempt_log import NotReplayable
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.engine.scheduling.model_watch import ModelWatch
from agent_runtime.engine.scheduling.shard import turn_seed
from agent_runtime.models.answers import MAY_PASS, repeated
from agent_runtime.models.base import (
    PROCESS_STOPPED,
    REQUESTS_OWN_FAULTS,
    STORAGE_SILENT,
    CallHealth,
    ConversationRefused,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    RequestRefused,
    TokenPrefix,
)
from agent_runtime.models.probe import PROBE_TOKENS, ProbeResult, SelfTesting, is_answered, probe_request, probed
from agent_runtime.models.token_history import TokenHistory
from agent_runtime.proxy.chat import PromptModel, SelectiveModel, TokenCounter
from agent_runtime.proxy.history import History, failed_calls, last_refusal, unanswered_calls
from rollout_api.records import DeliveryRecord, IntentRecord, Message, Record

UPDATED = "OtherPolicy"
"""Reason that only a policy update causes, never a request."""
_NEVER_OF_REQUEST = frozenset({UPDATED, PROCESS_STOPPED, STORAGE_SILENT})

SILENT = "a call had no answer when the agent's time ran out or the agent gave it up, and no other call was answered"


async def probe(
    error: ModelError | ConversationRefused, model: Model | None, assignment: Assignment, session: str
) -> None:
    """Record in the error whether the model answers a request without the policy's content.

    It has the session of the failed request, so that routers send it to the server that failed. A request that timed
    out is also sent again, limited to a few tokens. If these arrive, the policy's answer was too long.
    """
    if model is None or (isinstance(error, ModelError) and (error.answers_others or error.reason in _NEVER_OF_REQUEST)):
        return
    rollout = assignment.rollout
    request = probe_request(
        seed=rollout.seed, session=session, task=rollout.task.name, member=rollout.member, group=assignment.model_group
    )
    is_refusal = isinstance(error, ConversationRefused) or error.reason in REQUESTS_OWN_FAULTS
    # A refusal is no rare failure: each overlong conversation is one, and must not add a call to a client's session.
    found = await probed(model, request, may_record=not is_refusal)
    error.refuses_others = is_refusal and found is ProbeResult.REFUSED
    if isinstance(error, ConversationRefused):
        return
    error.answers_others = found is ProbeResult.ANSWERED
    # With token capture, the error already says whether any token arrived.
    is_unclear = error.reason == "Timeout" and model.token_capture != "Tokens" and not isinstance(model, SelfTesting)
    if error.answers_others and is_unclear and error.request is not None:
        short = replace(error.request, max_tokens=PROBE_TOKENS, on_text=None, on_reasoning=None, health=CallHealth())
        error.after_tokens = await is_answered(model, short)


async def trouble_of(
    failing: ModelError | None, is_asked: bool, ask_again: Callable[[ModelError], Awaitable[None]]
) -> ModelError | None:
    """Return why the model had not answered when the agent's time ended; None if no call was waiting, or the model was
    only slow.
    """
    silence = ModelError("Timeout", SILENT)
    if failing is None and is_asked:
        await ask_again(silence)
    return failing or (silence if is_asked and not silence.answers_others else None)


@contextmanager
def _watched(
    clock: AgentClock, watch: ModelWatch, health: CallHealth, on_failing: Callable[[str | None], None]
) -> Iterator[None]:
    """Watch a call. The agent's clock stops while the call is on hold; `on_failing` is called when it fails."""
    call = object()

    def hold(held: bool) -> None:
        (clock.begin_wait if held else clock.end_wait)(call)

    health.on_hold, health.on_failing = hold, on_failing
    try:
        with watch.call(health):
            yield
    finally:
        hold(False)
        if health.failing is not None:
            on_failing(None)


class ModelCalls:
    """Makes one call at a time. Each call uses the current model, which may be replaced during the run."""

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
        """The latest call was cancelled before its answer."""
        self._session = assignment.session

    async def trouble(self) -> ModelError | None:
        """Return why the cancelled call had no answer; None if no call was cancelled, or the model was only slow."""
        failing = None if (why := self._health.failing) is None else ModelError("Unreachable", why)
        return await trouble_of(failing, self._cut_off, self.probe)

    async def probe(self, error: ModelError | ConversationRefused) -> None:
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
        """Return the answer and its duration, without time that the server lost by failing, which is not the agent's
        time either.

        Raises the errors of `Model.complete`, and NotReplayable if the job has no model.
        """
        model = self._model()
        if model is None:
            agent = self._assignment.agent.type
            raise NotReplayable(f"agent {agent} calls a model, but spec.model is missing; set it")
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
            prefix=TokenPrefix(tokens.messages, tokens.ids, tokens.experts) if tokens.messages else None,
            health=health,
            call_id=f"{self._session}-{turn}",
        )
        started, began = time.perf_counter(), self._clock.now()
        try:
            with _watched(self._clock, self._assignment.watch, health, self._on_failing):
                reply = await repeated(model.complete, request, MAY_PASS | {"BadRequest"})  # it would end the rollout
        except asyncio.CancelledError:
            self._cut_off = True
            raise
        except ModelError as error:
            error.request = request
            raise
        self._clock.exclude(began, began + health.lost_seconds + health.held_seconds)
        return reply, time.perf_counter() - started - health.lost_seconds - health.held_seconds


class AttemptModel:
    """Implements Model and PromptModel. `group` is the key that all calls of the rollout's group share
    (`ModelRequest.group`).
    """

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
        """Why the latest call has no answer; None if it has one, or if the request was the cause."""
        self.failures: dict[int, ModelError] = {}
        """Why calls had no answer, by turn, except calls whose request was the cause."""
        self.unanswered: set[int] = set()
        """Turns of calls that the program gave up before an answer or a failure."""
        self.refusal: ModelError | ConversationRefused | None = None
        """Why the model refused the latest call; None if it was answered, or failed."""
        self.parked = 0
        """Calls that wait for the next runner."""
        self._failing_since: float | None = None
        self._under_way: dict[object, CallHealth] = {}
        self._lost: list[tuple[Sequence[Message], Callable[[], None]]] = []
        """Messages of failed calls that no later call has repeated successfully, and what excludes their time."""

    def restore(self, records: Sequence[Record]) -> None:
        """Restore which calls an earlier process did not answer, and why."""
        calls = {record.turn: record for record in records if isinstance(record, IntentRecord)}
        self.failures = failed_calls(records)
        self.unanswered = {turn for turn, error in unanswered_calls(records).items() if error is None}
        self.failure = self.failures.get(max(calls, default=-1))
        self.refusal = last_refusal(records)
        if not self.failures:
            return
        history, counted_until = History(records), last_timed(records)[0]
        answered = [(number, history.messages(turn.intent)) for number, turn in history.turns.items()]
        for mark in (record for record in records if isinstance(record, DeliveryRecord)):
            if mark.turn in self.failures:
                messages = history.messages(calls[mark.turn])
                if not any(number > mark.turn and messages == asked for number, asked in answered):
                    span = calls[mark.turn].time, min(mark.time, counted_until)
                    self._lost.append((messages, partial(self._clock.exclude_earlier, *span)))

    async def complete(self, request: ModelRequest) -> ModelReply:
        """See Model."""
        return await self._ask(request, lambda model, asked: model.complete(asked))

    async def complete_prompt(self, prompt: str | Sequence[int], request: ModelRequest) -> ModelReply:
        """See PromptModel. Raises RequestRefused if the model is not a PromptModel."""

        def ask(model: Model, asked: ModelRequest) -> Awaitable[ModelReply]:
            if not isinstance(model, PromptModel):
                raise RequestRefused("BadRequest", f"model {model.name} supports chat messages only, not a bare prompt")
            return model.complete_prompt(prompt, asked)

        return await self._ask(request, ask)

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> Sequence[str]:
        """See SelectiveModel."""
        model = self._current()
        return model.without_effect(fields, prompt=prompt) if isinstance(model, SelectiveModel) else ()

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """See TokenCounter. Counting is not a call of the agent: its failures do not count."""
        model = self._current()
        return await model.count_tokens(request) if isinstance(model, TokenCounter) else None

    async def test(self, request: ModelRequest, *, may_record: bool) -> ProbeResult:
        """See SelfTesting. A test is not a call of the agent."""
        return await probed(self._current(), request, may_record=may_record)

    async def check(self) -> None:
        """Do nothing: the model was checked when the run was opened."""

    async def close(self) -> None:
        """Do nothing: the run closes the model."""

    def trouble(self) -> ModelError | None:
        """Return why a call has no answer; None if no call fails."""
        failing = next((health.failing for health in self._under_way.values() if health.failing is not None), None)
        return self.failure if failing is None else ModelError("Unreachable", failing)

    @property
    def is_asked(self) -> bool:
        """Whether a call waits for its answer."""
        return bool(self._under_way)

    def failing_seconds(self, now: float) -> float:
        """Return for how many seconds no call has been answered, since the start of the first failed call."""
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
                reply = await repeated(lambda asked: ask(self._current(), asked), replace(request, group=self._group))
        except asyncio.CancelledError:
            # The program has its own time limit for a call, which may end before this process gives up a failing
            # server.
            if (failure := health.failure(now() - began)) is not None:
                self._failed(request, failure, began, now())
            else:
                self.unanswered.add(request.turn)
            raise
        except ModelError as error:
            if error.reason in REQUESTS_OWN_FAULTS:
                self.failure, self.refusal = None, error
            else:
                self.refusal = None
                self._failed(request, error, began, now())
            raise
        except ConversationRefused as error:
            self.failure, self.refusal, self._failing_since = None, error, None
            raise
        finally:
            del self._under_way[call]
        self.failure, self.refusal, self._failing_since = None, None, None
        self._clock.exclude(began, began + health.lost_seconds + health.held_seconds)
        again = [exclude for messages, exclude in self._lost if messages == request.messages]
        self._lost = [lost for lost in self._lost if lost[0] != request.messages]
        for exclude in again:
            exclude()
        return reply

    def _failed(self, request: ModelRequest, error: ModelError, began: float, now: float) -> None:
        """Exclude the whole time of the call if a later call answers the same request. Otherwise the request may be the
        cause.
        """
        error.request = request
        self.failure = self.failures[request.turn] = error
        if self._failing_since is None:
            self._failing_since = began
        self._lost.append((request.messages, partial(self._clock.exclude, began, now)))

    async def _park(self) -> None:
        """Wait until the connection is closed. The program's retry then goes to the next runner."""
        self.parked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.parked -= 1
