"""The stand-in receives weights from a trainer like vLLM: as a member of its group, tensor by tensor."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.ports import free_ports
from tests.support.vllm_server import VllmStandIn, checksums_of

TRAINER = Path(__file__).parents[2] / "support" / "pushing_trainer.py"


class Pushing:
    """An engine, a trainer, and a client of the control calls."""

    def __init__(self, engine: VllmStandIn, http: aiohttp.ClientSession) -> None:
        self.engine, self._http = engine, http
        self.trainer: asyncio.subprocess.Process | None = None

    async def start_trainer(self) -> None:
        hook, master = free_ports(2)
        self.hook = f"http://127.0.0.1:{hook}"
        self.trainer = await asyncio.create_subprocess_exec(
            sys.executable, str(TRAINER), "127.0.0.1", str(hook), str(master)
        )
        while await _refuses(hook) or await _refuses(master):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)

    async def post(self, url: str, body: object) -> tuple[int, Any]:
        async with self._http.post(url, json=body) as response:
            return response.status, await response.json()

    async def push(self, version: int) -> int:
        """Make one update as the operator does; return the status of the last call."""
        question = {"policy": {"version": version}, "servers": [{"name": "s-0"}]}
        _, answer = await self.post(f"{self.hook}/hook", question)
        calls: list[tuple[str, object]] = [
            ("/shutdown_weight_transfer_engine", None),
            ("/init_weight_transfer_engine", {"init_info": answer["servers"]["s-0"]["initInfo"]}),
            ("/start_weight_update", None),
            *(("/update_weights", {"update_info": update}) for update in answer["updates"]),
            ("/finish_weight_update", {"weight_version": str(version)}),
        ]
        for path, body in calls:
            status, _ = await self.post(self.engine.url + path, body)
            if status != 200:
                break
        return status


@pytest.fixture
async def pushing() -> AsyncIterator[Pushing]:
    async with VllmStandIn() as engine, aiohttp.ClientSession() as http:
        made = Pushing(engine, http)
        await made.start_trainer()
        yield made
        if made.trainer is not None and made.trainer.returncode is None:
            made.trainer.kill()
            await made.trainer.wait()


async def test_pushed_weights_are_loaded_under_any_version(pushing: Pushing) -> None:
    for version in (3, 4):
        assert await pushing.push(version) == 200
        assert pushing.engine.weights.version == version
        assert pushing.engine.weights.checksums() == checksums_of(version)


async def test_engine_whose_trainer_dies_during_a_push_reports_it_and_keeps_its_weights(pushing: Pushing) -> None:
    assert await pushing.push(3) == 200
    await pushing.post(f"{pushing.hook}/pause", {"seconds": 60})
    update = asyncio.create_task(pushing.push(4))
    while not pushing.engine.weights.updating:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.02)
    assert pushing.trainer is not None
    pushing.trainer.kill()
    await pushing.trainer.wait()
    assert await update == 500
    assert pushing.engine.weights.version == 3

    await pushing.start_trainer()
    await pushing.post(f"{pushing.engine.url}/finish_weight_update", {})
    assert await pushing.push(5) == 200
    assert pushing.engine.weights.version == 5


async def _refuses(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False
