"""Who may have workspaces where all sandboxes share one memory."""

import asyncio
import contextlib

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.hosting import _Turns

STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "alone", "end", "cancel"]), st.sampled_from("abc")), min_size=1, max_size=30
)


@given(STEPS)
def test_one_that_must_be_alone_is_alone_and_nobody_waits_for_ever(steps: list[tuple[str, str]]) -> None:
    asyncio.run(played(steps))


async def played(steps: list[tuple[str, str]]) -> None:
    turns, holding, ends = _Turns(), list[tuple[str, bool]](), list[asyncio.Event]()
    tasks = list[tuple[str, asyncio.Task[None]]]()

    async def hold(attempt: str, end: asyncio.Event, *, alone: bool) -> None:
        async with turns.taken(attempt, alone=alone):
            holding.append((attempt, alone))
            lonely = {one for one, must in holding if must}
            assert not lonely or {one for one, _ in holding} == lonely
            await end.wait()
            holding.remove((attempt, alone))

    for what, attempt in steps:
        match what:
            case "begin" | "alone":
                end = asyncio.Event()
                ends.append(end)
                tasks.append((attempt, asyncio.create_task(hold(attempt, end, alone=what == "alone"))))
            case "end" if ends:
                ends.pop(0).set()
            case "cancel":
                waiting = [task for one, task in tasks if one == attempt and not task.done()]
                if waiting and not any(one == attempt for one, _ in holding):
                    waiting[0].cancel()
        await asyncio.sleep(0)
    for end in ends:
        end.set()
    async with asyncio.timeout(10):
        for _, task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    assert not holding


async def test_others_run_on_while_one_waits_to_be_alone() -> None:
    turns, end, alone = _Turns(), asyncio.Event(), asyncio.Event()

    async def wait_to_be_alone() -> None:
        async with turns.taken("b", alone=True):
            alone.set()
            await end.wait()

    async with turns.taken("a", alone=False):
        waiting = asyncio.create_task(wait_to_be_alone())
        await asyncio.sleep(0)
        async with turns.taken("c", alone=False):
            assert not alone.is_set()
    await asyncio.wait_for(alone.wait(), 10)
    async with turns.taken("b", alone=False):
        pass  # a second workspace of the same attempt
    end.set()
    await waiting
