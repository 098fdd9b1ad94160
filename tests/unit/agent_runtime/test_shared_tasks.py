"""Work that nobody waits for."""

import asyncio

import pytest

from agent_runtime.shared_tasks import repeat


async def test_repeated_work_goes_on_after_an_exception_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    calls, enough = 0, asyncio.Event()

    async def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("odd")
        enough.set()

    work = asyncio.create_task(repeat(step, 0.0))
    await asyncio.wait_for(enough.wait(), 10)
    work.cancel()
    assert "step failed; it is repeated in 0 s" in caplog.text
    assert "ValueError: odd" in caplog.text
