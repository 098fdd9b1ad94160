"""Which runner may act for an attempt, for every order in which runners can arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent_runtime.executor.attempts import Attempt, Fence, Hold, Key, StoredReply
from agent_runtime.executor.commands.processes import Process
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.http.messages import Reply
from tests.support.full import examples

HOLDS = st.builds(Hold, st.integers(0, 3), st.sampled_from("ab"))


class FenceMachine(RuleBasedStateMachine):
    """Any interleaving of takeovers and calls, compared with the simplest correct model."""

    def __init__(self) -> None:
        super().__init__()
        self.fence = Fence("a")
        self.raised: list[Hold] = []

    @rule(hold=HOLDS)
    def raise_to(self, hold: Hold) -> None:
        before = self.raised[-1] if self.raised else None
        allowed = before is None or hold.epoch > before.epoch or hold == before
        if not allowed:
            with pytest.raises(ApiError, match="is held by"):
                self.fence.raise_to(hold)
            return
        assert self.fence.raise_to(hold) == (hold != before)
        self.raised.append(hold)

    @rule(hold=HOLDS)
    def begin(self, hold: Hold) -> None:
        if not self.raised or self.raised[-1] != hold:
            with pytest.raises(ApiError, match=r"never fenced|is held by"):
                self.fence.require(hold)
            return
        self.fence.require(hold)

    @invariant()
    def epochs_never_go_back(self) -> None:
        assert [hold.epoch for hold in self.raised] == sorted(hold.epoch for hold in self.raised)


TestAnOlderRunnerCanNeitherActNorBeOverlooked = FenceMachine.TestCase


def request(body: bytes = b"") -> Any:
    return SimpleNamespace(line="POST /x", body_complete=True, body_digest=b"d" + body)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["raise", "call", "start", "tick"]), HOLDS, st.booleans()), max_size=25))
def test_answered_takeover_leaves_no_running_call_of_an_older_runner(steps: list[Any]) -> None:
    async def play() -> None:
        attempt = Attempt("a")
        at_work: list[Hold] = []
        tasks = []

        async def take_over(hold: Hold) -> None:
            await attempt.raise_fence(hold)
            assert all(other == hold for other in at_work)

        async def call(hold: Hold, number: int, breakable: bool) -> None:
            async def work() -> StoredReply:
                at_work.append(hold)
                try:
                    await asyncio.sleep(0.001)
                finally:
                    at_work.remove(hold)
                return StoredReply(Reply(b"ok"), "/nonexistent")

            await attempt.once(hold, Key(0, f"k{number}"), request(), b"d", work, lambda: breakable)

        async def start(hold: Hold, number: int, at_once: bool) -> None:
            def make(settled: Callable[[], None]) -> Process:
                def settle() -> None:
                    at_work.remove(hold)
                    settled()

                at_work.append(hold)
                if at_once:
                    settle()
                else:
                    asyncio.get_running_loop().call_later(0.001, settle)
                return object.__new__(Process)

            attempt.start(hold, Key(0, f"k{number}"), request().line, b"d", make)

        for number, (what, hold, either) in enumerate(steps):
            match what:
                case "raise":
                    tasks.append(asyncio.create_task(take_over(hold)))
                case "call":
                    tasks.append(asyncio.create_task(call(hold, number, either)))
                case "start":
                    tasks.append(asyncio.create_task(start(hold, number, either)))
            await asyncio.sleep(0)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        refusals = [outcome for outcome in outcomes if outcome is not None]
        assert all(isinstance(refusal, ApiError) and refusal.code == "Fenced" for refusal in refusals)

    asyncio.run(play())


async def test_takeover_that_a_newer_one_overtakes_is_refused() -> None:
    attempt = Attempt("a")
    await attempt.raise_fence(Hold(1, "old"))
    release = asyncio.Event()

    async def work() -> None:
        await release.wait()

    working = asyncio.create_task(attempt.end(work, Hold(1, "old")))
    await asyncio.sleep(0)
    second = asyncio.create_task(attempt.raise_fence(Hold(2, "b")))
    third = asyncio.create_task(attempt.raise_fence(Hold(3, "c")))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(working, third)
    with pytest.raises(ApiError, match=r"epoch 3 of 'c'"):
        await second
