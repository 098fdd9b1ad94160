"""An agent's time counts only what it used itself, over all runners, and each excluded second is excluded once."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.attempt import agent_clock
from agent_runtime.engine.attempt.agent_clock import AgentClock, union
from agent_runtime.executor import timing
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.usefixtures("virtual_clock")

MOMENTS = st.integers(0, 60)
SPANS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda span: (min(span), max(span))), max_size=12)


class Time:
    """A clock controlled by the test."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def started(time: Time, used_before: float = 0.0) -> AgentClock:
    clock = AgentClock(60, used_before, time)
    clock.start()
    return clock


@given(SPANS)
def test_time_that_several_calls_lost_at_once_is_given_back_once(spans: list[tuple[int, int]]) -> None:
    lost = {second for begin, end in spans for second in range(begin, end)}
    time = Time()
    clock = started(time, used_before=7)
    for begin, end in spans:
        clock.exclude(begin, end)
    time.now = 60
    assert clock.used() == 7 + 60 - len(lost)
    joined = union(spans)
    assert all(end < later for (_, end), (later, _) in pairwise(joined))


@given(SPANS)
def test_waits_under_way_are_excluded_like_finished_ones(spans: list[tuple[int, int]]) -> None:
    time = Time()
    over, under_way = started(time), started(time)
    for number, (begin, _) in enumerate(spans):
        over.exclude(begin, 60)
        time.now = begin
        under_way.begin_wait(number)
    time.now = 60
    assert over.used() == under_way.used()
    for number in range(len(spans)):
        under_way.end_wait(number)
    time.now = 75
    assert over.used() == under_way.used()


def test_a_wait_that_ends_twice_or_never_began_changes_nothing() -> None:
    time = Time(10)
    clock = started(time)
    for now, call in (
        (12, clock.end_wait),
        (12, clock.begin_wait),
        (13, clock.begin_wait),
        (14, clock.end_wait),
        (20, clock.end_wait),
    ):
        time.now = now
        call("call")
    assert clock.used() == 8


def test_pauses_of_several_calls_are_excluded_once() -> None:
    time = Time()
    clock = started(time)
    first, second = clock.pauses(), clock.pauses()
    for now, pausing, begins in ((5, first, True), (8, second, True), (10, first, False), (15, second, False)):
        time.now = now
        pausing(begins)
    time.now = 20
    assert clock.used() == 10


def test_silence_of_a_sandbox_is_not_the_agents_time_up_to_the_agents_whole_time() -> None:
    """Where tools have the executor's user, a policy can stop it."""
    time = Time()
    clock = started(time)
    for call in range(3):
        silence = clock.silences()
        time.now += 5
        for _ in range(4):
            silence(True)
            time.now += 10
        silence(False)
        assert clock.used() == 5 * (call + 1) + max(0, 40 * (call + 1) - 60)


async def test_a_rest_below_the_steps_of_the_clock_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding it to the loop's time may change nothing, and the loop would do nothing else."""
    time, loop, delays = Time(), asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def noted(delay: float, *arguments: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(delay, *arguments)

    monkeypatch.setattr(loop, "call_later", noted)
    clock = AgentClock(60, 0.0, time)
    async with clock.running():
        time.now = 60 - 1e-14
        clock.exclude(0, 0)
        assert 0 < clock.seconds - clock.used() < 1e-13
    assert min(delays) >= timing.LEAST_SECONDS


async def test_agent_timeout_differs_from_an_agent_that_raises_timeout_error() -> None:
    over, own = AgentClock(0.01), AgentClock(60)
    with pytest.raises(TimeoutError):
        async with over.running():
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError):
        async with own.running():
            raise TimeoutError
    assert (over.expired, own.expired) == (True, False)


async def test_clock_is_stopped_until_the_last_of_several_waits_ends() -> None:
    clock = AgentClock(0.2)
    async with clock.running():
        await asyncio.gather(*(clock.untimed(asyncio.sleep(seconds)) for seconds in (0.01, 0.4, 0.1)))
    assert not clock.expired
    used = clock.used()
    await asyncio.sleep(0.01)
    assert clock.used() == used, "the agent has ended"


@pytest.mark.parametrize("before", [0.1, 1.02], ids=["", "shortly before the end"])
async def test_agent_does_not_pay_for_time_in_which_its_process_stood_still(
    before: float, monkeypatch: pytest.MonkeyPatch, virtual_clock: VirtualClock
) -> None:
    for module in (agent_clock, timing):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.1)
    clock = AgentClock(1.05)
    async with clock.running():
        await asyncio.sleep(before)
        virtual_clock.now += 1.5  # as SIGSTOP does
        await asyncio.sleep(0.01)
    assert not clock.expired, "a run that was stopped with Ctrl-Z would grade all its rollouts as AgentTimeout"
    assert clock.used() < 1.05


async def test_continuing_agent_reaches_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (agent_clock, timing):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.1)
    clock = AgentClock(0.5)
    with pytest.raises(TimeoutError):
        async with clock.running():
            await asyncio.sleep(60)
    assert clock.expired
    assert clock.used() >= 0.5


async def test_time_that_was_used_up_under_an_earlier_runner_ends_the_agent_at_once() -> None:
    clock = AgentClock(60, used_before=61)

    async def resumed() -> None:
        async with clock.running():
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await resumed()
    assert clock.expired
