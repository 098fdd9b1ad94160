"""One session: who may call, what of it is recorded, and when a call is another one's retry.

A call's intent is durable before the model is asked, and its answer before the last byte of the reply. The client that
goes away takes the model's work with it.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from agent_runtime.models.base import CallHealth, Model, ModelError, ModelReply, ModelRequest
from agent_runtime.proxy.call import MOST_KEPT, Answers, Call, Identity, Ticket
from agent_runtime.proxy.chat import PROMPT_ROLE, ChatRequest, ErrorKind, PromptModel, Refused
from agent_runtime.proxy.history import History, Place, Turn
from agent_runtime.proxy.http import whole_number
from agent_runtime.proxy.limits import Exhausted, Limits, exhausted, tokens_left
from agent_runtime.proxy.metrics import Meter
from agent_runtime.proxy.refused import refused
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.store import StorageError
from agent_runtime.recording.token_history import answer_record
from rollout_api.base import ApiModel
from rollout_api.model import Sampling
from rollout_api.records import DeliveryRecord, IntentRecord, Message, Record

GRACE_SECONDS: Final = 10.0
"""From the first refusal over budget to `on_over_budget`: time to write down a last result, and not to try for ever."""

_MARKS_SECONDS: Final = 5.0
"""Whether answers were delivered is written with the next call's intent, or after so long: tools mostly take less."""


class SessionJournal(Protocol):
    """Where a session is recorded."""

    async def append(self, records: Sequence[Record]) -> None:
        """Durable when it returns. Raises Superseded where somebody else has taken the session over."""


class SessionSettings(ApiModel):
    """What fixes a session; it never changes."""

    id: str
    key_digest: str
    """SHA-256 of its key."""
    created: float
    """Unix seconds."""
    expires: float | None = None
    """Unix seconds from which the key is unknown."""
    models: list[str] = []
    """Names under which the model is asked for; none: the model's own."""
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    """What is set here stands, whatever the client asks for."""
    seed: int | None = None
    """Of the first turn; the client's own, or one of its name, where it is left out."""
    task: str = ""
    member: int = 0
    metadata: dict[str, Any] = {}
    """The owner's own; given back when the session is read."""


OverBudget = Callable[[Exhausted], Awaitable[None]]


