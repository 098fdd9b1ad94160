"""Servers with little free memory: where calls wait, and which of them start first."""

import asyncio

from agent_runtime.models.pool.server import HALVE_ABOVE, INITIAL_CALLS, LoadReader, Pressure
from tests.integration.served.fleet import MODEL, PATIENCE_SECONDS, Fleet, ask, call, until

MANY = 5 * int(INITIAL_CALLS)


async def test_calls_wait_in_the_runner_while_a_servers_memory_is_full(fleet: Fleet) -> None:
    await fleet.start(1, "--tokens-per-second", "40", "--kv-blocks", "1000")
    await fleet.model.check()
    (server,) = fleet.servers
    reader = LoadReader()

    async def pressure() -> Pressure:
        read = await reader.read(server.url)
        assert read is not None
        return read.pressure

    # Another client's request, which leaves 80 of 1,000 blocks of 16 tokens.
    sampling = {"max_tokens": 10_000, "ignore_eos": True}
    body = {"model": MODEL, "token_ids": [5] * 16 * 920, "sampling_params": sampling}
    other = asyncio.create_task(server.post("/inference/v1/generate", body))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await pressure()).kv_cache_usage <= HALVE_ABOVE:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    calls = ask(fleet, MANY, tokens=40)
    await until(lambda: fleet.model.in_flight == INITIAL_CALLS)
    # With so few running calls a free place would be taken immediately, so the limit holds the others back.
    await until(lambda: fleet.model.in_flight <= INITIAL_CALLS / 8 or not fleet.model.waiting)
    assert fleet.model.waiting > 2 * INITIAL_CALLS, "calls are held back, and not only by their limit at the start"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await pressure()).waiting:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    assert fleet.model.waiting > 2 * INITIAL_CALLS, "they wait in the runner, and not at the server"
    other.cancel()
    await until(lambda: fleet.model.in_flight > INITIAL_CALLS or not fleet.model.waiting)
    assert fleet.model.in_flight > INITIAL_CALLS, "more go there when there is room again"
    await asyncio.gather(*calls)
    await reader.close()


async def test_rollout_with_the_most_turns_goes_first_where_calls_wait_at_a_server(fleet: Fleet) -> None:
    await fleet.start(1, "--max-num-seqs", "1")
    await fleet.model.check()
    (server,) = fleet.servers
    await server.post("/pause?mode=keep")
    before = len(await server.get("/_standin/served"))
    turns = [0, 3, 9, 1]
    calls = [asyncio.create_task(fleet.model.complete(call(turn, 3, turn=turn))) for turn in turns]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await server.get("/_standin/served")) < before + len(turns):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    await server.post("/resume")
    await asyncio.gather(*calls)
    records = (await server.get("/_standin/served"))[before:]
    order = sorted(records, key=lambda record: record["first_token"])
    assert [record["session"] for record in order] == [f"rollout-{turn}" for turn in sorted(turns, reverse=True)]
