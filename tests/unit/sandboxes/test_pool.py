"""Whatever fails or is cancelled at any await: no place is lost, and no workspace or executor is left running."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.sandboxes.base import Fence, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Hold, Reply
from agent_runtime.sandboxes.hosting import HostedProvider, Hosting, Placement
from tests.support.dummy_sandboxes import ended
from tests.support.full import examples

PLACES = 2
FENCE = Fence(1, "first")


class InMemoryExecutor(ExecutorClient):
    """An executor and its client: hosts workspaces by name, with as many places as the real one."""

    def __init__(self, world: "World", name: str) -> None:
        super().__init__("unix:", "token", "boot")
        self.world, self.name, self.client, self.mode = world, name, self, world.mode
        self.live: set[str] = set()
        self.frozen: set[str] = set()

    async def call(self, method: str, path: str, *, hold: Hold | None = None, **arguments: Any) -> Reply:
        try:
            return await self._answer(method, path, **arguments)
        except SandboxFailure as failure:
            if failure.reason == "SandboxLost":
                self.world.running.pop(self.name, None)
            raise

    async def _answer(self, method: str, path: str, **arguments: Any) -> Reply:
        await self.world.step()
        if self.name not in self.world.running:
            raise SandboxFailure("SandboxLost", "it has ended")
        match method, path.split("/")[1:]:
            case "POST", ["workspaces"]:
                wanted = arguments["json_body"]["id"]
                if len(self.live - {wanted}) >= self.world.places_of_executor:
                    raise SandboxFailure("NoPlace", "all places are taken")
                self.live.add(wanted)
            case "POST", ["workspaces", name, "freeze"]:
                self.live.discard(name)
                self.frozen.add(name)
            case "DELETE", ["attempts", name]:
                self.live.discard(name)
                self.frozen.discard(name)
        await self.world.step()
        listed = [{"id": name, "layers": []} for name in sorted(self.live | self.frozen)]
        return Reply(json.dumps({"workspaces": listed, "state": "Live"}).encode(), {})

    async def run(self, *_: Any, **__: Any) -> Any:
        await self.world.step()
        return ended()

    async def stop(self) -> None:
        self.world.running.pop(self.name, None)
        await self.world.step()


@dataclass
class World:
    """The running executors, and the await at which something happens."""

    mode: str
    at: Callable[[], Awaitable[None]] | None = None
    """Called at every await of the executors."""
    running: dict[str, InMemoryExecutor] = field(default_factory=dict)

    @property
    def places_of_executor(self) -> int:
        return 1 if self.mode == "Plain" else PLACES

    async def step(self) -> None:
        if self.at is not None:
            await self.at()
        await asyncio.sleep(0)

    async def find(self, name: str) -> InMemoryExecutor | None:
        await self.step()
        return self.running.get(name)

    async def start(self, name: str, spec: WorkspaceSpec) -> InMemoryExecutor:
        await self.step()
        self.running[name] = InMemoryExecutor(self, name)
        try:
            await self.step()
        except BaseException:
            del self.running[name]
            raise
        return self.running[name]

    def names(self) -> Sequence[str]:
        return list(self.running)


class Provider(HostedProvider):
    name = "test"

    def __init__(self, world: World) -> None:
        super().__init__()
        self._open_pool(Hosting(world.mode, PLACES, 3600, {}, {"mode": world.mode}, "test"), cast(Any, world))

    async def _placed(self, spec: WorkspaceSpec) -> Placement:
        return Placement(spec, "shared", *self._found)

    async def settled(self) -> None:
        """Wait until every lease has ended."""
        assert self._pool is not None
        await asyncio.gather(*(lease.end() for lease in self._pool._leases.values()), return_exceptions=True)

    def assert_all_places_are_free(self) -> None:
        assert self._free._value == PLACES
        for sandbox in self._sandboxes.values():
            assert (sandbox.leases, sandbox.free._value) == (0, PLACES)


def spec(group: str = "g0", **changes: Any) -> WorkspaceSpec:
    return WorkspaceSpec(group=group, working_dir="/w", setup=["make"], start_seconds=30, **changes)


async def rollout(provider: Provider, attempt: str, wanted: WorkspaceSpec) -> None:
    """Run an agent's workspace, a fork of it in `Overlay`, and a grading beside it."""
    workspace = await provider.acquire(wanted, attempt=attempt, fence=FENCE, name="agent")
    try:
        if provider._found[0].mode == "Overlay":
            await workspace.freeze()
            await workspace.fork("agent.1")
    finally:
        await workspace.release()
    grading = await provider.acquire(wanted, attempt=attempt, fence=FENCE, name="grading")
    await grading.release()


