"""Bytes that are held for tenants: of all of them together, and of one namespace."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.tenant_limits import ByteBudget, shortened


@given(st.text(max_size=200), st.integers(20, 100))
def test_shortened_text_keeps_its_start_and_its_end(text: str, most: int) -> None:
    found = shortened(text, most)
    assert len(found) == min(len(text), most)
    assert found == text or (text.startswith(found[:10]) and text.endswith(found[-4:]))


async def test_bytes_wait_until_others_are_free() -> None:
    budget, order = ByteBudget(total=30), list[str]()

    async def use(namespace: str, size: int, until: asyncio.Event) -> None:
        async with budget.hold(namespace) as held:
            await held.grow(size)
            order.append(namespace)
            await until.wait()

    first, last = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(use("a", 7, first))
        group.create_task(use("b", 8, last))
        await asyncio.sleep(0)
        assert order == ["a"]
        group.create_task(use("c", 3, last))
        await asyncio.sleep(0)
        assert order == ["a", "c"], "it fits"
        first.set()
        await asyncio.sleep(0.01)
        assert order == ["a", "c", "b"]
        last.set()
    assert budget.has_room("a", 10)


async def test_one_namespace_gets_only_its_share() -> None:
    budget = ByteBudget(total=18)
    async with budget.hold("a") as one, budget.hold("a") as two, budget.hold("b") as other:
        await one.grow(4)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await two.grow(3)
        assert two.waits
        await other.grow(4)
        one.shrink(1)
        await two.grow(2)
        one.shrink(2)
        assert (one.size, two.size, other.size) == (1, 2, 4)


@given(st.integers(0, 40), st.integers(1, 1000))
def test_namespaces_that_hold_all_they_may_leave_room_for_another_one(others: int, step: int) -> None:
    total = 1_000_000
    budget, held = ByteBudget(total), 0
    for number in range(others):
        while budget.has_room(str(number), step):
            budget.add(str(number), step)
            held += step
    assert total - held >= total * (2 / 3) ** others
    assert budget.has_room("another", (total - held) // 3)


async def test_bytes_of_a_cancelled_operation_are_free() -> None:
    budget = ByteBudget(total=30)

    async def use() -> None:
        async with budget.hold("a") as held:
            await held.grow(10)
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    assert not budget.has_room("b", 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert budget.has_room("b", 10)
