"""The model calls of one attempt that is driven turn by turn: what they ask for, and whose time they take."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.engine.agent_clock import AgentClock
from agent_runtime.engine.assignment import Assignment
from agent_runtime.engine.attempt_log import NotReplayable
from agent_runtime.engine.budgets import Budget
from agent_runtime.engine.model_probe import SILENT, probe
from agent_runtime.engine.seeds import turn_seed
from agent_runtime.models.answered import answered
from agent_runtime.models.base import CallHealth, Model, ModelError, ModelReply, ModelRequest, TokenPrefix
from agent_runtime.recording.token_history import TokenHistory
from rollout_api.records import Message


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
