"""Time in which the whole process stood still (SIGSTOP, a suspended job) counts for no time limit."""

import asyncio

import pytest

from agent_runtime.executor import timing
from agent_runtime.executor.timing import working_timeout
from tests.support.virtual_time import VirtualClock


async def test_time_limit_leaves_out_a_standstill(virtual_clock: VirtualClock) -> None:
    seconds: list[float] = []

    async def limited() -> None:
        async with working_timeout(20) as now:
            began = now()
            await asyncio.sleep(17)
            virtual_clock.now += 600
            await asyncio.sleep(0)
            seconds.append(now() - began)
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await limited()
    assert seconds[0] < 20, "a call whose answer is on the way would fail"


async def test_time_limit_that_is_not_reached_ends_nothing(virtual_clock: VirtualClock) -> None:
    async with working_timeout(20):
        await asyncio.sleep(19)
    await asyncio.sleep(60)


async def test_no_timer_of_the_loop_expires_because_of_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TICK_SECONDS", 0.1)
    loop = asyncio.get_running_loop()
    real, stood_still = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + stood_still)
    timing.leave_out_standstills()
    timer = asyncio.create_task(asyncio.sleep(1))
    await asyncio.sleep(0.3)
    stood_still = 600.0
    await asyncio.sleep(0.1)
    assert not timer.done()
    await timer
