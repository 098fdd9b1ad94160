"""One session: who may call, which records are kept, and which calls are retries.

A call's intent is durable before the model is called, and its answer before the last byte of the reply is sent. If the
client disconnects, the model call is cancelled.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

from agent_runtime.models.answers import answered
from agent_runtime.models.base import (
    CallHealth,
    ContentFiltered,
    ContextExceeded,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    RequestRefused,
)
from agent_runtime.models.probe import ProbeResult, probe_request, probed
from agent_runtime.models.routed_experts import AnswerExperts
from agent_runtime.models.token_history import answer_record
from agent_runtime.proxy.body_queue import BodyQueue
from agent_runtime.proxy.call import MOST_KEPT, Answers, Call, Identity, Ticket
from agent_runtime.proxy.chat import (
    ChatAnswer,
    ChatRequest,
    ErrorKind,
    Note,
    NoteKind,
    PromptModel,
    Refused,
    SelectiveModel,
    TokenCounter,
    prompt_of,
)
from agent_runtime.proxy.history import History, Place, Turn, failed_calls, last_failure
from agent_runtime.proxy.http import Incoming, whole_number
from agent_runtime.proxy.limits import Exhausted, Limits, exhausted, tokens_left
from agent_runtime.proxy.metrics import Meter
from agent_runtime.proxy.own_delay import OwnDelay, Standstills
from agent_runtime.proxy.refused import call_error, is_failure
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.store import StorageError
from agent_runtime.shared_tasks import started
from rollout_api.base import ApiModel
from rollout_api.model import Sampling
from rollout_api.records import DeliveryRecord, IntentRecord, Message, ObjectDigest, Record, RecordedExperts

GRACE_SECONDS: Final = 10.0
"""Time from the first call that is refused because of a limit to `on_over_budget`: enough for a program to store its
result, but not to retry forever.
"""

_MARKS_SECONDS: Final = 5.0
"""The delivery of an answer is recorded with the next call's intent, or after this time; most tools take less."""


_MOST_COUNTED: Final = 4
"""Prompts of one session whose tokens are counted at the same time."""
_MOST_TESTS: Final = 64
"""Test requests for one session: a few for each of its failed calls, and no way to use the model for other things."""
_BYTES_A_TOKEN: Final = 4
"""For estimates: the usual ratio for English text and code."""

_LOG = logging.getLogger(__name__)


class SessionJournal(Protocol):
    """Storage of a session's records."""

    async def append(self, records: Sequence[Record]) -> None:
        """Append records; they are durable when this returns. Raises Superseded if another replica has taken the
        session over.
        """

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        """Store an object beside the records, in a zstd frame; it is durable when this returns. A name is used once."""


async def stored_experts(journal: SessionJournal, turn: int, experts: AnswerExperts | None) -> RecordedExperts | None:
    """Store the routed experts of a turn's answer, and return what its record has of them."""
    if experts is None:
        return None
    rows = experts.rows
    stored = await journal.store(f"experts-{turn}", rows.data)
    return RecordedExperts(
        object=stored, item_bytes=rows.item_bytes, layers=rows.layers, top_k=rows.top_k, spans=experts.spans
    )


class SessionSettings(ApiModel):
    """Immutable settings of a session."""

    id: str
    key_digest: str
    """SHA-256 of its key."""
    created: float
    """Unix seconds."""
    expires: float | None = None
    """Unix seconds at which the key expires."""
    models: list[str] = []
    """Names that clients may use for the model; none: the model's own."""
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    """Sampling that overrides the client's."""
    seed: int | None = None
    """Seed of the first turn; by default the client's own, or one derived from the session's name and time."""
    task: str = ""
    member: int = 0
    metadata: dict[str, Any] = {}
    """The owner's data, returned when the session is read."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A recorded call."""

    answer: ChatAnswer
    messages: list[Message]
    """The call's conversation, without the answer."""
    tools: list[dict[str, Any]]


OverBudget = Callable[[Exhausted], Awaitable[None]]


