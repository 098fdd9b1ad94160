"""Time that a server loses for a program does not count, and only the server's own failures excuse the program."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from agent_runtime.engine.attempt.agent_clock import AgentClock, agent_seconds_of
from agent_runtime.engine.attempt.model_calls import AttemptModel
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.models import probe
from agent_runtime.models.base import (
    RATE_LIMITED,
    CallHealth,
    ContextExceeded,
    ModelError,
    ModelReply,
    ModelRequest,
    RequestRefused,
)
from agent_runtime.proxy.refused import call_error
from rollout_api.model import Sampling
from rollout_api.records import CallError, DeliveryRecord, IntentRecord, Message, Record

pytestmark = pytest.mark.usefixtures("virtual_clock")

REQUEST = ModelRequest([], [], Sampling(), 1, "s", "t", 0, 0)
REPLY = ModelReply({"role": "assistant", "content": "x"}, "stop")


class Told:
    """Answers as the test sets."""

    name, token_capture = "told", "Tokens"

    def __init__(self) -> None:
        self.answer: Callable[[ModelRequest], Awaitable[ModelReply]] = self.well
        self.groups: list[str] = []

    async def well(self, request: ModelRequest) -> ModelReply:
        self.groups.append(request.group)
        return REPLY

    async def complete(self, request: ModelRequest) -> ModelReply:
        return await self.answer(request)

    async def check(self) -> None: ...

    async def close(self) -> None: ...


class Bench:
    def __init__(self) -> None:
        self.told, self.drain = Told(), Drain()
        self.clock = AgentClock(3600)
        self.clock.start()
        self.model = AttemptModel(lambda: self.told, "group-4", self.clock, self.drain)

    def used(self, later: float = 0.0) -> float:
        """Return the time that the program will have used after this many seconds."""
        now = self.clock.now
        self.clock.now = lambda: now() + later
        try:
            return self.clock.used()
        finally:
            self.clock.now = now

    async def fails(self, error: Exception) -> None:
        async def answer(_request: ModelRequest) -> ModelReply:
            raise error

        self.told.answer = answer
        with pytest.raises(type(error)):
            await self.model.complete(REQUEST)

    async def answers(self) -> None:
        self.told.answer = self.told.well
        assert await self.model.complete(REQUEST) == REPLY


async def test_probe_waits_for_a_server_that_limits_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.02)

    async def limited(request: ModelRequest) -> ModelReply:
        request.health.note(f"{RATE_LIMITED}: status 429")
        await asyncio.sleep(0.1)
        request.health.note(None)
        return REPLY

    told = Told()
    told.answer = limited
    assert await probe.is_answered(told, replace(REQUEST, health=CallHealth()))


async def test_a_test_that_a_program_asks_for_is_no_call_of_its_attempt() -> None:
    bench = Bench()
    await bench.fails(ModelError("Unreachable", "x"))
    bench.told.answer = bench.told.well
    assert await probe.is_answered(bench.model, REQUEST)
    assert bench.model.failure is not None, "an answered call would have ended the failure"
    assert bench.told.groups == [REQUEST.group]


async def test_calls_of_a_rollout_have_the_routing_key_of_their_group() -> None:
    bench = Bench()
    await bench.answers()
    assert bench.told.groups == ["group-4"]


async def test_a_failure_counts_as_an_excuse_until_the_next_answer() -> None:
    bench = Bench()
    error = ModelError("ServerError", "status 500")
    await bench.fails(error)
    assert (bench.model.failure, bench.model.trouble()) == (error, error)
    assert bench.model.failing_seconds(asyncio.get_running_loop().time() + 1) > 0
    await bench.answers()
    assert (bench.model.failure, bench.model.trouble()) == (None, None)
    assert bench.model.failing_seconds(asyncio.get_running_loop().time()) == 0


@pytest.mark.parametrize("reason", ["BadRequest", "TextModel", "NoToolParser"])
async def test_a_failure_that_the_programs_request_can_cause_is_not_an_excuse(reason: str) -> None:
    bench = Bench()
    await bench.fails(ModelError(reason, "no such field"))
    assert bench.model.trouble() is None
    with pytest.raises(RequestRefused, match="not a bare prompt"):
        await bench.model.complete_prompt("x", REQUEST)
    assert bench.model.trouble() is None


async def test_a_refusal_is_remembered_until_the_next_answer() -> None:
    bench = Bench()
    for refusal in (ContextExceeded("too long"), RequestRefused("BadRequest", "no such field")):
        await bench.fails(refusal)
        assert (bench.model.refusal, bench.model.failure) == (refusal, None)
    await bench.answers()
    assert bench.model.refusal is None


async def test_time_behind_a_shut_gate_and_on_failed_tries_does_not_count() -> None:
    bench = Bench()
    gate = asyncio.Event()

    async def held(request: ModelRequest) -> ModelReply:
        request.health.on_hold(True)
        await gate.wait()
        request.health.on_hold(False)
        return REPLY

    bench.told.answer = held
    call = asyncio.ensure_future(bench.model.complete(REQUEST))
    await asyncio.sleep(0)
    before = bench.used()
    assert bench.used(100) == pytest.approx(before, abs=0.1)
    gate.set()
    await call

    async def failing(request: ModelRequest) -> ModelReply:
        request.health.note("Unreachable: refused")
        assert str(bench.model.trouble()) == "Unreachable: Unreachable: refused"
        request.health.failing, request.health.lost_seconds = None, 50.0
        return REPLY

    bench.told.answer = failing
    await bench.model.complete(REQUEST)
    assert bench.used(50) == pytest.approx(before, abs=1.0)


async def test_a_call_cancelled_while_on_hold_does_not_stop_the_clock() -> None:
    bench = Bench()

    async def held(request: ModelRequest) -> ModelReply:
        request.health.on_hold(True)
        await asyncio.Event().wait()
        return REPLY

    bench.told.answer = held
    call = asyncio.ensure_future(bench.model.complete(REQUEST))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert bench.used(100) > 99
    assert bench.model.trouble() is None


async def test_program_that_times_out_at_a_failing_server_is_not_to_blame() -> None:
    bench = Bench()
    before = bench.used()

    async def failing(request: ModelRequest) -> ModelReply:
        request.health.note("Unreachable: refused")
        await asyncio.Event().wait()
        return REPLY

    bench.told.answer = failing
    call = asyncio.ensure_future(bench.model.complete(REQUEST))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.wait([call])
    assert str(bench.model.failure) == "Unreachable: Unreachable: refused"
    await bench.answers()
    assert bench.used() - before < 0.05


async def test_time_of_a_failed_call_counts_when_only_other_requests_are_answered() -> None:
    bench = Bench()
    before = bench.used()

    async def failing(request: ModelRequest) -> ModelReply:
        await asyncio.sleep(0.05)
        raise ModelError("ServerError", "status 500: roles must alternate")

    bench.told.answer = failing
    with pytest.raises(ModelError):
        await bench.model.complete(replace(REQUEST, messages=[{"role": "user", "content": "bad"}]))
    bench.told.answer = bench.told.well
    await bench.model.complete(replace(REQUEST, health=CallHealth()))
    assert bench.used() - before > 0.04


async def test_once_a_runner_drains_new_calls_wait_for_the_next_runner() -> None:
    bench = Bench()
    bench.drain.request()
    call = asyncio.ensure_future(bench.model.complete(REQUEST))
    await asyncio.sleep(0)
    assert (bench.model.parked, bench.told.groups) == (1, [])
    call.cancel()
    await asyncio.wait([call])
    assert bench.model.parked == 0


@pytest.mark.parametrize(("held_seconds", "is_blamed"), [(600.0, True), (0.01, False)])
async def test_given_up_call_is_a_failure_when_it_was_held_all_the_time(held_seconds: float, is_blamed: bool) -> None:
    bench = Bench()

    async def held(request: ModelRequest) -> ModelReply:
        try:
            await asyncio.Event().wait()
        finally:
            request.health.held_seconds += held_seconds
        return REPLY

    bench.told.answer = held
    call = asyncio.ensure_future(bench.model.complete(replace(REQUEST, health=CallHealth())))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.wait([call])
    assert (bench.model.failure is not None, REQUEST.turn in bench.model.unanswered) == (is_blamed, not is_blamed)


async def test_next_runner_knows_why_calls_had_no_answer_and_gives_their_time_back() -> None:
    failed = CallError(reason="ServerError", message="status 500")
    asked: list[Message] = [{"role": "user", "content": "hi"}]

    def records(turn: int, error: CallError | None, at: float) -> list[Record]:
        intent = IntentRecord(turn=turn, time=at, keep=0, messages=list(asked), agent_seconds=at)
        return [intent, DeliveryRecord(turn=turn, time=at + 9, delivered=False, error=error)]

    refused = CallError(reason="BadRequest", message="no", of_request=True)
    recorded = [*records(0, failed, 100.0), *records(1, None, 110.0), *records(2, refused, 120.0)]
    bench = Bench()
    bench.clock = AgentClock(3600, agent_seconds_of(recorded))
    bench.clock.start()
    model = AttemptModel(lambda: bench.told, "g", bench.clock, bench.drain)
    model.restore(recorded)
    assert [(turn, str(error)) for turn, error in model.failures.items()] == [(0, "ServerError: status 500")]
    assert (model.unanswered, model.failure) == ({1}, None)
    await model.complete(replace(REQUEST, messages=asked, health=CallHealth()))
    assert bench.clock.used() == pytest.approx(120 - 9, abs=1)
    model.restore(records(3, failed, 130.0))
    assert model.failure is model.failures[3]


async def test_time_that_no_record_counts_is_not_given_back_to_the_next_runner() -> None:
    intent = IntentRecord(turn=0, time=100.0, keep=0, messages=[], agent_seconds=20.0)
    error = CallError(reason="ServerError", message="status 500")
    bench = Bench()
    bench.clock = AgentClock(3600, 20.0)
    bench.clock.start()
    model = AttemptModel(lambda: bench.told, "g", bench.clock, bench.drain)
    model.restore([intent, DeliveryRecord(turn=0, time=115.0, delivered=False, error=error)])
    await model.complete(replace(REQUEST, health=CallHealth()))
    assert bench.clock.used() == pytest.approx(20, abs=1)


@pytest.mark.parametrize("refusal", [ContextExceeded("too long"), RequestRefused("BadRequest", "no credit left")])
async def test_next_runner_knows_why_the_latest_call_was_refused(refusal: Exception) -> None:
    intent = IntentRecord(turn=0, time=100.0, keep=0, messages=[])
    record = DeliveryRecord(turn=0, time=101.0, delivered=False, error=call_error(refusal))
    bench = Bench()
    bench.model.restore([intent, record])
    assert (type(bench.model.refusal), str(bench.model.refusal)) == (type(refusal), str(refusal))
    bench.model.restore([intent, record, intent.model_copy(update={"turn": 1})])
    assert bench.model.refusal is None