class Injected(Exception):
    """A failure that a sandbox is not expected to have."""


@pytest.mark.parametrize("kind", ["cancelled", "SandboxLost", "Injected"])
@pytest.mark.parametrize(("mode", "alone"), [("Plain", False), ("Overlay", False), ("Overlay", True)])
def test_pool_loses_nothing_when_any_await_fails_or_is_cancelled(kind: str, mode: str, alone: bool) -> None:
    async def scenario(number: int) -> bool:
        """Run the scenario; return whether it has this many awaits."""
        awaits = itertools.count()
        has_happened = False

        async def at() -> None:
            nonlocal has_happened
            if next(awaits) == number:
                has_happened = True
                if kind == "cancelled":
                    rollouts[0].cancel()
                elif kind == "SandboxLost":
                    raise SandboxFailure("SandboxLost", "injected")
                else:
                    raise Injected

        world = World(mode, at)
        provider = Provider(world)
        rollouts = [asyncio.create_task(rollout(provider, f"{i}-0", spec(alone=alone))) for i in range(2)]
        await asyncio.gather(*rollouts, return_exceptions=True)
        await provider.settled()
        world.at = None
        await provider.forget_group("g0")
        provider.assert_all_places_are_free()
        # A removal that fails in a way nobody expects leaves its workspace to the provider's end.
        assert kind == "Injected" or not world.running
        return has_happened

    assert asyncio.run(scenario(0))
    for number in itertools.count(1):
        if not asyncio.run(scenario(number)):
            break
    assert number > 50


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(["Plain", "Overlay"]),
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.one_of(st.none(), st.integers(0, 120))), max_size=8),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_pool_ends_every_sandbox_after_any_mix_of_rollouts_and_cancellations(
    mode: str, wanted: list[tuple[int, bool, int | None]], delays: list[int]
) -> None:
    provider = cast(Provider, None)

    async def at() -> None:
        for name, executor in world.running.items():
            assert len(executor.live) <= world.places_of_executor
            if name != "shared":
                attempts = {identity.partition(".")[0] for identity in executor.live if "." in identity}
                assert len(attempts) <= 1, "a sandbox without neighbours has one"
        for _ in range(delays.pop() if delays else 0):
            await asyncio.sleep(0)

    async def one(number: int, group: int, alone: bool, patience: int | None) -> None:
        task = asyncio.create_task(rollout(provider, f"{number}-0", spec(f"g{group}", alone=alone)))
        if patience is not None:
            for _ in range(patience):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        assert not isinstance(results[0], Exception), results

    async def group_of(group: int) -> None:
        members = [(number, *each) for number, each in enumerate(wanted) if each[0] == group]
        await asyncio.gather(*(one(*member) for member in members))
        await provider.forget_group(f"g{group}")

    async def scenario() -> None:
        nonlocal provider
        provider = Provider(world)
        await asyncio.gather(*(group_of(group) for group in range(3)))
        await provider.settled()
        provider.assert_all_places_are_free()
        assert not world.running

    world = World(mode, at)
    asyncio.run(scenario())


async def test_closing_the_pool_keeps_workspaces_for_the_next_process() -> None:
    for mode in ("Plain", "Overlay"):
        world = World(mode)
        first, second = Provider(world), Provider(world)
        workspace = await first.acquire(spec(), attempt="0-0", fence=FENCE, name="agent")
        await first._release()
        again = await second.reattach(workspace.handle, spec=spec(), fence=FENCE)
        await again.release()
        await second.forget_group("g0")
        second.assert_all_places_are_free()
        assert not world.running