class Session:
    """A session that this process owns.

    `recorded` are the journal's records so far. `on_over_budget` is told once, 10 s after the first call that was refused
    for it.
    """

    def __init__(
        self,
        settings: SessionSettings,
        model: Model,
        journal: SessionJournal,
        recorded: Sequence[Record] = (),
        *,
        on_over_budget: OverBudget | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.settings = settings
        self.failure: ModelError | StorageError | None = None
        """Why the latest call got no answer, of the model or of the storage; None after one that did. An agent that gives up
        while this is set was failed, and did not fail."""
        self._model, self._journal, self._meter = model, journal, meter or Meter()
        self._on_over_budget = on_over_budget
        self._names = frozenset(settings.models or [model.name])
        self._answers: Answers[Call] = Answers()
        self._history = History(recorded)
        self._live: set[Call] = set()
        self._attended: set[Call] = set()
        """Calls that a client waits for, or is being sent the answer of."""
        self._places = asyncio.Semaphore(settings.limits.concurrent_calls)
        self._marks: list[DeliveryRecord] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._doubtful: dict[int, Call] = {}
        """By turn: answers of which nobody knows whether they reached their client."""
        self._ended = False
        self._id_head = hashlib.sha256(settings.id.encode()).hexdigest()[:16]
        for turn in self._history.turns.values():
            self._recall(turn)

    @property
    def model_names(self) -> Sequence[str]:
        return sorted(self._names)

    @property
    def is_idle(self) -> bool:
        return not self._live

    @property
    def calls(self) -> int:
        """Calls that the model works on, or whose answer is on its way to the client."""
        return len(self._live | self._attended)

    @property
    def over(self) -> Exhausted | None:
        return exhausted(self.settings.limits, self._history.spent, time.time() - self.settings.created)

    def begin(self, request: ChatRequest, identity: Identity) -> Call:
        """The call that answers a request; the client is entered, and has to leave. Raises Refused, BadRequest."""
        if self._ended:
            raise Refused(ErrorKind.SESSION_ENDED, f"session {self.settings.id} has ended; no further call is answered")
        if request.model not in self._names:
            raise Refused(
                ErrorKind.MODEL_NOT_FOUND,
                f"model: {request.model!r} is not served in this session; use {' or '.join(self.model_names)}",
                "model",
            )
        if (known := self._answers.find(identity)) is not None:
            self._meter.coalesced()
            return self._entered(known)
        self._give_up_doubtful(identity)
        self._check_budget()
        return self._entered(self._dispatch(request, identity))

    def earlier(self, id: str) -> list[Message] | None:
        """The conversation whose answer has this id (`chat.Earlier`)."""
        head, _, number = id.rpartition("-")
        if head != self._id_head or (turn := whole_number(number)) not in self._history.turns:
            return None
        return self._history.conversation(self._history.turns[turn])

    async def end(self) -> None:
        """Answer no further call, and stop those under way. Returns when all that is known is recorded."""
        self._ended = True
        live = list(self._live)
        for call in live:
            call.cancel()
        await asyncio.gather(*(call.ended() for call in live))
        self._stop_grace()
        await self.flush()

    async def flush(self) -> None:
        if marks := self._take_marks():
            await self._journal.append(marks)

    def drop(self) -> None:
        """Somebody else has the session: whatever is under way here comes to nothing."""
        self._ended = True
        for call in self._live:
            call.cancel()
        self._take_marks()
        self._stop_grace()

    def _entered(self, call: Call) -> Call:
        call.enter()
        self._attended.add(call)
        return call

    def _dispatch(self, request: ChatRequest, identity: Identity) -> Call:
        place = self._history.place(request.messages, request.tools)
        turn = self._history.next_turn
        call = Call(Ticket(turn, f"{self._id_head}-{turn}", int(time.time()), identity), self._left)
        intent = IntentRecord(
            turn=turn,
            time=time.time(),
            keep=place.keep,
            messages=place.known.messages[place.keep :],
            tools=None if place.same_tools else request.tools,
            conversation=turn if place.parent is None else place.parent.intent.conversation,
            parent=None if place.parent is None else place.parent.intent.turn,
            request_digest=identity.digest,
            idempotency_key=identity.key,
        )
        self._history.begin(intent)
        self._live.add(call)
        self._answers.begun(identity, call)
        call.run(self._work(call, intent, place, request))
        if intent.parent is not None:
            self._went_on(intent.parent)
        return call

    async def _work(self, call: Call, intent: IntentRecord, place: Place, request: ChatRequest) -> ModelReply:
        began = time.perf_counter()
        health = CallHealth()
        try:
            async with self._places:
                await self._journal.append([*self._take_marks(), intent])
                started = time.perf_counter()
                async with asyncio.timeout(self._seconds_left()):
                    reply = await self._ask(call, intent, place, request, health)
                model_seconds = time.perf_counter() - started
                call.answered = True
                own_seconds = model_seconds - health.lost_seconds - health.held_seconds
                known = [] if place.parent is None else self._history.ids(place.parent)
                response = answer_record(reply, turn=intent.turn, seconds=own_seconds, known=known)
                await self._journal.append([response])
        except BaseException as error:
            self._answers.failed(call.ticket.identity, call)
            if isinstance(error, asyncio.CancelledError):
                self._meter.cancelled()
                if self._ended:
                    raise Refused(ErrorKind.SESSION_ENDED, f"session {self.settings.id} has ended") from None
            self._mark(intent.turn, delivered=False)
            if isinstance(error, TimeoutError):
                self._check_budget()
            # What is refused for what it asks is its client's own doing.
            if isinstance(error, ModelError | StorageError) and refused(error).kind is not ErrorKind.BAD_REQUEST:
                self.failure = error
            raise
        finally:
            self._live.discard(call)
        self.failure = None
        self._history.add(intent, response)
        self._meter.answered(time.perf_counter() - began - model_seconds, reply.usage)
        return reply

    async def _ask(
        self, call: Call, intent: IntentRecord, place: Place, request: ChatRequest, health: CallHealth
    ) -> ModelReply:
        settings = self.settings
        asked = ModelRequest(
            messages=place.known.messages,
            tools=request.tools,
            sampling=_sampling(request.sampling, settings.sampling),
            seed=_seed(settings, request.seed, intent.turn),
            session=settings.id,
            task=settings.task,
            member=settings.member,
            turn=intent.turn,
            max_tokens=tokens_left(settings.limits, self._history.spent),
            prefix=self._history.prefix(place),
            # Nobody reads pieces of an answer that is sent whole, and one that breaks off may be asked for again elsewhere.
            on_text=call.add_text if request.stream else None,
            health=health,
        )
        prompt = request.messages[0] if request.messages and request.messages[0]["role"] == PROMPT_ROLE else None
        if prompt is None:
            return await self._model.complete(asked)
        if not isinstance(self._model, PromptModel):
            raise Refused(ErrorKind.BAD_REQUEST, f"model {self._model.name} takes chat messages only, no bare prompt")
        return await self._model.complete_prompt(prompt.get("token_ids") or prompt["content"], asked)

    def told(self, turn: int, delivered: bool) -> None:
        """Another replica says whether an answer that went through it has reached its client."""
        call = self._doubtful.pop(turn, None)
        if call is not None and delivered:
            self._answers.forget(call)
        if turn in self._history.turns:
            self._mark(turn, delivered)

    def _left(self, call: Call, delivered: bool | None) -> None:
        self._attended.discard(call)
        if not call.answered:
            return
        if not delivered:
            self._answers.undelivered(call.ticket.identity, call)
        if delivered is None:
            self._doubtful[call.ticket.turn] = call
            if len(self._doubtful) > MOST_KEPT:
                del self._doubtful[next(iter(self._doubtful))]
        else:
            self._mark(call.ticket.turn, delivered)

    def _recall(self, turn: Turn) -> None:
        intent = turn.intent
        if intent.request_digest is None or (turn.delivered and intent.idempotency_key is None):
            return
        identity = Identity(intent.request_digest, intent.idempotency_key)
        ticket = Ticket(intent.turn, f"{self._id_head}-{intent.turn}", int(intent.time), identity)
        call = Call(ticket, self._left)
        call.replay(self._history.reply(turn))
        self._answers.begun(identity, call)
        if not turn.delivered:
            self._answers.undelivered(identity, call)
        if turn.delivered is None:
            self._doubtful[intent.turn] = call

    def _give_up_doubtful(self, identity: Identity) -> None:
        """Nobody knows whether some answer reached its client, and now the same is asked again: so it did not."""
        for turn, call in self._doubtful.items():
            if call.ticket.identity.digest == identity.digest:
                del self._doubtful[turn]
                self._mark(turn, delivered=False)
                return

    def _went_on(self, turn: int) -> None:
        """A request goes on from this answer, so its client has it."""
        if (call := self._doubtful.pop(turn, None)) is not None:
            self._answers.forget(call)

    def _mark(self, turn: int, delivered: bool) -> None:
        self._marks.append(DeliveryRecord(turn=turn, time=time.time(), delivered=delivered))
        if self._flush_timer is None and not self._ended:
            self._flush_timer = asyncio.get_running_loop().call_later(_MARKS_SECONDS, self._flush_soon)

    def _take_marks(self) -> list[Record]:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        marks, self._marks = self._marks, []
        return list(marks)

    def _flush_soon(self) -> None:
        async def flush() -> None:
            # Lost marks leave answers in doubt, nothing worse; the next append meets the same error.
            with contextlib.suppress(Superseded, StorageError):
                await self.flush()

        self._keep(asyncio.ensure_future(flush()))

    def _check_budget(self) -> None:
        limits, spent, age = self.settings.limits, self._history.spent, time.time() - self.settings.created
        under_way = replace(spent, turns=spent.turns + len(self._live))
        if (over := exhausted(limits, under_way, age)) is not None:
            # One that is reached only with calls under way may not be, should they fail.
            if exhausted(limits, spent, age) is not None:
                self._over_budget(over)
            raise Refused(ErrorKind.OVER_BUDGET, over.message)

    def _seconds_left(self) -> float | None:
        seconds = self.settings.limits.seconds
        return None if seconds is None else max(0.0, self.settings.created + seconds - time.time())

    def _over_budget(self, over: Exhausted) -> None:
        callback = self._on_over_budget
        if callback is None or self._grace is not None:
            return

        async def tell() -> None:
            await asyncio.sleep(GRACE_SECONDS)
            await callback(over)

        self._grace = asyncio.ensure_future(tell())
        self._keep(self._grace)

    def _stop_grace(self) -> None:
        # Not where the callback itself ends the session.
        if self._grace is not None and self._grace is not asyncio.current_task():
            self._grace.cancel()

    def _keep(self, task: asyncio.Future[None]) -> None:
        # The loop itself holds no reference to a task.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sampling(asked: Sampling, fixed: Sampling) -> Sampling:
    """What the client asks for, with what the session fixes in its place."""
    if not fixed.model_fields_set:
        return asked
    fields = {name: getattr(fixed, name) for name in fixed.model_fields_set}
    return asked.model_copy(update=fields | {"extra": {**asked.extra, **fixed.extra}})


def _seed(settings: SessionSettings, asked: int | None, turn: int) -> int:
    """Equal prompts in two turns must not give equal samples by construction, unless the client wants them."""
    if settings.seed is None and asked is not None:
        return asked
    first = int(hashlib.sha256(settings.id.encode()).hexdigest()[:8], 16) if settings.seed is None else settings.seed
    return (first + turn) & 0x7FFF_FFFF
