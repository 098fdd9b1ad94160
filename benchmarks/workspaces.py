"""The time and memory of workspaces on this machine, compared with common alternatives in one run.

    sudo python -m benchmarks.workspaces [--state-dir DIR] [--count N]

Prints a table: p50, p99, and the ratio to the alternative. The machine's load affects all figures of a run, so compare only
figures of the same run.
"""

from __future__ import annotations

from agent_runtime.executor.overlay import open_host, start_zygote

start_zygote()

import argparse  # noqa: E402 (the zygote is forked before anything else is imported, as in the executor)
import asyncio  # noqa: E402
import contextlib  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Awaitable, Callable  # noqa: E402

from agent_runtime.executor.host import WorkspaceSpec  # noqa: E402
from agent_runtime.executor.init.channel import StartRequest  # noqa: E402
from agent_runtime.executor.overlay.config import HostConfig  # noqa: E402
from agent_runtime.executor.overlay.hosts import Host  # noqa: E402
from agent_runtime.executor.overlay.workspace import Workspace, spawn  # noqa: E402
from benchmarks.measuring import quantile  # noqa: E402

_PREPARED_FILES = 2_000
_PREPARED_BYTES = 50_000
_WRITTEN_BYTES = 400_000_000
_PAUSE_SECONDS = 0.005


async def timed(count: int, work: Callable[[int], Awaitable[object]]) -> list[float]:
    """Return milliseconds of each of `count` sequential runs."""
    times = []
    for index in range(count):
        began = time.perf_counter()
        await work(index)
        times.append((time.perf_counter() - began) * 1000)
    return times


def report(name: str, times: list[float], beside: tuple[str, list[float]] | None = None) -> None:
    text = f"{name:<58} p50 {quantile(times, 0.5):7.2f} ms   p99 {quantile(times, 0.99):7.2f} ms"
    if beside is not None:
        text += f"   {quantile(times, 0.5) / quantile(beside[1], 0.5):.2f} x {beside[0]}"
    print(text, flush=True)


async def run(workspace: Workspace, argv: list[str] | str) -> None:
    """Run a command in a workspace and read all its output, as a tool call does."""
    readable, writable = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    child = await spawn(workspace, StartRequest(argv), [null, writable, os.dup(null)])
    ended = await child.exited
    while os.read(readable, 65536):
        pass
    os.close(readable)
    if ended.code != 0:
        raise SystemExit(f"{argv!r} in a workspace ended with {ended}")


async def bare(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{argv!r} ended with {process.returncode}")


async def bubblewrap() -> None:
    await bare("bwrap", "--unshare-all", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true")


def private_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))
    except OSError:
        return 0


def descendants(of: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{of}/task"):
            with open(f"/proc/{of}/task/{task}/children", encoding="ascii") as file:
                found += [int(pid) for pid in file.read().split()]
    return [*found, *(below for child in found for below in descendants(child))]


async def measure_many(host: Host, count: int) -> None:
    before = set(descendants(os.getpid()))
    began = time.perf_counter()
    workspaces = [await host.create(WorkspaceSpec(f"live {index}")) for index in range(count)]
    created = time.perf_counter() - began
    await asyncio.gather(*(run(workspace, ["true"]) for workspace in workspaces))
    inits = [pid for pid in descendants(os.getpid()) if pid not in before]
    memory = sum(private_bytes(pid) for pid in inits) / count / 1e6
    idle_before = time.process_time()
    await asyncio.sleep(2)
    idle = (time.process_time() - idle_before) / 2 * 100
    began = time.perf_counter()
    await asyncio.gather(*(workspace.destroy() for workspace in workspaces))
    print(
        f"{count} live workspaces: created in {created:.2f} s, {memory:.2f} MB of their own each, "
        f"executor's CPU while idle {idle:.1f} %, destroyed in {time.perf_counter() - began:.2f} s"
    )


async def measure(state_dir: str, count: int) -> None:
    began = time.perf_counter()
    host, reason = await open_host(HostConfig(state_dir=state_dir, places=1000))
    print(f"mode {host.mode} ({reason or 'proved by trial'}), opened in {(time.perf_counter() - began) * 1000:.0f} ms")
    if host.mode != "Overlay":
        raise SystemExit("this benchmark needs Overlay mode")

    async def whole_life(index: int) -> None:
        workspace = await host.create(WorkspaceSpec(f"life {index}"))
        await run(workspace, ["true"])
        await workspace.destroy()

    live = await host.create(WorkspaceSpec("live"))
    await timed(20, lambda _: run(live, ["true"]))
    spawns, inside = [], []
    for _ in range(count * 3):
        # Alternating, so that the machine's load is the same for both; with a pause, as tool calls have a model's turn
        # between them.
        await asyncio.sleep(_PAUSE_SECONDS)
        spawns += await timed(1, lambda _: bare("true"))
        await asyncio.sleep(_PAUSE_SECONDS)
        inside += await timed(1, lambda _: run(live, ["true"]))
    rows = await timed(count * 3, lambda _: run(live, ["true"]))
    wrapped = await timed(count, lambda _: bubblewrap()) if shutil.which("bwrap") else None
    report("asyncio spawn of `true`, output read", spawns)
    report("`true` in a live workspace, output read", inside, ("asyncio spawn", spawns))
    report("the same, one right after the other", rows, ("asyncio spawn", spawns))
    if wrapped is None:
        print("bwrap is not installed (apt-get install bubblewrap): not compared")
    else:
        report("bwrap --unshare-all true", wrapped, ("asyncio spawn", spawns))
    whole = await timed(count, whole_life)
    report("create + `true` + destroy", whole, ("bwrap", wrapped) if wrapped else None)

    writer = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        f"while :; do head -c {_WRITTEN_BYTES} /dev/zero > written; done",
        cwd=state_dir,
        start_new_session=True,
    )
    await asyncio.sleep(1)
    beside_writer = await timed(count, whole_life)
    os.killpg(writer.pid, signal.SIGKILL)
    await writer.wait()
    report("the same while another process writes to that disk", beside_writer, ("without", whole))

    prepared = await host.create(WorkspaceSpec("prepared"))
    await run(
        prepared,
        f"mkdir -p /prepared && cd /prepared && for i in $(seq {_PREPARED_FILES}); do "
        f"head -c {_PREPARED_BYTES} /dev/zero > $i; done; rm -rf /usr/share/doc",
    )
    await prepared.freeze()
    forks: list[Workspace] = []

    async def fork(index: int) -> None:
        forks.append(await host.create(WorkspaceSpec(f"fork {index}", parent="prepared")))

    forked = await timed(count, fork)
    report(f"fork of a prepared one ({_PREPARED_FILES} files, 100 MB)", forked)
    for workspace in forks:
        await workspace.destroy()
    await measure_many(host, 200)
    await host.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-dir", help="where layers are written; default: a temporary folder")
    parser.add_argument("--count", type=int, default=100, help="runs of each measurement (default 100)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments.state_dir or folder, arguments.count))


if __name__ == "__main__":
    main()
