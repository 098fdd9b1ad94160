"""LoRA adapters behind a gateway: which version a call gets, and how long a version stays loaded."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_runtime.serving import adapters
from agent_runtime.serving.gateway import serve
from agent_runtime.serving.policies import Policies
from tests.support.vllm_server import VllmStandIn

TOKEN = "a-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
MODEL = "policy"


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)


class Gateway:
    """A gateway in front of a stand-in, and the operator's requests to it."""

    def __init__(self, engine: VllmStandIn, folder: Path, http: aiohttp.ClientSession) -> None:
        self.engine, self.folder, self.http = engine, folder, http
        self._stack = AsyncExitStack()

    async def start(self, *, is_open: bool = True) -> None:
        await self._stack.aclose()
        policies = Policies(self.folder / "policies", dict)
        ports = await serve(self._stack, TOKEN, policies, self.engine.url, 0, 0)
        self.data, self.control = (f"http://127.0.0.1:{port}" for port in ports)
        if is_open:
            await self.open()

    async def close(self) -> None:
        await self._stack.aclose()

    async def open(self) -> None:
        body = {"engine": (await self.served())["engine"], "version": 0}
        assert (await self.ask("POST", f"{self.control}/policy/served", body))[0] == 200

    def version(self, number: int, *, broken: bool = False) -> dict[str, Any]:
        folder = self.folder / "store" / f"{number}{'-broken' if broken else ''}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("nothing.txt" if broken else "version.json")).write_text(json.dumps({"version": number}))
        return {"version": number, "uri": folder.as_uri()}

    async def want(self, **wanted: Any) -> tuple[int, Any]:
        return await self.ask("POST", f"{self.control}/policy/adapters", {"adapters": wanted, "seconds": 10})

    async def until_loaded(self, **wanted: list[int]) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while True:
                found: dict[str, Any] = (await self.served())["adapters"]
                if not any(one["loading"] for one in found.values()):
                    assert {name: one["loaded"] for name, one in found.items()} == wanted
                    return found
                await asyncio.sleep(0.01)

    async def served(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.ask("GET", f"{self.control}/policy/served"))[1]
        return answer

    async def call(self, model: str | None, version: int | None = None, **fields: Any) -> tuple[int, Any, str | None]:
        """Make a call. Returns status, the model that answered, and the version in the answer."""
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
        headers = {} if version is None else {"X-Policy-Version": str(version)}
        named = {} if model is None else {"model": model}
        async with self.http.post(f"{self.data}/v1/chat/completions", json=body | named, headers=headers) as response:
            answer = await response.json()
            return response.status, answer.get("model"), response.headers.get("X-Policy-Version")

    async def ask(self, method: str, url: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.request(method, url, json=body, headers=BEARER) as response:
            return response.status, await response.json()


@pytest.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(adapters, "LINGER_SECONDS", 0.05)
    async with VllmStandIn(tokens_per_second=100) as engine, aiohttp.ClientSession() as http:
        gateway = Gateway(engine, tmp_path, http)
        await gateway.start()
        yield gateway
        await gateway.close()


async def test_call_gets_the_version_that_it_asks_for_else_the_current_one(gateway: Gateway) -> None:
    await gateway.want(
        red={"current": 1, "versions": [gateway.version(1), gateway.version(2)]}, blue={"current": 0, "versions": []}
    )
    await gateway.until_loaded(red=[1, 2], blue=[])
    assert await gateway.call("red") == (200, "red@1", "1")
    assert await gateway.call("red", 2) == (200, "red@2", "2")
    assert await gateway.call("red@2") == (200, "red@2", "2")
    assert await gateway.call("blue") == (200, MODEL, "0")
    assert await gateway.call("red", 0) == (200, MODEL, "0")
    for model in (MODEL, None):
        assert await gateway.call(model) == (200, MODEL, "0")
    assert (await gateway.call("red", 3))[0] == 503
    assert (await gateway.call("green"))[0] == 404


async def test_version_stays_until_its_last_call_ends(gateway: Gateway) -> None:
    await gateway.want(red={"current": 1, "versions": [gateway.version(1)]})
    await gateway.until_loaded(red=[1])
    call = asyncio.create_task(gateway.call("red", max_tokens=20_000, ignore_eos=True))
    await until(lambda: bool(gateway.engine.engine.running))
    await gateway.want(red={"current": 2, "versions": [gateway.version(2)]})
    await gateway.until_loaded(red=[2])
    await asyncio.sleep(0.2)
    assert set(gateway.engine.weights.adapters) == {"red@1", "red@2"}
    call.cancel()
    await until(lambda: set(gateway.engine.weights.adapters) == {"red@2"})
    await until(lambda: [path.name for path in gateway.folder.glob("policies/adapters/*/red/*")] == ["2"])


async def test_failures_tell_whether_the_engine_refused_the_files(gateway: Gateway) -> None:
    broken, missing = gateway.version(1, broken=True), {"version": 2, "uri": "file:///there/is/none"}
    await gateway.want(red={"current": 0, "versions": [broken]}, blue={"current": 0, "versions": [missing]})
    found = await gateway.until_loaded(red=[], blue=[])
    (red,), (blue,) = found["red"]["failed"], found["blue"]["failed"]
    assert (red["version"], red["fetched"]) == (1, True)
    assert "No adapter found" in red["message"]
    assert (blue["version"], blue["fetched"]) == (2, False)
    assert "the folder does not exist" in blue["message"]
    assert 0 <= red["seconds"] < 60


async def test_version_is_never_replaced_by_other_weights(gateway: Gateway) -> None:
    await gateway.want(red={"current": 1, "versions": [gateway.version(1)]})
    await gateway.until_loaded(red=[1])
    await gateway.want(red={"current": 1, "versions": [gateway.version(2) | {"version": 1}]})
    found = await gateway.until_loaded(red=[])
    assert "give it a higher version" in found["red"]["failed"][0]["message"]


async def test_engine_that_restarted_gets_its_adapters_again_before_it_gets_calls(gateway: Gateway) -> None:
    wanted = {"current": 1, "versions": [gateway.version(1)]}
    await gateway.want(red=wanted)
    await gateway.until_loaded(red=[1])
    await gateway.engine.stop()
    await gateway.engine.start()
    await gateway.open()
    assert (await gateway.call("red"))[0] == 503
    assert (await gateway.served())["adapters"] == {}
    await gateway.want(red=wanted)
    await gateway.until_loaded(red=[1])
    assert await gateway.call("red") == (200, "red@1", "1")


async def test_restarted_gateway_finds_the_state_of_its_engine(gateway: Gateway) -> None:
    await gateway.want(red={"current": 1, "versions": [gateway.version(1), gateway.version(2)]})
    await gateway.until_loaded(red=[1, 2])
    await gateway.start()
    await gateway.want(red={"current": 2, "versions": [gateway.version(2)]})
    assert (await gateway.served())["adapters"]["red"]["loaded"] == [2]
    await until(lambda: set(gateway.engine.weights.adapters) == {"red@2"})


async def test_gateway_that_has_just_started_does_not_pass_names_to_the_engine_that_it_does_not_know(
    gateway: Gateway,
) -> None:
    """The engine would answer 404, which ends a run."""
    await gateway.want(red={"current": 1, "versions": [gateway.version(1)]})
    await gateway.until_loaded(red=[1])
    body = {"model": "red", "messages": [{"role": "user", "content": "hi"}]}
    assert (await gateway.ask("POST", f"{gateway.data}/v1/chat/completions/render", body))[0] == 200
    await gateway.start(is_open=False)
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        assert (await gateway.ask("POST", gateway.data + path, body))[0] == 503


async def test_version_that_is_no_longer_wanted_when_it_is_loaded_is_unloaded(gateway: Gateway) -> None:
    gateway.engine.faults.load_hangs, weights = True, gateway.engine.weights
    await gateway.want(red={"current": 0, "versions": [gateway.version(1)]})
    await until(lambda: weights.begun)
    await gateway.want()
    gateway.engine.faults.load_hangs = False
    await until(lambda: weights.loads)
    assert weights.loads[-1]["ok"]
    await until(lambda: not weights.adapters)


@pytest.mark.parametrize(("failures", "loaded"), [(2, [1]), (3, [])])
async def test_load_that_the_engine_answers_with_500_is_tried_three_times(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, failures: int, loaded: list[int]
) -> None:
    """vLLM answers this for files that it cannot use, and for temporary failures."""
    monkeypatch.setattr(adapters, "TRY_SECONDS", 0.01)
    gateway.engine.faults.load_failures = failures
    await gateway.want(red={"current": 0, "versions": [gateway.version(1)]})
    found = await gateway.until_loaded(red=loaded)
    assert [failure["fetched"] for failure in found["red"]["failed"]] == ([] if loaded else [True])


async def test_engine_that_ends_has_not_refused_the_files(gateway: Gateway) -> None:
    """A refused version would not be retried."""
    gateway.engine.faults.load_hangs = True
    await gateway.want(red={"current": 0, "versions": [gateway.version(1)]})
    await until(lambda: gateway.engine.weights.begun)
    await gateway.engine.stop()
    await gateway.engine.start()
    await gateway.open()
    assert (await gateway.served())["adapters"] == {}


async def test_files_of_versions_that_failed_are_removed(gateway: Gateway) -> None:
    await gateway.want(red={"current": 0, "versions": [gateway.version(1, broken=True)]})
    await gateway.until_loaded(red=[])
    (folder,) = gateway.folder.glob("policies/adapters/*/red")
    (folder / f".2.{folder.parent.name}").mkdir()  # a fetch that was interrupted
    await gateway.want(red={"current": 0, "versions": [gateway.version(3)]})
    await gateway.until_loaded(red=[3])
    assert [path.name for path in folder.iterdir()] == ["3"]


async def test_calls_to_an_adapter_that_was_removed_are_sent_elsewhere(gateway: Gateway) -> None:
    """The engine would answer 404, which ends a run whose runner does not know of the removal yet."""
    await gateway.want(red={"current": 0, "versions": []})
    await gateway.want()
    assert (await gateway.call("red", 0))[0] == 503
    assert (await gateway.call(MODEL, 0))[0] == 200


async def test_version_is_loaded_from_one_place_only_while_the_engine_runs(gateway: Gateway) -> None:
    """The engine keeps cached values of a version after it was unloaded."""
    await gateway.want(red={"current": 1, "versions": [gateway.version(1)]})
    await gateway.until_loaded(red=[1])
    await gateway.want()
    await until(lambda: not gateway.engine.weights.adapters)
    await gateway.want(red={"current": 1, "versions": [gateway.version(2) | {"version": 1}]})
    found = await gateway.until_loaded(red=[])
    assert "give it a higher version" in found["red"]["failed"][0]["message"]


async def test_adapter_is_loaded_only_while_the_engine_may_have_calls(gateway: Gateway) -> None:
    """It may sleep otherwise, without the memory for it."""
    async with gateway.http.post(f"{gateway.control}/pause?mode=keep", headers=BEARER) as response:
        assert response.status == 200
    await gateway.want(red={"current": 1, "versions": [gateway.version(1)]})
    await asyncio.sleep(0.5)
    assert gateway.engine.weights.adapters == {}
    assert (await gateway.served())["adapters"]["red"]["loading"] == [1]
    await gateway.ask("POST", f"{gateway.control}/resume")
    await gateway.open()
    await gateway.until_loaded(red=[1])