class Session:
    """A session that this process owns.

    `recorded` are the journal's records so far. `on_over_budget` is called once, 10 s after the first call refused over
    budget.
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
        self.bodies = BodyQueue()
        self._failures: dict[int, Exception] = dict(failed_calls(recorded))
        """Errors of model and storage by turn, because of which calls got no answer."""
        self._model, self._journal, self._meter = model, journal, meter or Meter()
        self._on_over_budget, self._standstills = on_over_budget, Standstills.of_loop()
        self._names = frozenset(settings.models or [model.name])
        self._answers: Answers[Call] = Answers()
        self._history = History(recorded)
        self.unread: ModelError | None = None
        """Why the client gave up its latest request before it was read here, if this process is the cause."""
        self._live: set[Call] = set()
        self._attended: set[Call] = set()
        """Calls for which a client waits, or to which the answer is being sent."""
        self._places = asyncio.Semaphore(settings.limits.concurrent_calls)
        self._marks: list[DeliveryRecord] = []
        self._undelivered: set[int] = set()
        """Turns that the record shows, or will show, as undelivered."""
        self._writing: set[asyncio.Future[None]] = set()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._doubtful: dict[int, Call] = {}
        """Answers by turn whose delivery is unknown."""
        self._tests = 0
        self._counting = asyncio.Semaphore(_MOST_COUNTED)
        self._refused_fields: frozenset[str] = frozenset()
        """Unknown fields that the inference server refused."""
        self._logged: set[NoteKind] = set()
        self._forgotten: set[int] = set()
        """Turns whose answers the client deleted. Their records stay."""
        self._refusal: Callable[[], Exception] | None = None
        """Returns why no further call is answered, once it has ended here."""
        self._id_head = hashlib.sha256(settings.id.encode()).hexdigest()[:16]
        for turn in self._history.turns.values():
            self._restore_call(turn)

    @property
    def model_names(self) -> Sequence[str]:
        return sorted(self._names)

    @property
    def is_idle(self) -> bool:
        return not self._live

    @property
    def calls(self) -> int:
        """Return the calls that the model works on, or whose answer is being sent."""
        return len(self._live | self._attended)

    @property
    def failure(self) -> Exception | None:
        """The error of model or storage because of which a call got no answer; None if callers have continued since. If
        an agent gives up while this is set, the model failed, not the agent.
        """
        return self.last_failure[1]

    @property
    def last_failure(self) -> tuple[int, Exception] | tuple[None, None]:
        """See `failure`; with its turn."""
        if self.unread is not None:
            return self._history.next_turn, self.unread
        return last_failure(self._failures, self._history.calls)

    @property
    def over(self) -> Exhausted | None:
        return exhausted(self.settings.limits, self._history.spent, time.time() - self.settings.created)

    @contextlib.asynccontextmanager
    async def incoming(self, request: Incoming) -> AsyncIterator[bytes]:
        """Yield the body of a request that may begin a call. See `BodyQueue.body`."""
        delay = self._own_delay()
        try:
            async with self.bodies.body(request, self.settings.limits.body_bytes) as body:
                yield body
        except asyncio.CancelledError:
            self.unread = delay.failure() or self.unread
            raise

    def _own_delay(self) -> OwnDelay:
        return OwnDelay(self._standstills, self._journal)

    def begin(self, request: ChatRequest, identity: Identity) -> Call:
        """Return the call that answers a request. The client is entered and must leave. Raises Refused, BadRequest."""
        self._check_served(request)
        self.unread = None
        if (known := self._answers.find(identity)) is not None:
            self._meter.coalesced()
            return self._entered(known)
        self._drop_unconfirmed(identity)
        self._check_budget()
        return self._entered(self._dispatch(request, identity))

    def fitted(self, request: ChatRequest) -> ChatRequest:
        """Return the request without the fields that the inference server ignores or refuses, each with a note."""
        fields, prompt = request.sampling.extra, prompt_of(request) is not None
        dropped = dict.fromkeys(self._refused_fields & request.unknown, "refused by the inference server")
        if isinstance(self._model, SelectiveModel):
            ignored = self._model.without_effect(fields, prompt=prompt)
            dropped |= dict.fromkeys(ignored, "without effect at the inference server")
        if not dropped:
            return request
        notes = [Note(NoteKind.FIELD, f"{name:.100}: {reason}") for name, reason in sorted(dropped.items())]
        return replace(
            request,
            sampling=_without(request.sampling, dropped),
            notes=[*request.notes, *notes],
            unknown=request.unknown - dropped.keys(),
        )

    def note(self, notes: Sequence[Note]) -> None:
        """Count notes, and log the first of each kind."""
        for note in notes:
            self._meter.noted(note)
            if note.kind not in self._logged:
                self._logged.add(note.kind)
                _LOG.info("Session %s: dropped from a request: %r", self.settings.id, note.text)

    async def count_tokens(self, request: ChatRequest) -> tuple[int, bool]:
        """Return the tokens of a request's prompt, and whether that is an estimate. Raises Refused."""
        self._check_served(request)
        if isinstance(self._model, TokenCounter):
            place = self._history.place(request.messages, request.tools)
            asked = self._model_request(request, place, self._history.next_turn, CallHealth())
            with contextlib.suppress(ModelError, ContextExceeded, ContentFiltered):
                async with self._counting:
                    if (count := await self._model.count_tokens(asked)) is not None:
                        return count, False
        size = len(json.dumps([request.messages, request.tools], ensure_ascii=False).encode(errors="replace"))
        return -(-size // _BYTES_A_TOKEN), True

    async def test(self) -> ProbeResult:
        """Return what the model does with a short test request now. The request is neither recorded nor counted. Raises
        Refused after `_MOST_TESTS`.
        """
        self._tests += 1
        if self._tests > _MOST_TESTS:
            raise Refused(ErrorKind.RATE_LIMITED, f"the model of a session is tested at most {_MOST_TESTS} times")
        settings = self.settings
        seed = _seed(settings, None, self._history.next_turn)
        request = probe_request(seed=seed, session=settings.id, task=settings.task, member=settings.member)
        return await probed(self._model, request, may_record=True)

    def earlier(self, id: str) -> list[Message] | None:
        """Return the conversation whose answer has this id (`chat.Earlier`)."""
        return None if (turn := self._turn(id)) is None else self._history.conversation(turn)

    def stored(self, id: str) -> StoredAnswer | None:
        """Return the call whose answer has this id."""
        if (turn := self._turn(id)) is None:
            return None
        answer = ChatAnswer(self._history.reply(turn), id, int(turn.intent.time))
        return StoredAnswer(answer, self._history.conversation(turn)[:-1], turn.tools)

    def forget(self, id: str) -> None:
        """Make an answer unavailable for clients of this process. Its record is kept."""
        if (turn := self._turn(id)) is not None:
            self._forgotten.add(turn.intent.turn)

    def _turn(self, id: str) -> Turn | None:
        head, _, number = id.rpartition("-")
        turn = whole_number(number) if head == self._id_head else None
        return None if turn is None or turn in self._forgotten else self._history.turns.get(turn)

    def _check_served(self, request: ChatRequest) -> None:
        if self._refusal is not None:
            raise self._refusal()
        if request.model not in self._names:
            raise Refused(
                ErrorKind.MODEL_NOT_FOUND,
                f"model: {request.model!r} is not served in this session; use {' or '.join(self.model_names)}",
                "model",
            )

    async def end(self) -> None:
        """Refuse further calls, and stop running ones. Returns when everything known is recorded."""
        # First, so that these record why their clients gave them up.
        await asyncio.gather(*(call.ended() for call in self._live - self._attended))
        self._refusal = partial(ended, self.settings.id)
        live = list(self._live)
        for call in live:
            call.cancel()
        await asyncio.gather(*(call.ended() for call in live))
        self._stop_grace()
        await asyncio.gather(*self._writing, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        if self._marks:
            await self._append_with_marks()

    async def _append_with_marks(self, *records: Record) -> None:
        """Append the marks, then these records. A client that disconnects meanwhile does not cancel it: marks of other
        calls would be lost, and an answer that no client has would count.
        """
        writing = started(self._journal.append([*self._take_marks(), *records]))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        await asyncio.shield(writing)

    def drop(self) -> None:
        """Another replica has the session: drop all running calls."""
        # The client sends its call again, and the replica that has the session answers it.
        self._refusal = partial(Superseded, f"session {self.settings.id}: another replica has taken it over")
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
        call = Call(Ticket(turn, f"{self._id_head}-{turn}", int(time.time()), identity), self._left, self._own_delay())
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
            self._continued(intent.parent)
        return call

    async def _work(self, call: Call, intent: IntentRecord, place: Place, request: ChatRequest) -> ModelReply:
        began = started = time.perf_counter()
        health = CallHealth(on_tokens=call.add_tokens, on_prompt=call.add_prompt_tokens)
        try:
            async with self._places:
                with call.delay.storing():
                    await self._append_with_marks(intent)
                started = time.perf_counter()
                async with asyncio.timeout(self._seconds_left()):
                    reply = await self._ask(call, intent, place, request, health)
                model_seconds = time.perf_counter() - started
                call.answered = True
                own_seconds = model_seconds - health.lost_seconds - health.held_seconds
                known = [] if place.parent is None else self._history.ids(place.parent)
                with call.delay.storing():
                    experts = await stored_experts(self._journal, intent.turn, reply.routed_experts)
                    response = answer_record(reply, turn=intent.turn, seconds=own_seconds, known=known, experts=experts)
                    await self._journal.append([response])
        except BaseException as error:
            self._answers.failed(call.ticket.identity, call)
            abandoned, failure = 0, error if isinstance(error, Exception) else None
            if isinstance(error, asyncio.CancelledError):
                failure = health.failure(time.perf_counter() - started) or call.delay.failure()
            if isinstance(error, asyncio.CancelledError):
                self._meter.cancelled()
                if self._refusal is not None:
                    raise self._refusal() from None
                if abandoned := call.abandoned_tokens:
                    self._history.abandon(abandoned)
            self._mark(intent.turn, delivered=False, abandoned=abandoned, failure=failure)
            if isinstance(error, TimeoutError):
                self._check_budget()
            raise
        finally:
            self._live.discard(call)
        self._history.add(intent, response)
        self._meter.answered(time.perf_counter() - began - model_seconds, reply.usage)
        return reply

    async def _ask(
        self, call: Call, intent: IntentRecord, place: Place, request: ChatRequest, health: CallHealth
    ) -> ModelReply:
        asked = self._model_request(request, place, intent.turn, health)
        if request.stream:
            # Only for streamed answers: others have no reader of pieces, and can be requested again when they are
            # interrupted.
            asked = replace(asked, on_text=call.add_text, on_reasoning=call.add_reasoning)
        prompt = prompt_of(request)
        try:
            return await self._complete(asked, prompt)
        except RequestRefused:
            if not request.unknown or call.has_pieces:
                raise
        # The inference server may not know the fields that the proxy does not know.
        known = replace(asked, sampling=_without(asked.sampling, request.unknown))
        reply = await self._complete(known, prompt)
        self._refused_fields |= request.unknown
        return reply

    async def _complete(self, asked: ModelRequest, prompt: str | Sequence[int] | None) -> ModelReply:
        if prompt is None:
            return await answered(self._model.complete(asked))
        if not isinstance(self._model, PromptModel):
            raise Refused(
                ErrorKind.BAD_REQUEST, f"model {self._model.name} supports chat messages only, not a bare prompt"
            )
        return await answered(self._model.complete_prompt(prompt, asked))

    def _model_request(self, request: ChatRequest, place: Place, turn: int, health: CallHealth) -> ModelRequest:
        settings = self.settings
        return ModelRequest(
            messages=place.known.messages,
            tools=request.tools,
            sampling=_sampling(request.sampling, settings.sampling),
            seed=_seed(settings, request.seed, turn),
            session=settings.id,
            task=settings.task,
            member=settings.member,
            turn=turn,
            max_tokens=tokens_left(settings.limits, self._history.spent),
            prefix=self._history.prefix(place),
            health=health,
        )

    def report_delivery(self, turn: int, delivered: bool) -> None:
        """Record another replica's report of whether an answer that it forwarded was delivered."""
        call = self._doubtful.pop(turn, None)
        if call is not None and delivered:
            self._answers.forget(call)
        if turn in self._history.turns:
            self._mark(turn, delivered)

    def _left(self, call: Call, delivered: bool | None) -> None:
        self._attended.discard(call)
        if not call.answered or call.failed:
            return
        if not delivered:
            self._answers.undelivered(call.ticket.identity, call)
        if delivered is None:
            self._doubtful[call.ticket.turn] = call
            if len(self._doubtful) > MOST_KEPT:
                del self._doubtful[next(iter(self._doubtful))]
        else:
            self._mark(call.ticket.turn, delivered, failure=None if delivered else call.delay.failure())

    def _restore_call(self, turn: Turn) -> None:
        intent = turn.intent
        if intent.request_digest is None or (turn.delivered and intent.idempotency_key is None):
            return
        identity = Identity(intent.request_digest, intent.idempotency_key)
        ticket = Ticket(intent.turn, f"{self._id_head}-{intent.turn}", int(intent.time), identity)
        call = Call(ticket, self._left, self._own_delay())
        call.replay(self._history.reply(turn), delivered=bool(turn.delivered))
        self._answers.begun(identity, call)
        if not turn.delivered:
            self._answers.undelivered(identity, call)
        if turn.delivered is False:
            self._undelivered.add(intent.turn)
        if turn.delivered is None:
            self._doubtful[intent.turn] = call

    def _drop_unconfirmed(self, identity: Identity) -> None:
        """Mark answers of unknown delivery as undelivered when the same request is repeated."""
        for turn, call in self._doubtful.items():
            if call.ticket.identity.digest == identity.digest:
                del self._doubtful[turn]
                self._mark(turn, delivered=False)
                return

    def _continued(self, turn: int) -> None:
        """Mark an answer as delivered, because a request continues from it."""
        if (call := self._doubtful.pop(turn, None)) is not None:
            self._answers.forget(call)

    def _mark(self, turn: int, delivered: bool, abandoned: int = 0, failure: Exception | None = None) -> None:
        if failure is not None and is_failure(failure):
            self._failures[turn] = failure
        elif delivered:
            self._failures.pop(turn, None)
        error = None if failure is None else call_error(failure)
        mark = DeliveryRecord(turn=turn, time=time.time(), delivered=delivered, error=error, abandoned_tokens=abandoned)
        self._marks.append(mark)
        if not delivered:
            self._undelivered.add(turn)
        elif turn in self._undelivered and self._refusal is None:
            # Write it now: if this process died first, an answer that a client has would be left out.
            self._undelivered.discard(turn)
            self._flush_soon()
            return
        if self._flush_timer is None and self._refusal is None:
            self._flush_timer = asyncio.get_running_loop().call_later(_MARKS_SECONDS, self._flush_soon)

    def _take_marks(self) -> list[Record]:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        marks, self._marks = self._marks, []
        return list(marks)

    def _flush_soon(self) -> None:
        async def flush() -> None:
            # Ignore errors: unrecorded delivery is harmless, and the next append raises the same error.
            with contextlib.suppress(Superseded, StorageError):
                await self.flush()

        self._keep(asyncio.ensure_future(flush()))

    def _check_budget(self) -> None:
        limits, spent, age = self.settings.limits, self._history.spent, time.time() - self.settings.created
        under_way = replace(spent, turns=spent.turns + len(self._live))
        if (over := exhausted(limits, under_way, age)) is not None:
            # Check again: if running calls have failed, the limit is not reached.
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
        # The callback may end the session; do not let it cancel itself.
        if self._grace is not None and self._grace is not asyncio.current_task():
            self._grace.cancel()

    def _keep(self, task: asyncio.Future[None]) -> None:
        # The event loop keeps only weak references to its tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _without(sampling: Sampling, names: Collection[str]) -> Sampling:
    return sampling.model_copy(
        update={"extra": {name: value for name, value in sampling.extra.items() if name not in names}}
    )


def _sampling(asked: Sampling, fixed: Sampling) -> Sampling:
    """Return the client's sampling, overridden by the session's."""
    # Not by `model_fields_set`: settings that were read from storage have all fields.
    fields = fixed.model_dump(exclude_defaults=True)
    return asked.model_copy(update=fields | {"extra": {**asked.extra, **fixed.extra}})


def _seed(settings: SessionSettings, asked: int | None, turn: int) -> int:
    """Return the seed. It differs between turns, so that equal prompts do not force equal samples, unless the client
    sets it.
    """
    if settings.seed is None and asked is not None:
        return asked
    first = settings.seed
    if first is None:
        # A session may be deleted and registered again under its name.
        first = int(hashlib.sha256(f"{settings.id}/{settings.created}".encode()).hexdigest()[:8], 16)
    return (first + turn) & 0x7FFF_FFFF


def ended(session: str) -> Refused:
    return Refused(ErrorKind.SESSION_ENDED, f"session {session} has ended; no further call is answered")
