"""Groups that end at the same moment must not end a job, nor a sandbox that another one still uses."""

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.base import Fence, WorkspaceSpec
from agent_runtime.sandboxes.hosting import OverlaySandbox, OverlaySandboxes


class Sandbox:
    """Answers after so many turns of the event loop."""

    def __init__(self, delays: list[int]) -> None:
        self.delays = delays
        self.calls = self.ended = 0
        self.held: set[str] = set()

    async def call(self) -> None:
        assert not self.ended, "a call to a sandbox that has ended"
        self.calls += 1
        for _ in range(self.delays.pop() if self.delays else 0):
            await asyncio.sleep(0)
        assert not self.ended, "ended while a call was under way"

    async def acquire(self, spec: WorkspaceSpec, **rest: Any) -> None:
        await self.call()
        self.held.add(spec.group)

    async def forget_group(self, group: str) -> None:
        await self.call()
        self.held.discard(group)

    async def is_empty(self) -> bool:
        found = not self.held
        await self.call()
        return found

    async def end(self) -> None:
        self.ended += 1


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=20))
def test_groups_that_end_together_end_their_sandbox_once_and_after_all_calls(count: int, delays: list[int]) -> None:
    async def scenario() -> None:
        sandbox = Sandbox([*delays])

        async def open_one(key: str, spec: WorkspaceSpec) -> OverlaySandbox:
            return cast(OverlaySandbox, sandbox)

        sandboxes = OverlaySandboxes(open_one)
        for number in range(count):
            spec = WorkspaceSpec(group=f"g{number}", working_dir="/workspace")
            await sandboxes.acquire("image", spec, attempt="0", fence=cast(Fence, None), name="a")
        await asyncio.gather(*(sandboxes.forget_group(f"g{number}") for number in range(count)))
        assert sandbox.ended == 1

    asyncio.run(scenario())
