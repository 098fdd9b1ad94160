"""The time of an agent: what keeps it waiting counts for nobody, however many things do so at once."""

import asyncio

import pytest

from agent_runtime.engine.agent_deadline import AgentDeadline


async def test_an_agent_over_its_time_is_told_from_one_that_raises_timeout_error_itself() -> None:
    over, own = AgentDeadline(0.01), AgentDeadline(60)
    with pytest.raises(TimeoutError):
        async with over.running():
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError):
        async with own.running():
            raise TimeoutError
    assert (over.expired, own.expired) == (True, False)


async def test_the_deadline_stands_still_until_the_last_of_several_waits_is_over() -> None:
    deadline = AgentDeadline(0.2)
    async with deadline.running():
        await asyncio.gather(*(deadline.untimed(asyncio.sleep(seconds)) for seconds in (0.01, 0.4, 0.1)))
    assert not deadline.expired


async def test_what_is_left_of_the_time_is_the_same_after_a_wait_and_shifts_count_meanwhile() -> None:
    deadline = AgentDeadline(60)
    async with deadline.running():
        deadline.wait("store")
        before = deadline.left()
        deadline.shift(-20)
        assert deadline.left() == before - 20
        await asyncio.sleep(0.01)
        assert deadline.left() == before - 20
        deadline.go_on("store")
        assert before - 21 < deadline.left() <= before - 20


async def test_time_that_was_used_up_before_ends_the_agent_at_once() -> None:
    deadline = AgentDeadline(60)

    async def resumed() -> None:
        async with deadline.running():
            deadline.shift(-61)
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await resumed()
    assert deadline.expired
