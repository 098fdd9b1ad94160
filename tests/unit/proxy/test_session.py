"""One session: what is recorded when, which answer a retry gets, and what a session may use up."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.models.answers import LEAST_LOGPROB
from agent_runtime.models.base import ModelConfigError, ModelError, ModelReply, ModelRequest, RequestRefused
from agent_runtime.proxy import keys
from agent_runtime.proxy import session as session_module
from agent_runtime.proxy.call import Call, Identity, Piece
from agent_runtime.proxy.chat import BadRequest, ChatRequest, ErrorKind, Refused
from agent_runtime.proxy.limits import Exhausted, Limits
from agent_runtime.proxy.refused import refused
from agent_runtime.proxy.session import OverBudget, Session, SessionSettings
from agent_runtime.recording.branches import token_branches
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.messages import fold, linear
from agent_runtime.recording.store import StorageError, StorageUnavailable
from rollout_api.model import Sampling
from rollout_api.records import DeliveryRecord, IntentRecord, Message, ResponseRecord, StopReason
from tests.support.full import examples
from tests.support.proxied_model import MemoryJournal, TokenModel

pytestmark = pytest.mark.usefixtures("virtual_clock")

USER: Message = {"role": "user", "content": "hello"}


class Bench:
    """A session over a list of records, which can be opened again as by another process."""

    def __init__(self, limits: Limits | None = None, on_over_budget: OverBudget | None = None, **fields: Any) -> None:
        self.model, self.journal = TokenModel(), MemoryJournal()
        self._settings = SessionSettings(
            id="s", key_digest=keys.digest("k"), created=time.time(), limits=limits or Limits(), **fields
        )
        self._on_over_budget = on_over_budget
        self.session = self.opened()

    def opened(self) -> Session:
        """Open the session as a process that takes it over."""
        self.session = Session(
            self._settings, self.model, self.journal, list(self.journal.records), on_over_budget=self._on_over_budget
        )
        return self.session

    def begin(
        self,
        messages: Sequence[Message] = (USER,),
        *,
        retry: bool = False,
        key: str | None = None,
        stream: bool = True,
        **fields: Any,
    ) -> Call:
        """Begin a request with these messages."""
        body = repr((list(messages), fields))
        request = ChatRequest(model="tiny", messages=list(messages), stream=stream, **fields)
        return self.session.begin(request, Identity(body, key, retry))

    async def ask(self, messages: Sequence[Message] = (USER,), *, delivered: bool = True, **more: Any) -> ModelReply:
        """Make a whole call."""
        call = self.begin(messages, **more)
        try:
            reply = await call.answer()
        except BaseException:
            call.leave(False)
            raise
        call.leave(delivered)
        return reply

    async def hang_up(self) -> None:
        """Make a call whose client disconnects after its first word."""
        self.model.hold = asyncio.Event()
        call = self.begin()
        await call.started()
        call.leave(False)
        await call.ended()

    def recorded(self, form: type) -> list[Any]:
        """Return the records of one type."""
        return [record for record in self.journal.records if isinstance(record, form)]


async def test_answer_sent_whole_is_not_streamed_and_may_be_retried_elsewhere() -> None:
    bench = Bench()
    await bench.ask(stream=False)
    await bench.ask(stream=True)
    assert [request.on_text is None for request in bench.model.asked] == [True, False]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
async def test_logprob_that_is_not_finite_is_no_internal_error(logprob: float) -> None:
    bench = Bench()
    complete = bench.model.complete

    async def reply(request: ModelRequest) -> ModelReply:
        given = await complete(request)
        assert given.logprobs is not None
        return replace(given, logprobs=[logprob] * len(given.logprobs))

    bench.model.complete = reply  # type: ignore[method-assign]
    if math.isnan(logprob):
        with pytest.raises(ModelError, match="a logprob is nan"):
            await bench.ask()
    else:
        assert set((await bench.ask()).logprobs or []) == {LEAST_LOGPROB}


async def test_earlier_conversations_are_found_by_the_id_of_their_answer_alone() -> None:
    bench = Bench()
    call = bench.begin()
    reply = await call.answer()
    head, _, number = call.ticket.id.rpartition("-")
    assert bench.session.earlier(call.ticket.id) == [USER, reply.message]
    assert [bench.session.earlier(f"{head}-{other}") for other in (int(number) + 1, "9" * 5000, "²", "")] == [None] * 4


async def test_the_model_is_asked_only_when_the_intent_is_durable() -> None:
    bench = Bench()
    bench.journal.hold = asyncio.Event()
    call = bench.begin()
    await asyncio.sleep(0.01)
    assert bench.model.asked == []
    bench.journal.hold.set()
    await call.answer()
    assert [type(record) for record in bench.journal.records] == [IntentRecord, ResponseRecord]


async def test_no_client_has_an_answer_that_is_not_durable() -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    await call.started()
    bench.journal.hold = asyncio.Event()
    bench.model.hold.set()
    answer = asyncio.ensure_future(call.answer())
    await asyncio.sleep(0.01)
    assert "".join([piece async for piece in _so_far(call)]) == "word 1"
    assert not answer.done()
    bench.journal.hold.set()
    assert (await answer).text == "word 1"
    assert bench.recorded(ResponseRecord)[0].message["content"] == "word 1"


async def _text(call: Call) -> AsyncIterator[str]:
    async for piece in call.pieces():
        assert piece is not None
        yield piece.text


async def _so_far(call: Call) -> AsyncIterator[str]:
    text = _text(call)
    while True:
        try:
            yield await asyncio.wait_for(anext(text), 0.01)
        except TimeoutError:
            return


async def test_text_is_sent_before_the_answer_is_complete() -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    pieces = _text(call)
    assert await anext(pieces) == "word "
    bench.model.hold.set()
    assert "".join([piece async for piece in pieces]) == "1"


async def test_pause_of_a_call_is_reported_between_its_pieces() -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    await call.started()
    pieces = call.pieces(0.01)
    assert [await anext(pieces), await anext(pieces)] == [Piece("word "), None]
    bench.model.hold.set()
    assert [piece async for piece in pieces if piece is not None] == [Piece("1")]


async def test_call_that_has_not_begun_is_started_after_a_time() -> None:
    bench = Bench()
    bench.journal.hold = asyncio.Event()
    call = bench.begin()
    await call.started(0.01)
    assert not call.has_pieces
    bench.journal.hold.set()
    await call.started()
    assert call.has_pieces


async def test_a_slow_client_gets_its_text_in_fewer_larger_pieces() -> None:
    bench = Bench()
    call = bench.begin()
    await call.answer()
    assert [piece async for piece in _text(call)] == ["word 1"]


async def test_client_that_disconnects_ends_the_call_of_the_model() -> None:
    bench = Bench()
    await bench.hang_up()
    assert bench.model.cancelled == 1
    assert bench.recorded(ResponseRecord) == []


async def test_a_client_that_hangs_up_during_an_answer_has_used_a_turn_also_after_a_takeover() -> None:
    bench = Bench(Limits(turns=2, tokens=100))
    for _ in range(2):
        await bench.hang_up()
        await bench.session.flush()
        bench.opened()
    assert [mark.abandoned_tokens for mark in bench.recorded(DeliveryRecord)] == [1, 1]
    with pytest.raises(Refused, match="turns"):
        bench.begin()


async def test_client_that_leaves_a_stalled_answer_uses_up_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime.proxy.call.STALLED_SECONDS", -1.0)
    bench = Bench(Limits(turns=1))
    await bench.hang_up()
    bench.begin()


async def test_client_that_leaves_during_held_back_text_uses_up_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime.proxy.call.STALLED_SECONDS", 0.05)
    bench = Bench(Limits(tokens=42))
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    await call.started()
    await asyncio.sleep(0.1)
    bench.model.asked[-1].health.on_tokens(42)
    call.leave(False)
    await call.ended()
    with pytest.raises(Refused, match="tokens"):
        bench.begin()


async def test_concurrent_equal_requests_are_separate_samples() -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    first, second, retry = bench.begin(), bench.begin(), bench.begin(retry=True)
    bench.model.hold.set()
    texts = {(await call.answer()).text for call in (first, second, retry)}
    assert len(texts) == 3
    assert len({request.seed for request in bench.model.asked}) == 3


async def test_retry_gets_the_undelivered_answer_and_no_second_sample() -> None:
    bench = Bench()
    first = await bench.ask(delivered=False)
    again = await bench.ask(retry=True)
    assert again == first
    assert len(bench.model.asked) == 1
    assert (
        await bench.ask(retry=True)
    ).text != first.text  # it is delivered now, so this is a retry of another request


async def test_request_that_is_not_a_retry_never_gets_an_old_answer() -> None:
    bench = Bench()
    first = await bench.ask(delivered=False)
    assert (await bench.ask()).text != first.text


async def test_equal_idempotency_key_joins_the_call_and_only_the_last_cancels_it() -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    first, second = bench.begin(key="k1"), bench.begin(key="k1")
    await first.started()
    first.leave(False)
    await asyncio.sleep(0)
    bench.model.hold.set()
    assert (await second.answer()).text == "word 1"
    second.leave(True)
    assert len(bench.model.asked) == 1
    with pytest.raises(BadRequest, match="another request"):
        bench.begin([USER, USER], key="k1")


async def test_refused_request_does_not_count_as_a_failure() -> None:
    bench = Bench()
    for error in (
        RequestRefused("BadRequest", "logit_bias: 99999 is no token"),
        ModelConfigError("NoToolParser", "tools cannot be used with this server"),
    ):
        bench.model.failures = [error]
        with pytest.raises(ModelError):
            await bench.ask()
        assert refused(error).kind is ErrorKind.BAD_REQUEST
        assert bench.session.failure is None, "else an agent could choose to be run again"


async def test_after_a_failure_the_same_key_makes_a_new_call() -> None:
    bench = Bench()
    bench.model.failures = [ModelError("Unreachable", "it is down")]
    with pytest.raises(ModelError):
        await bench.ask(key="k1")
    assert bench.session.failure is not None
    assert (await bench.ask(key="k1")).text == "word 2"
    assert bench.session.failure is None


async def test_failure_is_kept_until_its_own_caller_continues() -> None:
    bench, other = Bench(), {"role": "user", "content": "another worker"}
    bench.model.failures = [ModelError("Unreachable", "it is down")]
    with pytest.raises(ModelError):
        await bench.ask()
    await bench.ask([other])
    assert bench.session.failure is not None
    await bench.ask()
    assert bench.session.failure is None


async def test_failure_is_kept_after_a_takeover() -> None:
    bench = Bench()
    for error in (RequestRefused("BadRequest", "no such token"), ModelError("Unreachable", "it is down \ud800")):
        bench.model.failures = [error]
        with pytest.raises(ModelError):
            await bench.ask()
        await bench.session.flush()
        failure = bench.opened().failure
        assert (failure is None) is isinstance(error, RequestRefused)
    assert str(failure) == "Unreachable: it is down ?"
    await bench.ask()
    assert bench.opened().failure is None


async def test_client_that_leaves_a_failing_server_has_a_failure() -> None:
    bench, asked = Bench(), asyncio.Event()

    async def failing(request: ModelRequest) -> ModelReply:
        request.health.note("ServerError: status 500")
        asked.set()
        forever: asyncio.Future[ModelReply] = asyncio.get_running_loop().create_future()
        return await forever

    bench.model.complete = failing  # type: ignore[method-assign]
    call = bench.begin()
    await asked.wait()
    call.leave(False)
    await call.ended()
    assert str(bench.session.failure) == "Unreachable: ServerError: status 500"


async def test_failure_of_a_call_whose_retry_already_runs_is_not_kept() -> None:
    bench, both_run = Bench(), asyncio.Event()
    complete = bench.model.complete

    async def failing_first(request: ModelRequest) -> ModelReply:
        if request.turn == 0:
            await both_run.wait()
            raise ModelError("Unreachable", "it is down")
        reply = await complete(request)
        both_run.set()
        return reply

    bench.model.complete = failing_first  # type: ignore[method-assign]
    first, retry = bench.begin(), bench.begin(retry=True)
    await retry.answer()
    with pytest.raises(ModelError):
        await first.answer()
    assert bench.session.failure is None


@pytest.mark.parametrize("leaves_first", [False, True])
async def test_retry_of_an_answer_that_could_not_be_recorded_is_a_new_call(leaves_first: bool) -> None:
    bench = Bench()
    bench.journal.failures.append(StorageUnavailable("no answer for 600 s"))
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    await call.started()
    bench.journal.hold = asyncio.Event()
    bench.model.hold.set()
    await asyncio.sleep(0.01)
    assert call.answered
    if leaves_first:
        call.leave(False)
    bench.journal.hold.set()
    with pytest.raises(StorageError):
        await call.answer()
    if not leaves_first:
        call.leave(False)
    assert (await bench.ask(retry=True)).text == "word 2"


async def test_a_retry_after_a_takeover_gets_the_recorded_answer() -> None:
    bench = Bench()
    first = await bench.ask(delivered=False)
    bench.journal.records = [r for r in bench.journal.records if not isinstance(r, DeliveryRecord)]
    bench.opened()
    assert await bench.ask(retry=True) == first
    assert len(bench.model.asked) == 1


async def test_repeated_request_after_a_takeover_supersedes_an_uncertain_answer() -> None:
    bench = Bench()
    first = await bench.ask()
    bench.opened()
    second = await bench.ask()
    await bench.session.end()
    assert second.text != first.text
    assert [turn.response.message for turn in fold(linear(bench.journal.records)) if turn.response] == [second.message]


async def test_answer_counts_when_its_client_continues_from_it() -> None:
    bench = Bench()
    first = await bench.ask(delivered=False)
    await bench.ask([USER, first.message, USER])
    await bench.session.end()
    assert [turn.number for turn in fold(linear(bench.journal.records))] == [0, 1]


async def test_reply_through_another_replica_is_kept_until_its_delivery_is_reported() -> None:
    bench = Bench()
    call = bench.begin()
    first = await call.answer()
    call.leave(None)
    assert await bench.ask(retry=True) == first
    other = bench.begin([USER, USER])
    await other.answer()
    other.leave(None)
    bench.session.report_delivery(other.ticket.turn, delivered=True)
    assert (await bench.ask([USER, USER], retry=True)).text != "word 2"


async def test_conversation_continues_from_the_engines_ids() -> None:
    bench = Bench()
    first = await bench.ask()
    second = await bench.ask([USER, first.message, USER])
    prefix = bench.model.asked[1].prefix
    assert prefix is not None
    assert (prefix.messages, list(prefix.ids)) == (2, [7, 7, 7, 1002, 1003])
    assert second.prompt_token_ids == [7, 7, 7, 1002, 1003, 7, 7, 7]
    assert bench.recorded(ResponseRecord)[1].prompt_token_ids == [7, 7, 7]


async def test_other_tools_give_another_prompt_so_no_prefix_is_kept() -> None:
    bench = Bench()
    first = await bench.ask()
    await bench.ask([USER, first.message, USER], tools=[{"type": "function", "function": {"name": "f"}}])
    assert bench.model.asked[1].prefix is None


async def test_settings_of_the_session_replace_those_of_the_client() -> None:
    stored = Sampling.model_validate_json(Sampling(temperature=1.0, extra={"top_k": 5}).model_dump_json())
    bench = Bench(sampling=stored, seed=40)
    await bench.ask(sampling=Sampling(temperature=0.0, top_p=0.5, extra={"top_k": 1, "min_p": 0.1}), seed=1)
    asked = bench.model.asked[0]
    assert asked.sampling == Sampling(temperature=1.0, top_p=0.5, extra={"top_k": 5, "min_p": 0.1})
    assert asked.seed == 40


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(turns=1), StopReason.MAX_TURNS),
        (Limits(tokens=4), StopReason.TOKEN_BUDGET),
        (Limits(requests=1), StopReason.RESOURCE_LIMIT),
        (Limits(conversation_bytes=64), StopReason.RESOURCE_LIMIT),
    ],
)
async def test_call_over_budget_is_refused_and_reported_once_after_a_while(
    limits: Limits, reason: StopReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: asyncio.Queue[Exhausted] = asyncio.Queue()

    monkeypatch.setattr(session_module, "GRACE_SECONDS", 0.01)
    bench = Bench(limits, told.put)
    await bench.ask()
    for _ in range(2):
        with pytest.raises(Refused, match="cannot make further calls") as refused:
            bench.begin()
        assert refused.value.kind is ErrorKind.OVER_BUDGET
        assert told.empty()
    assert (await told.get()).reason is reason
    await asyncio.sleep(0.03)
    assert told.empty()


async def test_rewritten_history_counts_its_new_messages_alone_also_after_a_takeover() -> None:
    bench = Bench(Limits(conversation_bytes=240_000))
    history = [{"role": "user", "content": f"{number} {'x' * 10_000}"} for number in range(20)]
    for number in range(3, 20):
        await bench.ask([{"role": "user", "content": f"rewritten {number}"}, *history[number - 3 : number]])
    bench.opened()
    await bench.ask([{"role": "user", "content": "taken over"}, *history])
    intents = bench.recorded(IntentRecord)
    assert len({id(message) for intent in intents for message in intent.messages if "xx" in message["content"]}) == 20
    await bench.ask([{"role": "user", "content": "new" * 10_000}])
    with pytest.raises(Refused, match="240000 bytes of conversation are used up"):
        bench.begin()


async def test_call_that_failed_or_was_given_up_is_recorded_as_ended_under_its_runner() -> None:
    bench = Bench()
    bench.model.failures = [ModelError("Unreachable", "it is down")]
    with pytest.raises(ModelError):
        await bench.ask()
    await bench.hang_up()
    await bench.session.flush()
    assert [(mark.turn, mark.delivered) for mark in bench.recorded(DeliveryRecord)] == [(0, False), (1, False)]


async def test_the_time_of_a_session_also_ends_a_call_that_runs() -> None:
    bench = Bench(Limits(seconds=1))
    bench.session.settings.__dict__["created"] = time.time() - 0.95
    bench.model.hold = asyncio.Event()
    with pytest.raises(Refused, match="AgentTimeout"):
        await bench.ask()
    assert bench.model.cancelled == 1


async def test_calls_over_the_limit_of_concurrent_ones_wait_for_a_place() -> None:
    bench = Bench(Limits(concurrent_calls=2))
    bench.model.hold = asyncio.Event()
    calls = [bench.begin() for _ in range(5)]
    await asyncio.sleep(0.01)
    assert len(bench.model.asked) == 2
    bench.model.hold.set()
    await asyncio.gather(*(call.answer() for call in calls))
    assert len(bench.model.asked) == 5


async def test_the_end_of_a_session_stops_its_calls_and_refuses_further_ones() -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    await call.started()
    await bench.session.end()
    with pytest.raises(Refused, match="has ended") as refused:
        await call.answer()
    assert refused.value.kind is ErrorKind.SESSION_ENDED
    with pytest.raises(Refused, match="has ended"):
        bench.begin()


async def test_an_owner_that_was_superseded_gives_out_no_answer() -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    await call.started()
    bench.journal.superseded = True
    bench.model.hold.set()
    with pytest.raises(Superseded):
        await call.answer()


async def test_unknown_model_is_reported_with_the_served_ones() -> None:
    bench = Bench(models=["policy"])
    with pytest.raises(Refused, match="use policy") as refused:
        bench.begin()
    assert refused.value.kind is ErrorKind.MODEL_NOT_FOUND


STEPS = st.lists(
    st.tuples(st.integers(-1, 30), st.booleans(), st.integers(0, 2), st.booleans(), st.booleans()),
    min_size=1,
    max_size=16,
)


@settings(max_examples=examples(60))
@given(STEPS)
async def test_each_delivered_token_is_trained_once_in_any_order_of_conversations(
    steps: list[tuple[int, bool, int, bool, bool]],
) -> None:
    """Each step has: the turn to continue from (none: a new conversation), whether it is delivered, the number of new
    messages, whether another process takes over first, and whether there are tools.
    """
    bench = Bench()
    said: list[list[Message]] = []
    wanted: dict[str, bool] = {}
    for position, delivered, more, taken_over, tools in steps:
        if taken_over:
            await bench.session.flush()
            bench.opened()
        before = said[position % len(said)] if said and position >= 0 else []
        for message in (m for m in before if m["role"] == "assistant"):
            wanted[message["content"]] = True
        new: list[Message] = [{"role": "user", "content": f"{position} {more}"}] * (more or (not before))
        reply = await bench.ask([*before, *new], delivered=delivered, tools=[{"name": "f"}] if tools else [])
        wanted[reply.text] = delivered
        said.append([*before, *new, reply.message])
    await bench.session.end()

    records = linear(bench.journal.records)
    turns = fold(records)
    assert {turn.response.message["content"] for turn in turns if turn.response} == {t for t, w in wanted.items() if w}
    by_text = {conversation[-1]["content"]: conversation for conversation in said}
    for turn in turns:
        assert turn.response is not None
        assert turn.conversation() == by_text[turn.response.message["content"]]
    sampled = [
        token
        for branch in token_branches(records)
        for token, mask in zip(branch.token_ids, branch.mask, strict=True)
        if mask
    ]
    expected = [id for turn in turns if turn.response for id in turn.response.completion_token_ids or []]
    assert sorted(sampled) == sorted(expected)
    assert linear(records) == records


async def test_stopping_runner_can_wait_until_every_client_has_its_answer() -> None:
    bench = Bench(Limits(turns=1))
    assert (bench.session.calls, bench.session.over) == (0, None)
    call = bench.begin()
    await call.answer()
    assert bench.session.is_idle
    assert bench.session.calls == 1, "its last bytes are on their way"
    call.leave(True)
    assert bench.session.calls == 0
    over = bench.session.over
    assert over is not None
    assert over.reason is StopReason.MAX_TURNS


def last_mark(bench: Bench, turn: int) -> bool:
    """Return the last recorded delivery of a turn."""
    return bool([mark.delivered for mark in bench.recorded(DeliveryRecord) if mark.turn == turn][-1])


async def test_delivery_of_other_calls_is_recorded_if_a_client_leaves_while_the_record_is_written() -> None:
    bench = Bench()
    await bench.ask(delivered=False)
    bench.journal.hold = asyncio.Event()
    call = bench.begin([{"role": "user", "content": "another"}])
    await asyncio.sleep(0)
    call.leave(False)
    await call.ended()
    bench.journal.hold.set()
    await bench.session.end()
    assert not last_mark(bench, 0), "otherwise this answer and that of its retry would both count"


async def test_delivery_of_a_repeated_answer_is_recorded_at_once() -> None:
    bench = Bench()
    await bench.ask(key="k", delivered=False)
    await bench.session.flush()
    assert not last_mark(bench, 0)
    await bench.ask(key="k")
    await asyncio.sleep(0.01)
    assert last_mark(bench, 0), "the process may die before the next call"


async def test_delivered_answer_stays_delivered_when_a_later_process_repeats_it_to_a_client_that_leaves() -> None:
    bench = Bench()
    await bench.ask(key="k")
    await bench.session.flush()
    bench.opened()
    await bench.ask(key="k", delivered=False)
    await bench.session.flush()
    assert last_mark(bench, 0)
