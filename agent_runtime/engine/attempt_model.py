"""The model as the program of an attempt has it: the run's current one, which keeps the agent's clock right.

Calls go through the session proxy, and may run side by side.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agent_runtime.engine.agent_clock import AgentClock
from agent_runtime.engine.attribution import REQUESTS_OWN_FAULTS
from agent_runtime.engine.drain import Drain
from agent_runtime.engine.model_watch import ModelWatch
from agent_runtime.models.answered import answered
from agent_runtime.models.base import (
    CallHealth,
    ContentFiltered,
    ContextExceeded,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
)
from agent_runtime.proxy.chat import BadRequest, PromptModel
from rollout_api.records import StopReason


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
