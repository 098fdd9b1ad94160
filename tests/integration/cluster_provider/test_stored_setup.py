"""Setups that are stored as layers, in sandboxes of a cluster."""

import asyncio
from pathlib import Path

from agent_runtime.builds.build import Builder, BuildOptions
from agent_runtime.builds.cache import BuildCache
from agent_runtime.builds.provider import BuildingProvider
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Workspace
from agent_runtime.sandboxes.cluster.provider import ClusterProvider
from tests.integration.cluster_provider.conftest import FIRST, Opened, spec

UNIQUE = "cat /proc/sys/kernel/random/uuid > made"


def building(provider: ClusterProvider, output: Path, runner: int, made: list[str]) -> BuildingProvider:
    store = Store.open(str(output), {})
    options = BuildOptions(
        bases={},
        arguments={},
        secrets={},
        label=f"build{runner}",
        on_step=lambda entry, was_stored: None if was_stored else made.append(entry.step),
    )
    return BuildingProvider(
        provider, Builder(provider, BuildCache(store, store.below("run"), Layers(store, store.below("run"))), options)
    )


async def prepared(provider: BuildingProvider, *setup: str, attempt: str = "0-0") -> Workspace:
    wanted = spec("g0", setup=setup, stores_setup=True)
    return await provider.acquire(wanted, attempt=attempt, fence=FIRST, name="agent")


async def test_another_runner_starts_from_the_stored_setup(opened: Opened, tmp_path: Path) -> None:
    made: list[str] = []
    found = set()
    for runner in range(2):
        provider = building(await opened(runner=runner), tmp_path, runner, made)
        for member in range(2):
            workspace = await prepared(provider, UNIQUE, attempt=f"{member}-0")
            found.add(await workspace.read("made"))
    assert len(found) == 1
    assert len(made) == 1


async def test_restarted_runner_continues_a_setup_that_still_runs(opened: Opened, tmp_path: Path) -> None:
    made: list[str] = []
    commands = ("cat /proc/sys/kernel/random/uuid > first", "sleep 2", "cat first > made")
    before = building(await opened(), tmp_path, 0, made)
    running = asyncio.create_task(prepared(before, *commands))
    await asyncio.sleep(1)
    after = building(await opened(), tmp_path, 0, made)
    both = await asyncio.gather(running, prepared(after, *commands, attempt="1-0"))
    one, other = [await workspace.read("made") for workspace in both]
    assert one == other
