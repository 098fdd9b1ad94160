"""The relay's model, with workers that are lost."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime.models.base import ModelReply, ModelRequest
from agent_runtime.proxy.relay import hub as hub_module
from agent_runtime.proxy.relay.hub import Hub
from rollout_api.model import Sampling

pytestmark = pytest.mark.usefixtures("virtual_clock")

REPLY = ModelReply({"role": "assistant", "content": "x"}, "stop")


async def test_lost_time_is_counted_once_when_two_workers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [True, True, False]

    async def answer(*_: object) -> ModelReply:
        if losses.pop(0):
            await asyncio.sleep(0.05)
            raise hub_module._WorkerLost
        return REPLY

    async def taken(*_: object, **__: object) -> Any:
        return SimpleNamespace(answer=answer, hello=SimpleNamespace(worker_id="w"), taken=1)

    hub, clock = Hub("m"), asyncio.get_running_loop().time
    monkeypatch.setattr(hub, "_taken", taken)
    request = ModelRequest([], [], Sampling(), 1, "s", "t", 0, 0)
    began = clock()
    assert await hub.complete(request) == REPLY
    assert request.health.lost_seconds <= clock() - began


async def test_call_that_waits_for_a_first_worker_is_failing() -> None:
    hub, told = Hub("m"), asyncio.Event()
    request = ModelRequest([], [], Sampling(), 1, "s", "t", 0, 0)
    request.health.on_failing = lambda why: told.set()
    call = asyncio.ensure_future(hub.complete(request))
    await told.wait()
    call.cancel()
    await asyncio.wait([call])
    assert str(request.health.failure(1.0)) == "Unreachable: NoWorker: no worker of model m is connected"
