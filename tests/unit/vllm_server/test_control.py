"""Pause, weights, sleep, adapters: which version sampled which token, and what the server reports about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

from tests.support.vllm_server import Faults, VllmStandIn, checksums_of, made_by
from tests.unit.vllm_server.conftest import Client, Standin, until

PROMPT = [10, 20, 30]
UPDATE = {"update_info": {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]}}
LONG = {"token_ids": PROMPT, "sampling_params": {"ignore_eos": True, "max_tokens": 200}}


async def push(client: Client, version: int) -> None:
    """Update the weights as a trainer does."""
    await client.post("/init_weight_transfer_engine", {"init_info": {}})
    for path, body in (
        ("/_standin/tensors", {"version": version}),
        ("/start_weight_update", None),
        ("/update_weights", UPDATE),
        ("/finish_weight_update", {"weight_version": str(version)}),
    ):
        status, answer = await client.post(path, body)
        assert status == 200, answer


async def test_kept_request_continues_with_the_new_weights_and_loses_no_token(standin: Standin) -> None:
    async with standin(tokens_per_second=1000) as client:
        server: VllmStandIn = client.server
        asked = asyncio.create_task(client.post("/inference/v1/generate", LONG))
        await until(lambda: server.served and len(server.served[0].ids) > 20)
        assert await client.post("/pause?mode=keep") == (200, {"status": "paused"})
        made = len(server.served[0].ids)
        await push(client, 5)
        assert len(server.served[0].ids) == made < 200
        assert await client.get("/is_paused") == {"is_paused": True}
        await client.post("/resume")
        _, answer = await asked
        ids = answer["choices"][0]["token_ids"]
        assert server.served[0].spans == [[0, 0, made], [5, made, 200]]
        assert ids[:made] == made_by(0, PROMPT, made, ignore_eos=True)
        assert ids[made:] == made_by(5, [*PROMPT, *ids[:made]], 200 - made, ignore_eos=True)


async def test_requests_received_while_paused_are_answered_after_the_resume(standin: Standin) -> None:
    async with standin() as client:
        for mode in ("abort", "wait", "keep"):
            await client.post(f"/pause?mode={mode}")
            asked = asyncio.create_task(client.post("/inference/v1/generate", LONG))
            await until(lambda: client.server.engine.waiting)
            assert not asked.done()
            await client.post("/resume")
            assert (await asked)[0] == 200


async def test_pausing_with_wait_returns_when_running_requests_have_ended(standin: Standin) -> None:
    async with standin(tokens_per_second=1000) as client:
        asked = asyncio.create_task(client.post("/inference/v1/generate", LONG))
        await until(lambda: client.server.served and client.server.served[0].ids)
        await client.post("/pause?mode=wait")
        assert client.server.served[0].finish == "length"
        assert len((await asked)[1]["choices"][0]["token_ids"]) == 200


async def test_aborting_returns_partial_answers_and_ends_a_generate_stream(standin: Standin) -> None:
    async with standin(tokens_per_second=200) as client:
        asked = asyncio.create_task(client.post("/inference/v1/generate", LONG))
        events: list[Any] = []

        async def read() -> None:
            events.extend([event async for event in client.events("/inference/v1/generate", {**LONG, "stream": True})])

        reading = asyncio.create_task(read())
        await until(lambda: len(client.server.served) == 2 and all(request.ids for request in client.server.served))
        assert (await client.post("/abort_requests", {}))[1] == {"status": "aborted", "aborted": 2}
        whole = (await asked)[1]["choices"][0]
        await reading
        assert whole["finish_reason"] == "abort"
        assert 0 < len(whole["token_ids"]) < 200
        # Tokens made since the last event leave with the abort; without any, the stream says nothing of it.
        choices = [event["choices"][0] for event in events]
        assert all(choice["token_ids"] for choice in choices)
        assert {choice["finish_reason"] for choice in choices[:-1]} <= {None}
        assert choices[-1]["finish_reason"] in (None, "abort")
        assert all(request.aborted for request in client.server.served)


async def test_one_request_is_aborted_by_the_id_that_the_client_gave(standin: Standin) -> None:
    async with standin(tokens_per_second=200) as client:
        asked = [
            asyncio.create_task(client.post("/inference/v1/generate", LONG, X_Request_Id=name))
            for name in ("one", "two")
        ]
        await until(lambda: len(client.server.engine.running) == 2)
        await client.post("/abort_requests", {"request_ids": ["two"]})
        assert (await asked[1])[1]["request_id"] == "generate-tokens-two"
        assert [request.id for request in client.server.engine.running] == ["generate-tokens-one"]
        await client.post("/abort_requests", {})
        await asked[0]


async def test_disconnected_client_is_aborted_and_the_tokens_after_it_are_counted(standin: Standin) -> None:
    async with standin(tokens_per_second=500, abort_seconds=0.05) as client:
        for stream in (False, True):
            client.server.served.clear()
            asked = asyncio.create_task(
                client.post(
                    "/inference/v1/generate", {**LONG, "stream": stream, "sampling_params": {"ignore_eos": True}}
                )
            )
            await until(lambda: client.server.served and len(client.server.served[0].ids) > 3)
            asked.cancel()
            await until(lambda: client.server.served[0].finish)
            request = client.server.served[0]
            assert (request.finish, request.aborted, request.disconnected) == ("abort", True, True)
            assert request.orphan_tokens > 0
            assert (await client.get("/_standin/state"))["orphan_tokens"] == request.orphan_tokens


async def test_weights_are_loaded_from_a_path_and_the_label_is_set_separately(standin: Standin, tmp_path: Path) -> None:
    (tmp_path / "version.json").write_text(json.dumps({"version": 3}))
    async with standin() as client:
        assert await client.get("/weight_info") == {"weight_version": "default"}
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        assert await client.post("/collective_rpc", reload) == (200, {"results": [None]})
        assert client.server.weights.version == 3
        assert await client.get("/weight_info") == {"weight_version": "default"}
        await client.post("/update_weight_version", {"new_version": "3"})
        assert await client.get("/weight_info") == {"weight_version": "3"}
        assert (await client.post("/weight_checker", {"action": "checksum"}))[1] == {"checksums": checksums_of(3)}
        reload["kwargs"] = {"weights_path": str(tmp_path / "nothing")}
        status, answer = await client.post("/collective_rpc", reload)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert client.server.weights.version == 3


async def test_update_in_a_wrong_order_is_refused(standin: Standin) -> None:
    async with standin() as client:
        assert (await client.post("/update_weights", UPDATE))[0] == 500
        assert (await client.post("/finish_weight_update"))[0] == 500
        await client.post("/start_weight_update")
        assert "not initialized" in (await client.post("/update_weights", UPDATE))[1]["error"]["message"]
        assert (await client.post("/update_weights", {}))[0] == 400


async def test_checker_detects_a_label_without_a_load(standin: Standin) -> None:
    async with standin() as client:
        client.server.faults.claim_version = "9"
        await push(client, 4)
        assert await client.get("/weight_info") == {"weight_version": "9"}
        checked = await client.post("/weight_checker", {"action": "compare", "baseline": checksums_of(9)})
        assert checked[1]["match"] is False
        checked = await client.post("/weight_checker", {"action": "compare", "baseline": checksums_of(4)})
        assert checked[1] == {"match": True, "mismatches": []}
        await client.post("/pause?mode=keep")
        assert (await client.post("/weight_checker", {"action": "checksum"}))[0] == 200


async def test_loads_fail_the_given_number_of_times_and_keep_the_old_weights(standin: Standin, tmp_path: Path) -> None:
    (tmp_path / "version.json").write_text('{"version": 8}')
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    async with standin(base_version=2) as client:
        client.server.faults.load_failures = 2
        assert [(await client.post("/collective_rpc", reload))[0] for _ in range(3)] == [500, 500, 200]
        assert [load["ok"] for load in client.server.weights.loads] == [False, False, True]
        assert client.server.weights.version == 8


async def test_a_sleep_of_level_2_loses_the_weights(standin: Standin) -> None:
    async with standin() as client:
        await client.post("/sleep?level=2")
        assert await client.get("/is_sleeping") == {"is_sleeping": True}
        await client.post("/wake_up?tags=weights")
        assert await client.get("/is_sleeping") == {"is_sleeping": True}
        await client.post("/wake_up?tags=kv_cache")
        assert await client.get("/is_sleeping") == {"is_sleeping": False}
        await client.post("/inference/v1/generate", LONG)
        assert client.server.served[-1].versions == [-1] * 200


async def test_an_adapter_answers_under_its_own_name_with_its_own_version(standin: Standin, tmp_path: Path) -> None:
    (tmp_path / "adapter.json").write_text('{"version": 6}')
    async with standin() as client:
        adapter = {"lora_name": "tuned", "lora_path": str(tmp_path)}
        assert (await client.post("/v1/load_lora_adapter", adapter))[0] == 200
        assert (await client.post("/v1/load_lora_adapter", adapter))[0] == 400
        (tmp_path / "adapter.json").write_text('{"version": 7}')
        assert (await client.post("/v1/load_lora_adapter", {**adapter, "load_inplace": True}))[0] == 200
        assert [card["id"] for card in (await client.get("/v1/models"))["data"]] == ["policy", "tuned"]
        await client.post("/inference/v1/generate", {**LONG, "model": "tuned"})
        assert set(client.server.served[-1].versions) == {7}
        assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "tuned"}))[0] == 200
        assert (await client.post("/inference/v1/generate", {**LONG, "model": "tuned"}))[0] == 404


async def test_prefix_cache_depends_on_the_salt_and_is_kept_by_a_load(standin: Standin) -> None:
    async with standin() as client:
        ask = {"token_ids": list(range(100)), "sampling_params": {"max_tokens": 1}, "cache_salt": "0"}
        for salt in ("0", "0", "1"):
            await client.post("/inference/v1/generate", {**ask, "cache_salt": salt})
        await push(client, 1)
        await client.post("/inference/v1/generate", ask)
        assert [request.cached_tokens for request in client.server.served] == [0, 96, 0, 96]
        assert [request.stale_cached_tokens for request in client.server.served] == [0, 0, 0, 96]
        page = await client.get("/metrics")
        assert 'vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 400.0' in page
        assert 'vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 192.0' in page


async def test_urgent_request_goes_first_when_not_all_fit(standin: Standin) -> None:
    async with standin(max_num_seqs=1) as client:
        await client.post("/pause?mode=keep")
        asked = []
        for name, priority in (("late", 5), ("soon", 0), ("now", -1)):
            asked.append(
                asyncio.create_task(
                    client.post("/inference/v1/generate", {**LONG, "priority": priority}, X_Request_Id=name)
                )
            )
            await until(lambda: len(client.server.engine.waiting) == len(asked))
        await client.post("/resume")
        await asyncio.gather(*asked)
        order = sorted(client.server.served, key=lambda request: cast(float, request.ended))
        assert [request.external_id for request in order] == ["now", "soon", "late"]


async def test_hanging_load_ends_at_the_time_limit_and_keeps_the_old_weights(standin: Standin, tmp_path: Path) -> None:
    (tmp_path / "version.json").write_text('{"version": 8}')
    async with standin(base_version=2, faults=Faults(load_hangs=True)) as client:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}, "timeout": 0.05}
        assert (await client.post("/collective_rpc", reload))[0] == 500
        assert client.server.weights.version == 2


async def test_update_without_received_weights_changes_only_the_label(standin: Standin) -> None:
    async with standin() as client:
        await client.post("/start_weight_update")
        await client.post("/finish_weight_update", {"weight_version": "9"})
        assert await client.get("/weight_info") == {"weight_version": "9"}
        assert client.server.weights.version == 0


async def test_emptying_the_prefix_cache_removes_all_prompts(standin: Standin) -> None:
    async with standin() as client:
        for _ in range(2):
            await client.post("/inference/v1/generate", {**LONG, "token_ids": [1] * 50})
            await client.post("/reset_prefix_cache")
        assert [request.cached_tokens for request in client.server.served] == [0, 0]
