"""Many live workspaces in one sandbox: the time until each has run a command, and what they need awake and at rest.

    sudo python -m benchmarks.many_workspaces [--state-dir DIR] [--count N] [--awake N]

Memory is what the machine has less of, so it includes that of the kernel; other programs of the machine disturb it.
"""

from __future__ import annotations

from agent_runtime.executor.overlay import open_host, start_zygote

start_zygote()

import argparse  # noqa: E402 (the zygote is forked before anything else is imported, as in the executor)
import asyncio  # noqa: E402
import dataclasses  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

from agent_runtime.executor.host import WorkspaceSpec  # noqa: E402
from agent_runtime.executor.overlay.config import HostConfig  # noqa: E402
from agent_runtime.executor.overlay.hosts import Host  # noqa: E402
from agent_runtime.executor.overlay.workspace import Workspace  # noqa: E402
from benchmarks.measuring import quantile  # noqa: E402
from benchmarks.workspaces import run, timed  # noqa: E402

_AT_ONCE = 64
_WOKEN = 500
_COMMAND = ["head", "-c", "1", "/dev/zero"]


def available_bytes() -> int:
    """Return the memory that the machine could still give to programs."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def used_disk(folder: str) -> tuple[int, int]:
    """Return bytes and inodes in use on a folder's file system."""
    info = os.statvfs(folder)
    return (info.f_blocks - info.f_bfree) * info.f_frsize, info.f_files - info.f_ffree


async def create_many(host: Host, name: str, count: int) -> tuple[list[Workspace], float]:
    """Return `count` workspaces that have each run a command, as a tool call does, and the seconds until the last had."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> Workspace:
        async with free:
            workspace = await host.create(WorkspaceSpec(f"{name}-{number}"))
            await run(workspace, _COMMAND)
            return workspace

    began = time.perf_counter()
    made = await asyncio.gather(*(one(number) for number in range(count)))
    return made, time.perf_counter() - began


async def measure(state_dir: str, count: int, awake: int) -> None:
    host, reason = await open_host(HostConfig(state_dir=state_dir, places=count + awake, rest_seconds=1.0))
    if host.mode != "Overlay":
        raise SystemExit(f"this benchmark needs Overlay mode: {reason}")
    await run(await host.create(WorkspaceSpec("warm")), _COMMAND)
    before, disk = available_bytes(), used_disk(state_dir)
    made, seconds = await create_many(host, "live", count)
    after = used_disk(state_dir)
    print(
        f"{count} workspaces: each has run a command after {seconds:.1f} s; "
        f"{(after[0] - disk[0]) / count / 1024:.1f} KB and {(after[1] - disk[1]) / count:.1f} inodes of disk each",
        flush=True,
    )
    while not all(workspace.is_resting for workspace in made):  # noqa: ASYNC110 nothing tells of it
        await asyncio.sleep(0.1)
    await asyncio.sleep(2)
    resting = (before - available_bytes()) / count
    print(f"at rest: {resting / 1024:.1f} KB of memory each", flush=True)
    woken = random.sample(made, min(_WOKEN, count))
    times = await timed(len(woken), lambda index: run(woken[index], _COMMAND))
    print(
        f"first result after a rest: p50 {quantile(times, 0.5):.1f} ms, p99 {quantile(times, 0.99):.1f} ms", flush=True
    )
    before = available_bytes()
    host.config = dataclasses.replace(host.config, rest_seconds=None)
    kept, _ = await create_many(host, "awake", awake)
    print(f"{awake} awake: {(before - available_bytes()) / awake / 1024:.0f} KB of memory each", flush=True)
    began = time.perf_counter()
    await asyncio.gather(*(workspace.destroy() for workspace in (*made, *kept)))
    print(f"all destroyed after {time.perf_counter() - began:.1f} s")
    await host.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-dir", help="where their layers are")
    parser.add_argument("--count", type=int, default=16_000)
    parser.add_argument("--awake", type=int, default=500)
    options = parser.parse_args()
    folder = options.state_dir or tempfile.mkdtemp(prefix="many-workspaces-")
    try:
        asyncio.run(measure(folder, options.count, options.awake))
    finally:
        if options.state_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
