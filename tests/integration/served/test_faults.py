"""Servers that die, hang, are evicted and are updated during calls: what is lost, and what is recorded."""

import asyncio

import pytest

from agent_runtime.models.base import ModelReply
from agent_runtime.models.pool import fleet as fleet_module
from agent_runtime.models.pool import server
from agent_runtime.models.pool.routing import preference
from agent_runtime.models.token_exact.routes import Progress
from tests.integration.served.fleet import PATIENCE_SECONDS, Fleet, StandIn, ask, assert_made_as_recorded, call, until


async def begun(fleet: Fleet) -> list[int]:
    """Return the number of tokens so far of each answer in progress."""
    records = [record for server in fleet.servers for record in await server.get("/_standin/served")]
    return [len(record["ids"]) for record in records if record["finish"] is None]


async def test_a_server_that_is_killed_loses_no_call_and_no_token(fleet: Fleet) -> None:
    await fleet.start(3, "--tokens-per-second", "40")
    await fleet.model.check()
    assert fleet.model.token_capture == "Tokens"
    killed = fleet.servers[0]
    await killed.post("/_standin/faults", {"hang_after": 20})
    calls = ask(fleet, 24, tokens=50)
    await until(lambda: fleet.arrived[killed.url] >= 20)
    killed.kill()
    replies = await asyncio.gather(*calls)
    for reply in replies:
        assert len(reply.completion_token_ids or []) == 50
        assert assert_made_as_recorded(reply) == ["0"]
        assert len(reply.logprobs or []) == 50
    assert fleet.model.resent > 0
    begun = {r["session"]: len(r["prompt_ids"]) for s in fleet.servers[1:] for r in await s.get("/_standin/served")}
    grown = [begun[f"rollout-{n}"] - len(reply.prompt_token_ids or []) for n, reply in enumerate(replies)]
    assert max(grown) > 0, "what had arrived was not sampled again"


async def test_server_that_is_killed_during_the_check_does_not_decide_what_the_others_record(fleet: Fleet) -> None:
    await fleet.start(2, "--tokens-per-second", "15")
    checking = asyncio.create_task(fleet.model.check())
    asked: list[StandIn] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not asked:
            for server in fleet.servers:
                served = await server.get("/_standin/served")
                asked += [server for record in served if "generate" in record["route"] and len(record["ids"]) >= 2]
    asked[0].kill()
    await checking
    assert fleet.model.token_capture == "Tokens"


async def test_server_that_can_record_more_than_the_others_is_used_again_after_a_failure(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.3)
    await fleet.start(1)
    await fleet.model.check()
    (only,) = fleet.model._places.servers.values()
    fleet.model._capture = only.engine.token_capture = "Chat"  # as if its engine had been upgraded since
    only.leave("it failed")
    async with asyncio.timeout(PATIENCE_SECONDS):
        reply = await fleet.model.complete(call(0, 3))
    assert (only.engine.token_capture, reply.completion_token_ids is not None) == ("Chat", True)


async def test_finished_answer_is_not_continued_when_only_its_end_was_lost(fleet: Fleet) -> None:
    await fleet.start(1)
    await fleet.model.check()
    engine, progress = fleet.connect(fleet.servers[0].url), Progress()
    engine.token_capture = "Tokens"
    reply = await engine.complete(call(0, 20), progress=progress)
    before = len(await fleet.servers[0].get("/_standin/served"))
    again = await engine.complete(call(0, 20), progress=progress)
    await engine.close()
    assert again.completion_token_ids == reply.completion_token_ids
    assert again.text == reply.text
    assert len(await fleet.servers[0].get("/_standin/served")) == before


async def test_hung_server_with_a_good_health_gets_no_calls_until_it_recovers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALL_SECONDS", 1.5)
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.3)
    await fleet.start(2, "--tokens-per-second", "20")
    await fleet.model.check()
    first = preference("shared", [server.name for server in fleet.servers])[0]
    hanging = next(server for server in fleet.servers if server.name == first)
    await hanging.post("/_standin/faults", {"hang_after": 10})
    calls = ask(fleet, 4, tokens=30, group="shared")
    await until(lambda: fleet.arrived[hanging.url] >= 10)
    assert await hanging.get("/v1/models"), "it looks well"
    for reply in await asyncio.gather(*calls):
        assert assert_made_as_recorded(reply) == ["0"]
    assert fleet.model.resent > 0
    await hanging.post("/_standin/faults", {"hang": False})
    before = fleet.arrived[hanging.url]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while fleet.arrived[hanging.url] == before:
            await fleet.model.complete(call(0, 3, "shared"))


async def test_answers_without_streaming_that_span_an_update_are_masked(fleet: Fleet) -> None:
    await fleet.start(2, "--tokens-per-second", "20", "--no-scale-out")
    await fleet.model.check()
    assert fleet.model.token_capture == "Chat"
    early = ask(fleet, 2, tokens=2)
    await asyncio.gather(*early)
    for each in fleet.servers:
        await each.post("/_standin/faults", {"hang_after": 10})
    across = ask(fleet, 4, tokens=30)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (len(tokens := await begun(fleet)) == 4 and max(tokens) == 10):  # noqa: ASYNC110 (other processes)
            await asyncio.sleep(0.02)
    await fleet.update()
    for each in fleet.servers:
        await each.post("/_standin/faults", {"hang": False, "hang_after": None})
    late = ask(fleet, 2, tokens=2)

    async def versions(calls: list[asyncio.Task[ModelReply]]) -> set[str | None]:
        replies = await asyncio.gather(*calls)
        return {span.version for reply in replies for span in reply.policy_spans}

    assert (await versions(early), await versions(across), await versions(late)) == ({"0"}, {None}, {"1"})
