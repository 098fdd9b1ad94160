"""Calls during server failures and policy updates. tests/integration/served has the tests that take real time."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime.models import probe
from agent_runtime.models.base import CallHealth, ModelConfigError, ModelError, ModelReply, ModelRequest
from agent_runtime.models.pool import gate
from agent_runtime.models.pool import model as model_module
from agent_runtime.models.pool.admission_queue import WaitingCalls
from agent_runtime.models.pool.routing import preference
from agent_runtime.models.pool.server import Load, LoadReader, Pressure
from agent_runtime.models.token_exact.routes import Progress
from agent_runtime.proxy.chat import PromptModel
from rollout_api.model_server import Gate
from rollout_api.records import PolicySpan
from tests.unit.models.served.fake_fleet import WHOLE, Behaviour, FakeEngine, FakeFleet, request, say, versions

pytestmark = pytest.mark.usefixtures("virtual_clock")

SERVERS = ("server-0", "server-1", "server-2")
ORDER = preference("group-0", SERVERS)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 there is nothing that tells
            await asyncio.sleep(0.01)


async def stall_after_two(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
    await say(engine, progress, on_tokens, upto=2)
    await asyncio.Event().wait()


def fail_with(error: Exception, upto: int = 0):  # type: ignore[no-untyped-def]
    async def behave(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        await say(engine, progress, on_tokens, upto)
        raise error

    return behave


@pytest.mark.parametrize("reason", ["NotReady", "OtherPolicy"])
async def test_call_at_a_server_without_its_policy_moves_and_the_server_gets_no_more_calls(
    fleet: FakeFleet, reason: str
) -> None:
    model = await fleet.open(*SERVERS, current=7, target=7)
    gone = fleet.engine(ORDER[0])
    gone.is_well, gone.behaviour = False, fail_with(ModelError(reason, "its engine was started again"))
    for _ in range(3):
        assert versions(await model.complete(request())) == [(len(WHOLE), "7")]
    assert fleet.calls()[gone.url] == 1


async def test_members_of_a_group_find_their_prefix_at_one_server(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS)
    for turn in range(5):
        await model.complete(request(turn=turn))
    assert fleet.calls() == {f"http://{name}": 5 * (name == ORDER[0]) for name in SERVERS}
    assert model.spills == 0


async def test_calls_carry_the_version_for_the_cache_and_in_the_record(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0", current=7, target=7, update=3)
    reply = await model.complete(request())
    assert versions(reply) == [(len(WHOLE), "7")]
    assert fleet.engine("server-0").salts == ["7"]


@pytest.mark.parametrize("odd", [{"state": "Evicted", "ready": False}, {"uid": "2"}, None], ids=str)
async def test_call_of_a_removed_server_continues_elsewhere_with_its_tokens(
    fleet: FakeFleet, odd: dict[str, object] | None
) -> None:
    model = await fleet.open(*SERVERS)
    fleet.engine(ORDER[0]).behaviour = stall_after_two
    health = CallHealth()
    call = asyncio.create_task(model.complete(request(health=health)))
    await until(lambda: fleet.engine(ORDER[0]).asked)
    await asyncio.sleep(0.02)
    if odd is None:
        await fleet.tell(*ORDER[1:])
    else:
        await fleet.tell(*SERVERS, odd={ORDER[0]: odd})
    reply = await asyncio.wait_for(call, 10)
    assert reply.completion_token_ids == WHOLE
    assert fleet.engine(ORDER[1]).began_with == [WHOLE[:2]]
    assert versions(reply) == [(len(WHOLE), "0")]
    assert model.resent == 1
    assert health.failing is None
    assert 0 < health.lost_seconds < 5


async def test_tokens_from_a_server_that_has_just_left_are_not_of_the_version_that_came_with_it(
    fleet: FakeFleet,
) -> None:
    model, go_on = await fleet.open(*SERVERS), asyncio.Event()

    async def send_more(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        await say(engine, progress, on_tokens, upto=2)
        await go_on.wait()
        progress.ids += WHOLE[2:4]
        progress.logprobs += [-0.5, -0.5]
        on_tokens(2)
        await asyncio.Event().wait()

    fleet.engine(ORDER[0]).behaviour = send_more
    call = asyncio.create_task(model.complete(request()))
    await until(lambda: fleet.engine(ORDER[0]).asked)
    await asyncio.sleep(0.02)
    # The event loop finds the status and the tokens at the same time. The last server that took calls drains, so the
    # version has changed without the gate.
    telling = asyncio.create_task(fleet.tell(ORDER[1], current=1, target=1, update=1))
    await asyncio.sleep(0)
    go_on.set()
    await telling
    reply = await asyncio.wait_for(call, 10)
    assert reply.completion_token_ids == WHOLE
    assert versions(reply) == [(2, "0"), (2, None), (2, "1")]


@pytest.mark.parametrize(("name", "recorded"), [("1", "1"), ("loading-1", None), ("asleep-1", None), ("default", None)])
async def test_versions_that_the_gate_does_not_know_are_those_that_the_server_reports(
    fleet: FakeFleet, name: str, recorded: str | None
) -> None:
    model, go_on = await fleet.open("server-0"), asyncio.Event()

    async def answer(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        await say(engine, progress, on_tokens, upto=2)
        await go_on.wait()
        await say(engine, progress, on_tokens)
        # The gate knows the first two versions, so the report does not count for them.
        progress.policy_spans = [PolicySpan(tokens=1, version="9"), PolicySpan(tokens=2, version="0")]
        progress.policy_spans += [PolicySpan(tokens=3, version=name)]

    fleet.engine("server-0").behaviour = answer
    call = asyncio.create_task(model.complete(request()))
    await until(lambda: fleet.engine("server-0").asked)
    await asyncio.sleep(0.02)
    await fleet.tell("server-0", gate="Shut", target=1, update=1, paused=True, mixed=["uid/0"])
    await fleet.tell("server-0", gate="Open", current=1, paused=False)
    go_on.set()
    assert versions(await asyncio.wait_for(call, 10)) == [(3, "0"), (3, recorded)]


@pytest.mark.parametrize("told_by", ["status", "metrics"])
async def test_answers_of_a_restarted_engine_with_unknown_weights_are_dropped(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    steps = 900.0

    async def read(self: LoadReader, url: str) -> Load:
        return Load(Pressure(0.1, 0), steps)

    monkeypatch.setattr(LoadReader, "read", read)
    monkeypatch.setattr(fleet.model, "_sample_seconds", 0.01)
    model = await fleet.open(*SERVERS)
    fleet.engine(ORDER[0]).behaviour = stall_after_two
    call = asyncio.create_task(model.complete(request()))
    await until(lambda: fleet.engine(ORDER[0]).asked)
    await asyncio.sleep(0.05)
    if told_by == "metrics":
        steps = 3.0
    else:
        await fleet.tell(*SERVERS, odd={ORDER[0]: {"restarts": 1}})
    reply = await asyncio.wait_for(call, 10)
    assert reply.completion_token_ids == WHOLE
    assert fleet.engine(ORDER[1]).began_with == [[]]
    assert versions(reply) == [(len(WHOLE), "0")]


async def test_a_busy_server_that_misses_its_probes_keeps_the_calls_that_it_has(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS)
    busy, end = fleet.engine(ORDER[0]), asyncio.Event()

    async def wait(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        await end.wait()
        await say(engine, progress, on_tokens)

    busy.behaviour = wait
    call = asyncio.create_task(model.complete(request()))
    await until(lambda: busy.asked)
    await fleet.tell(*SERVERS, odd={ORDER[0]: {"ready": False, "state": "PendingWeights"}})
    await model.complete(request(turn=1))
    assert len(fleet.engine(ORDER[1]).asked) == 1
    end.set()
    assert (await call).text == busy.url
    await fleet.tell(*SERVERS)
    await model.complete(request(turn=2))
    assert len(busy.asked) == 2


async def test_call_continues_with_its_tokens_after_a_broken_stream(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS)
    fleet.engine(ORDER[0]).behaviour = fail_with(ModelError("Interrupted", "reset"), upto=3)
    reply = await model.complete(request())
    assert reply.completion_token_ids == WHOLE
    assert fleet.engine(ORDER[1]).began_with == [WHOLE[:3]]


async def test_a_call_with_a_grammar_starts_over_where_a_stream_broke(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS)

    async def break_off(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        progress.has_grammar = True
        await say(engine, progress, on_tokens, upto=3)
        raise ModelError("Interrupted", "reset")

    fleet.engine(ORDER[0]).behaviour = break_off
    reply = await model.complete(request())
    assert fleet.engine(ORDER[1]).began_with == [[]]
    assert (reply.completion_token_ids, versions(reply)) == (WHOLE, [(len(WHOLE), "0")])


async def test_call_with_a_grammar_fails_when_its_stream_breaks_again_and_again(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "CALL_SECONDS", 2.0)
    model = await fleet.open("server-0")

    async def break_off(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        progress.has_grammar = True
        await say(engine, progress, on_tokens, upto=3)
        raise ModelError("Interrupted", "reset")

    server = fleet.engine("server-0")
    server.behaviour = break_off
    # On a busy machine the server's last stream may stand still for the whole time.
    with pytest.raises(ModelError, match=r"reset|sent no token"):
        await asyncio.wait_for(model.complete(request()), 60)
    assert len(server.asked) < 10


async def test_bare_prompt_moves_between_servers_and_versions_like_a_chat(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS, current=7, target=7)
    assert isinstance(model, PromptModel)
    fleet.engine(ORDER[0]).behaviour = fail_with(ModelError("Interrupted", "reset"), upto=3)
    reply = await model.complete_prompt([4, 2], request())
    assert reply.completion_token_ids == WHOLE
    assert versions(reply) == [(len(WHOLE), "7")]
    assert fleet.engine(ORDER[1]).began_with == [WHOLE[:3]]
    assert [fleet.engine(name).prompts for name in ORDER[:2]] == [[[4, 2]], [[4, 2]]]


async def test_unreachable_server_gets_no_calls_until_it_answers_again(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS)
    gone = fleet.engine(ORDER[0])
    gone.is_well, gone.behaviour = False, fail_with(ModelError("Unreachable", "refused"))
    for turn in range(4):
        await model.complete(request(turn=turn))
    assert len(gone.asked) == 1
    assert len(fleet.engine(ORDER[1]).asked) == 4


async def test_a_server_that_answers_again_gets_its_groups_back(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS)
    back = fleet.engine(ORDER[0])
    back.behaviour = fail_with(ModelError("Unreachable", "refused"))
    await model.complete(request())
    back.behaviour = say
    await asyncio.sleep(0.05)
    await model.complete(request(turn=1))
    assert [asked.turn for asked in back.asked] == [0, 1]


@pytest.mark.parametrize(
    "error", [ModelConfigError("ModelNotFound", "no such model"), ModelError("BadRequest", "images are not supported")]
)
async def test_error_of_every_server_is_raised_immediately(fleet: FakeFleet, error: ModelError) -> None:
    model = await fleet.open(*SERVERS)
    fleet.engine(ORDER[0]).behaviour = fail_with(error)
    with pytest.raises(ModelError, match=error.message):
        await model.complete(request())
    assert model.resent == 0


@pytest.mark.parametrize("field", ["on_text", "on_reasoning"])
async def test_text_that_a_client_has_read_is_not_sent_twice(fleet: FakeFleet, field: str) -> None:
    model = await fleet.open(*SERVERS)

    async def speak_and_break(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        getattr(engine.asked[-1], field)("Half of it")
        raise ModelError("Interrupted", "reset")

    for engine in fleet.engines.values():
        engine.behaviour, engine.token_capture = speak_and_break, "Chat"
    said: list[str] = []
    listening: dict[str, Any] = {field: said.append}
    with pytest.raises(ModelError, match="reset"):
        await model.complete(request(**listening))
    assert said == ["Half of it"]


@pytest.mark.parametrize("field", ["on_text", "on_reasoning"])
async def test_text_continues_when_a_call_is_sent_again(fleet: FakeFleet, field: str) -> None:
    model = await fleet.open(*SERVERS)

    def speak(*pieces: str, error: ModelError | None = None) -> Behaviour:
        async def behave(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
            for piece in pieces:
                getattr(engine.asked[-1], field)(piece)
            await say(engine, progress, on_tokens, upto=3 if error else len(WHOLE))
            if error is not None:
                raise error

        return behave

    fleet.engine(ORDER[0]).behaviour = speak("Half", " of", error=ModelError("Interrupted", "reset"))
    fleet.engine(ORDER[1]).behaviour = speak("Half of ", "it", ".")
    said: list[str] = []
    listening: dict[str, Any] = {field: said.append}
    await model.complete(request(**listening))
    assert said == ["Half", " of", " ", "it", "."]


async def test_no_call_starts_behind_a_shut_gate_and_none_loses_time(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0")
    await fleet.tell("server-0", gate=Gate.SHUT, update=1, target=1)
    held: list[bool] = []
    health = CallHealth(on_hold=held.append)
    call = asyncio.create_task(model.complete(request(health=health)))
    await asyncio.sleep(0.1)
    assert (fleet.engine("server-0").asked, model.waiting, held) == ([], 1, [True])
    await fleet.tell("server-0", gate=Gate.OPEN, update=1, current=1)
    assert versions(await call) == [(len(WHOLE), "1")]
    assert held == [True, False]
    assert health.held_seconds > 0.09
    assert health.lost_seconds == 0
    assert model.gate_seconds > 0.09


async def test_a_call_that_runs_keeps_its_stream_behind_the_gate_and_its_time(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0")
    engine = fleet.engine("server-0")
    go_on = asyncio.Event()

    async def pause_after_two(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        await say(engine, progress, on_tokens, upto=2)
        await go_on.wait()
        await say(engine, progress, on_tokens)

    engine.behaviour = pause_after_two
    held: list[bool] = []
    call = asyncio.create_task(model.complete(request(health=CallHealth(on_hold=held.append))))
    await until(lambda: engine.asked)
    await asyncio.sleep(0.05)
    acknowledged = asyncio.Event()
    model.on_acknowledged = acknowledged.set
    await fleet.tell("server-0", ready=False, gate=Gate.SHUT, update=1, target=1)
    assert held[-1]
    await fleet.tell("server-0", ready=False, paused=True)
    await asyncio.wait_for(acknowledged.wait(), 30)
    assert model.acknowledged == 1
    go_on.set()
    await asyncio.sleep(0.05)
    assert not call.done(), "its version is not known before the gate opens"
    await fleet.tell("server-0", gate=Gate.OPEN, paused=False, current=1)
    reply = await asyncio.wait_for(call, 10)
    assert versions(reply) == [(2, "0"), (4, "1")]
    assert not held[-1]
    assert len(engine.asked) == 1


async def test_cancelled_call_frees_its_place(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0")
    fleet.engine("server-0").behaviour = stall_after_two
    calls = [asyncio.create_task(model.complete(request(f"group-{n}"))) for n in range(40)]
    await until(lambda: model.waiting)
    assert model.in_flight == 32
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (model.in_flight, model.waiting) == (0, 0)
    fleet.engine("server-0").behaviour = say
    await model.complete(request())


async def test_calls_wait_in_order_for_a_place_without_using_their_time(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0")
    engine, end = fleet.engine("server-0"), asyncio.Event()

    async def wait(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        await end.wait()
        await say(engine, progress, on_tokens)

    engine.behaviour = wait
    healths = [CallHealth() for _ in range(40)]
    calls = [asyncio.create_task(model.complete(request(turn=n, health=h))) for n, h in enumerate(healths)]
    await until(lambda: model.waiting == 8)
    end.set()
    await asyncio.gather(*calls)
    assert [asked.turn for asked in engine.asked] == list(range(40))
    assert all(health.held_seconds > 0 for health in healths[32:])


async def test_call_waits_briefly_for_the_server_with_its_prefix(fleet: FakeFleet) -> None:
    model = await fleet.open(*SERVERS)
    model._places._waiting = WaitingCalls(idle=0.3)
    model._places.servers[ORDER[0]].limit = 1
    own, other = fleet.engine(ORDER[0]), fleet.engine(ORDER[1])
    own.behaviour = stall_after_two
    calls = [asyncio.create_task(model.complete(request(turn=turn))) for turn in range(2)]
    await until(lambda: own.asked)
    await asyncio.sleep(0.05)
    assert (model.waiting, other.asked) == (1, [])
    await calls[1]
    assert [asked.turn for asked in other.asked] == [1]
    back = asyncio.create_task(model.complete(request(turn=2)))
    await until(lambda: model.waiting)
    own.behaviour = say
    calls[0].cancel()
    await back
    assert [asked.turn for asked in own.asked] == [0, 2]


async def test_refusal_for_too_many_calls_lowers_the_limit_of_the_server(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0")
    engine = fleet.engine("server-0")
    refusals = iter([ModelError("RateLimited", "429"), None])

    async def refuse_first(engine: FakeEngine, progress: Progress, on_tokens: Callable[[int], None]) -> None:
        if (error := next(refusals)) is not None:
            raise error
        await say(engine, progress, on_tokens)

    engine.behaviour = refuse_first
    await model.complete(request())
    calls = [asyncio.create_task(model.complete(request(turn=n))) for n in range(3)]
    engine.behaviour = stall_after_two
    await until(lambda: model.waiting)
    assert model.in_flight == 1
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_job_waits_for_the_first_server(fleet: FakeFleet) -> None:
    checking = asyncio.create_task(fleet.model.check())
    await fleet.tell()
    await fleet.tell("server-0", ready=False)
    assert not checking.done()
    await fleet.tell("server-0")
    await asyncio.wait_for(checking, 10)
    assert fleet.model.token_capture == "Tokens"


async def test_job_that_starts_behind_a_shut_gate_waits_for_as_long_as_it_is_shut(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "EMPTY_SECONDS", 0.2)
    checking = asyncio.create_task(fleet.model.check())
    await fleet.tell("server-0", gate=Gate.SHUT, update=1)
    await asyncio.sleep(0.3)
    await fleet.tell("server-0", gate=Gate.SHUT, update=1, paused=True)
    await asyncio.sleep(0.1)
    assert not checking.done(), "servers may sleep for hours"
    await fleet.tell(gate=Gate.OPEN, update=1)
    with pytest.raises(ModelError, match=r"no server of model was available for 0\.2 s"):
        await asyncio.wait_for(checking, 10)


async def test_job_starts_with_the_healthy_servers(fleet: FakeFleet) -> None:
    fleet.connect("http://server-0").is_well = False
    model = await fleet.open("server-0", "server-1")
    assert fleet.engine("server-1").checks == 1
    for number in range(4):
        await model.complete(request(f"group-{number}"))
    assert fleet.engine("server-0").asked == []


async def test_runner_without_status_continues_and_records_no_version(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LEASE_SECONDS", -0.01)
    monkeypatch.setattr(model_module, "UNKNOWN_SECONDS", 0.3)
    model = await fleet.open("server-0", current=4)
    assert versions(await model.complete(request())) == [(len(WHOLE), None)]
    late = asyncio.create_task(model.complete(request()))
    await fleet.tell("server-0")
    await asyncio.sleep(0.05)
    await fleet.tell("server-0")
    assert versions(await late) == [(len(WHOLE), "4")]


async def test_connections_to_removed_servers_are_closed(fleet: FakeFleet) -> None:
    await fleet.open(*SERVERS)
    await fleet.tell("server-0")
    await fleet.model.close()
    assert all(engine.closed for engine in fleet.engines.values())


async def test_bug_in_following_the_servers_is_raised(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0")
    await fleet.tell("server-0", gate=Gate.SHUT, update=1)
    call = asyncio.create_task(model.complete(request()))
    await asyncio.sleep(0.01)

    def broken(url: str) -> FakeEngine:
        raise LookupError("a bug")

    model._connect = broken
    await fleet.tell("server-0", "server-1")
    with pytest.raises(ModelError, match="a bug"):
        await call
    with pytest.raises(ModelError, match="a bug"):
        await model.complete(request())


async def test_call_reports_a_failure_while_no_server_is_available(fleet: FakeFleet) -> None:
    model = await fleet.open("server-0")
    await fleet.tell()
    health = CallHealth()
    call = asyncio.create_task(model.complete(request(health=health)))
    await until(lambda: health.failing)
    await fleet.tell("server-0")
    await call


async def test_probe_waits_for_a_policy_update_but_not_for_a_server(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.3)
    model = await fleet.open("server-0", current=1, target=1)
    await fleet.tell("server-0", update=1, gate=Gate.SHUT)
    asked = asyncio.create_task(probe.is_answered(model, request()))
    await asyncio.sleep(1.0)
    await fleet.tell("server-0", gate=Gate.OPEN)
    assert await asked
    await fleet.tell()
    asked = asyncio.create_task(probe.is_answered(model, request()))
    await asyncio.sleep(1.0)
    await fleet.tell("server-0")
    assert not await asked


async def test_probe_ends_although_the_model_holds_it_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.3)

    class Aborting(FakeEngine):
        async def complete(self, request: ModelRequest, **_: object) -> ModelReply:
            while True:
                await asyncio.sleep(0.1)
                request.health.on_hold(True)
                await asyncio.sleep(0.01)
                request.health.on_hold(False)

    asked = probe.is_answered(Aborting("http://server-0"), request())
    assert not await asyncio.wait_for(asked, 5)
