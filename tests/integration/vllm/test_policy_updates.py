"""Policy updates of vLLM itself and of its stand-in: operator, gateway, and a runner's calls in progress."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from agent_runtime.models.base import ModelReply
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.serving import adapters
from rollout_operator.model_server.control import Address, Control
from tests.integration.vllm.conftest import MODEL, InferenceServer
from tests.integration.vllm.operated import Operated
from tests.integration.vllm.test_turns import next_turn, request
from tests.support.tiny_llama import MAX_MODEL_LEN


@pytest.fixture
async def served(server: InferenceServer, tmp_path: Path) -> AsyncIterator[Operated]:
    async with Operated(server, tmp_path) as served:
        yield served


@pytest.fixture
async def adapted(server: InferenceServer, tmp_path: Path) -> AsyncIterator[Operated]:
    async with Operated(server, tmp_path, ("red", "blue")) as served:
        yield served
    for name in await loaded_adapters(server):
        await server.do(server.engine.updates.adapters.unload(name))


async def loaded_adapters(server: InferenceServer) -> set[str]:
    """Names that the server lists besides its model."""
    return {card["id"] for card in (await server.get("/v1/models"))["data"] if card.get("parent")}


FAST = 5000
"""Tokens a second of the stand-in for the rest of an answer, once the test has seen what it needs the answer for."""


def uri(folder: str) -> str:
    return Path(folder).as_uri()


def versions(reply: ModelReply) -> list[str | None]:
    return [span.version for span in reply.policy_spans for _ in range(span.tokens)]


async def until_all_have_tokens(served: Operated, calls: int) -> None:
    async with asyncio.timeout(120):
        while sum(len(one.ids) > 10 for one in served.recorder.sampled) < calls:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_held(server: InferenceServer, served: Operated, calls: int) -> None:
    """Return when all calls have tokens and the server is paused. So the operator's next request meets calls in
    progress, however slow the machine is.
    """
    await until_all_have_tokens(served, calls)
    await server.pause()


async def first_tokens(
    served: Operated,
    content: str = "Say what 6 times 7 is.",
    model: ServedModel | None = None,
    version: int | None = None,
) -> list[int]:
    reply = await (model or served.model).complete(request(content))
    while version is not None and versions(reply)[-1] != str(version):  # the runner follows the status
        reply = await (model or served.model).complete(request(content))
    assert reply.completion_token_ids is not None
    return reply.completion_token_ids


async def assert_update_loses_no_call(server: InferenceServer, served: Operated, uri: str | None) -> None:
    """Update from version 0 to version 1 during calls, and check each of their tokens."""
    asked = [request(f"Number {number}", tokens=server.long_answer, session=f"s-{number}") for number in range(4)]
    calls = [asyncio.create_task(served.model.complete(one)) for one in asked]
    await until_held(server, served, len(calls))
    served.patch(1, uri)
    await served.until(1)
    await server.set_speed(FAST)
    replies = await asyncio.gather(*calls)
    for number, reply in enumerate(replies):
        (answer,) = served.recorder.of(f"s-{number}")
        assert reply.completion_token_ids == answer.ids
        assert len(answer.ids) == server.long_answer
        found = versions(reply)
        if not served.mixed:
            assert set(found) == {"0", "1"}
        # vLLM's own report of which weights made each token.
        pairs = zip(found, answer.versions(), strict=True)
        assert all(mine == theirs for mine, theirs in pairs if mine is not None)
    (server_status,) = served.status.servers
    assert server_status.ready
    # The next turn of the same conversation continues with the new policy, and finds nothing in the old one's cache.
    following = await served.model.complete(next_turn(asked[0], replies[0]))
    assert set(versions(following)) == {"1"}
    assert following.usage.cached_tokens == 0


async def test_update_loses_no_call_and_records_the_version_of_each_token(
    server: InferenceServer, served: Operated
) -> None:
    await assert_update_loses_no_call(server, served, uri(server.checkpoint(1)))


async def test_runner_that_missed_an_update_records_the_versions_that_the_server_reports(
    server: InferenceServer, served: Operated
) -> None:
    call = asyncio.create_task(served.model.complete(request(tokens=server.long_answer, session="s-cut-off")))
    await until_held(server, served, 1)
    served.is_cut_off = True
    served.patch(1, uri(server.checkpoint(1)))
    await served.until(1)
    assert served.mixed
    served.is_cut_off = False
    found = versions(await call)
    (answer,) = served.recorder.of("s-cut-off")
    assert set(found) == {"0", "1"}
    assert found == answer.versions()


async def test_gateway_serves_the_digest_of_the_loaded_weights(server: InferenceServer, served: Operated) -> None:
    digests = []
    for version in (1, 2, 3):
        served.patch(version, uri(server.checkpoint(version % 2)))
        await served.until(version)
        began = time.monotonic()
        digests.append(await served.control("POST", "/policy/digest"))
        assert time.monotonic() - began < 60
    assert digests[0] == digests[2]
    assert digests[0] != digests[1]


async def test_failed_load_returns_to_version_0(server: InferenceServer, served: Operated, tmp_path: Path) -> None:
    zero = await first_tokens(served)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"no weights")
    (broken / "config.json").write_text(
        (Path(server.checkpoint(0)) / "config.json").read_text() if server.real else "[]"
    )
    served.patch(1, uri(str(broken)))
    await served.until_failed(1)
    assert served.status.policy.current == 0
    assert await first_tokens(served) == zero
    assert json.loads((tmp_path / "story.json").read_text())["reason"] == "LoadFailed"
    served.patch(2, uri(server.checkpoint(2)))
    await served.until(2)
    assert await first_tokens(served) != zero


async def test_version_0_is_served_again_after_an_update(server: InferenceServer, served: Operated) -> None:
    zero = await first_tokens(served)
    served.patch(1, uri(server.checkpoint(1)))
    await served.until(1)
    assert await first_tokens(served) != zero
    served.patch(0)
    await served.until(0)
    assert await first_tokens(served) == zero


async def test_two_adapters_are_updated_each_alone_while_calls_run(
    server: InferenceServer, adapted: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "LINGER_SECONDS", 0.3)
    red, blue = adapted.adapted["red"], adapted.adapted["blue"]
    base = await first_tokens(adapted)
    assert await first_tokens(adapted, model=red) == await first_tokens(adapted, model=blue) == base
    found = [base]
    for name, version in (("red", 1), ("blue", 2)):
        adapted.patch_adapter(name, version, uri(server.adapter(version)))
        await adapted.until_adapter(name, lambda status, version=version: status.current == version)  # type: ignore[misc]
        found.append(await first_tokens(adapted, model=adapted.adapted[name], version=version))
    assert all(one != other for one, other in itertools.combinations(found, 2))
    length = (
        2 * server.long_answer
    )  # the update of an adapter takes some seconds, and nothing holds the calls meanwhile
    asked = request(tokens=length, session="s-old")
    calls = [asyncio.create_task(model.complete(asked)) for model in (red, blue, adapted.model)]
    await until_all_have_tokens(adapted, 3)
    update = adapted.status.policy.update
    adapted.patch_adapter("red", 3, uri(server.adapter(2)))
    await adapted.until_adapter("red", lambda status: status.current == 3)
    assert await loaded_adapters(server) == {"red@1", "red@3", "blue@2"}
    assert not any(call.done() for call in calls)
    # New calls use the new version of adapter `blue`; running calls keep theirs.
    new = await red.complete(request())
    while set(versions(new)) == {"1"}:  # the runner follows the status
        new = await red.complete(request())
    assert (new.completion_token_ids, set(versions(new))) == (found[2], {"3"})
    await asyncio.sleep(1.5)  # longer than LINGER_SECONDS: its calls alone keep the old version loaded
    assert "red@1" in await loaded_adapters(server) or calls[0].done()  # vLLM itself may be faster
    await server.set_speed(FAST)
    replies = await asyncio.gather(*calls)
    assert [set(versions(reply)) for reply in replies] == [{"1"}, {"2"}, {"0"}]
    for reply, start in zip(replies, (found[1], found[2], base), strict=True):
        ids = reply.completion_token_ids or []
        assert len(ids) == length
        assert ids[: len(start)] == start
    async with asyncio.timeout(60):  # the old version is unloaded after its last call
        while "red@1" in await loaded_adapters(server):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (adapted.status.policy.update, adapted.status.policy.gate) == (update, "Open")
    adapted.patch_adapter("red", 4)
    adapted.patch_adapter("blue", 0)


async def test_adapter_that_cannot_be_loaded_changes_nothing(
    server: InferenceServer, adapted: Operated, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"r": "no rank"}')
    red = adapted.adapted["red"]
    adapted.patch_adapter("red", 1, uri(server.adapter(1)))
    await adapted.until_adapter("red", lambda status: status.current == 1)
    one = await first_tokens(adapted, model=red, version=1)
    adapted.patch_adapter("red", 2, broken.as_uri())
    await adapted.until_adapter("red", lambda status: status.failed == 2)
    assert "s-0" in (adapted.status.adapters["red"].failed_because or "")
    assert await first_tokens(adapted, model=red, version=1) == one
    adapted.patch_adapter("red", 3, uri(server.adapter(2)))
    await adapted.until_adapter("red", lambda status: status.current == 3)
    assert await first_tokens(adapted, model=red, version=3) != one


async def test_client_that_leaves_the_gateway_ends_its_request(server: InferenceServer, served: Operated) -> None:
    call = asyncio.create_task(served.model.complete(request(tokens=MAX_MODEL_LEN - 200)))
    await until_all_have_tokens(served, 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(60):
        while await server.running():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_call_waits_while_the_engine_sleeps_and_continues_with_its_version(
    server: InferenceServer, served: Operated
) -> None:
    zero = await first_tokens(served)
    call = asyncio.create_task(served.model.complete(request(tokens=server.long_answer)))
    await until_held(server, served, 1)
    served.lend_memory(True)
    await served.until_asleep()
    answer = served.recorder.sampled[-1]
    made = len(answer.ids)
    assert await server.get("/is_sleeping") == {"is_sleeping": True}
    assert (await server.get("/weight_info"))["weight_version"].startswith("asleep-")
    async with aiohttp.ClientSession() as http:
        body = {"model": MODEL, "token_ids": [300], "sampling_params": {"max_tokens": 1}}
        async with http.post(f"{served.recorder.url}/inference/v1/generate", json=body) as response:
            assert response.status == 503
    assert len(answer.ids) == made < server.long_answer
    served.lend_memory(False)
    await served.until(0)
    await server.set_speed(FAST)
    reply = await call
    assert len(reply.completion_token_ids or ()) == server.long_answer
    assert set(versions(reply)) <= ({"0"} if not served.mixed else {"0", None})
    assert await server.get("/is_sleeping") == {"is_sleeping": False}
    assert await first_tokens(served) == zero


async def test_engine_that_wakes_for_a_new_version_finishes_its_calls_with_it(
    server: InferenceServer, served: Operated
) -> None:
    call = asyncio.create_task(served.model.complete(request(tokens=server.long_answer)))
    await until_held(server, served, 1)
    served.lend_memory(True)
    await served.until_asleep()
    served.patch(1, uri(server.checkpoint(1)))
    served.lend_memory(False)
    await served.until(1)
    await server.set_speed(FAST)
    reply = await call
    answer = served.recorder.sampled[-1]
    found = versions(reply)
    assert len(found) == server.long_answer
    assert found == sorted(found, key=str)
    if not served.mixed:
        assert set(found) == {"0", "1"}
    assert all(mine == theirs for mine, theirs in zip(found, answer.versions(), strict=True) if mine is not None)


async def test_engine_that_failed_to_sleep_samples_no_token_when_it_wakes(server: InferenceServer) -> None:
    call = asyncio.create_task(server.generate([300, 301], sampling={"max_tokens": server.long_answer}))
    async with asyncio.timeout(60):
        while not await server.running():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await server.pause()
    await server.name_weights("falling-asleep-0")
    control = Control()
    try:
        await control.wake(Address("team", "s-0", server.url, ""))
    finally:
        await control.close()
    assert await server.get("/is_paused") == {"is_paused": True}
    assert await server.get("/weight_info") == {"weight_version": "0"}
    (choice,) = (await call)["choices"]
    assert choice["finish_reason"] == "abort"
