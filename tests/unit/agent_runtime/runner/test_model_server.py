"""How a runner follows its ModelServer at the API server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import pytest

from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.kube.api import ApiError
from agent_runtime.models.base import ModelConfigError
from agent_runtime.models.pool.fleet import CONFIRM_SECONDS, View
from agent_runtime.models.pool.gate import LEASE_SECONDS, PolicyGate
from agent_runtime.runner import model_server
from agent_runtime.runner.model_server import ModelServerDirectory, model_server_name, open_served_model, read_status
from agent_runtime.runner.start import Start
from rollout_api.model_server import Gate
from rollout_api.rollout_job import RolloutJob

pytestmark = pytest.mark.usefixtures("virtual_clock")


class FakeApi:
    """An API server with one ModelServer or none."""

    def __init__(self) -> None:
        self.version, self.uid = 1, "first"
        self.object: dict[str, Any] | None = {
            "spec": {"model": {"name": "org/policy"}, "engine": {"type": "SGLang"}},
            "status": {},
        }
        self.down = False
        self.watched_from: list[str] = []
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def get_model_server(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        if self.down:
            raise ApiError(0, "Unreachable", "down")
        if self.object is None:
            raise ApiError(404, "NotFound", name)
        return {**deepcopy(self.object), "metadata": {"uid": self.uid, "resourceVersion": str(self.version)}}

    @contextlib.asynccontextmanager
    async def watch_model_server(
        self, name: str, resource_version: str
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        if self.down:
            raise ApiError(0, "Unreachable", "down")
        self.watched_from.append(resource_version)
        yield self._stream()

    async def _stream(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield await self._events.get()

    def write(self, status: dict[str, Any]) -> None:
        assert self.object is not None
        self.version += 1
        self.object["status"] = status
        self._events.put_nowait({"type": "MODIFIED", "object": {}})


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


async def take(views: AsyncIterator[View]) -> View:
    return await asyncio.wait_for(anext(views), 20)


async def test_closed_gate_is_noticed_immediately(api: FakeApi) -> None:
    views = ModelServerDirectory(api, "policy").changes()
    assert (await take(views)).status.policy.gate is Gate.OPEN
    asking = asyncio.create_task(take(views))
    await asyncio.sleep(0.05)
    api.write({"policy": {"gate": "Shut", "update": 3}})
    view = await asyncio.wait_for(asking, CONFIRM_SECONDS / 2)
    assert (view.status.policy.gate, view.status.policy.update) == (Gate.SHUT, 3)
    await views.aclose()  # type: ignore[attr-defined]


async def test_valid_status_is_reported_again(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "CONFIRM_SECONDS", 0.1)
    views = ModelServerDirectory(api, "policy").changes()
    first, second = await take(views), await take(views)
    assert second.status == first.status
    assert second.as_of > first.as_of
    await views.aclose()  # type: ignore[attr-defined]


async def test_nothing_is_reported_while_the_api_server_is_down(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "CONFIRM_SECONDS", 0.05)
    views = ModelServerDirectory(api, "policy").changes()
    await take(views)
    api.down = True
    asking = asyncio.create_task(take(views))
    await asyncio.sleep(0.3)
    assert not asking.done()
    before = asyncio.get_running_loop().time()
    api.down = False
    assert (await asking).as_of >= before
    await views.aclose()  # type: ignore[attr-defined]


async def test_a_deleted_model_server_has_no_servers(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "CONFIRM_SECONDS", 0.05)
    api.object = None
    views = ModelServerDirectory(api, "policy").changes()
    assert (await take(views)).status.servers == []
    await views.aclose()  # type: ignore[attr-defined]


async def test_tokens_of_a_replaced_model_server_do_not_get_the_new_ones_version(api: FakeApi) -> None:
    """It was replaced while the API server was unreachable, and its updates have equal numbers."""
    views, gate = ModelServerDirectory(api, "policy").changes(), PolicyGate("u/0")
    api.write({"policy": {"current": 7, "update": 1}})
    view = await take(views)
    gate.see(view.status.policy, view.as_of)
    call = gate.begin(streamed=True)
    gate.arrived(call, 3, view.as_of)
    gate.arrived(call, 2, view.as_of + LEASE_SECONDS + 1)
    api.uid = "second"
    api.write({"policy": {"current": 8, "update": 1}})
    while gate.version != 8:
        view = await take(views)
        gate.see(view.status.policy, view.as_of)
    gate.arrived(call, 1, view.as_of)
    assert [(span.tokens, span.version) for span in gate.end(call)] == [(3, "7"), (3, None)]
    await views.aclose()  # type: ignore[attr-defined]


def test_unknown_fields_of_a_newer_operator_are_ignored() -> None:
    status = read_status(
        {
            "novelty": 1,
            "conditions": [{"type": "Ready", "status": "True", "more": 1}],
            "servers": [{"name": "a", "url": "http://a", "uid": "u", "ready": True, "restarts": 2, "novelty": {}}],
            "policy": {"current": 4, "target": 5, "gate": "Shut", "step": "Dreaming", "mixed": ["u/0"], "update": 9},
        }
    )
    assert [(s.name, s.ready, s.restarts) for s in status.servers] == [("a", True, 2)]
    assert (status.policy.current, status.policy.gate, status.policy.mixed) == (4, Gate.SHUT, ["u/0"])


def start(**model: Any) -> Start:
    job = RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "train", "namespace": "team", "uid": "u"},
            "spec": {
                "tasks": {"inline": [{"name": "t", "prompt": "p"}]},
                "model": model,
                "output": {"uri": "s3://bucket/out"},
            },
        }
    )
    return Start(job, "ab" * 32, Shard(2, 4))


OWN_SERVER = {"model": {"name": "m"}, "engine": {"image": "i", "version": "0.27.0"}, "toolCallParser": "hermes"}


@pytest.mark.parametrize(
    ("model", "name"),
    [({"serverRef": "shared"}, "shared"), ({"server": OWN_SERVER}, "train-model"), ({"function": "a:b"}, None)],
)
def test_job_finds_its_referenced_or_owned_model_server(model: dict[str, Any], name: str | None) -> None:
    assert model_server_name(start(**model).job) == name


async def test_calls_name_the_model_as_its_server_serves_it(api: FakeApi) -> None:
    model = await open_served_model(start(serverRef="shared"), "shared", api)
    assert model.name == "org/policy"
    await model.close()


async def test_missing_model_server_is_reported_with_the_field(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "CREATED_SECONDS", 0.1)
    api.object = None
    with pytest.raises(ModelConfigError, match="serverRef: there is no ModelServer shared"):
        await open_served_model(start(serverRef="shared"), "shared", api)
