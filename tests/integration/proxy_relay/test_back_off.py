"""How soon a worker that lost its proxy connects again."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.models.providers.function import FunctionModel
from agent_runtime.models.retries import FIRST_DELAY_SECONDS
from agent_runtime.proxy.relay.hub import Hub
from agent_runtime.proxy.relay.worker import Worker
from agent_runtime.proxy.serve import standalone_proxy
from agent_runtime.recording.store import Store

KEY = "an-admin-key-of-tests"


async def nothing(messages: list[dict[str, Any]], **_: Any) -> str:
    return ""


async def test_worker_resets_its_back_off_after_a_proxy_accepted_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agent_runtime.proxy.relay.worker")

    def pauses() -> list[float]:
        return [record.args[2] for record in caplog.records if isinstance(record.args, tuple)]  # type: ignore[misc]

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    model = FunctionModel(nothing, "tiny")
    working = asyncio.ensure_future(Worker(f"http://127.0.0.1:{port}", KEY, model, "w").run())
    try:
        async with asyncio.timeout(60):
            while len(pauses()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            hub = Hub(model.name)
            async with standalone_proxy(Store.open(str(tmp_path), {}), hub, KEY, port=port):
                while hub.workers != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                failed = len(pauses())
            while len(pauses()) == failed:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        working.cancel()

    assert max(pauses()[:failed]) > FIRST_DELAY_SECONDS
    assert pauses()[failed] <= FIRST_DELAY_SECONDS
