"""Rollouts per GB in a sandbox whose memory is overcommitted, against one that has room for all peaks.

The traces are synthetic, with the shape that AgentCgroup measured (arXiv 2602.09345). A rollout lives 12 s, of which its
start takes 31 to 48 %, without memory. Then come four bursts of three tool calls, between which it waits for its model.
A call holds 2 to 16 MB (lognormal, median 4) for 0.1 to 0.4 s, besides 10 MB of its interpreter. One call of each
rollout holds 140 MB for 0.5 s: with the interpreter, 15 times the mean of its life. Each may use 200 MB. They
begin within 12 s; each has the same pauses and sizes in all cases.

The last three rows are of one more run, in a sandbox of the size that `resources.memoryRequest: Measured` gives it after the
others.
"""

import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent_runtime.sandboxes.base import Fence, SandboxFailure, WorkspaceLimit, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Hold
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from benchmarks.executor_start import running_executor
from benchmarks.report import Row, Target, comparison
from rollout_api.measured_memory import Measured, request_of
from rollout_api.sandbox import Resources

SANDBOX_BYTES = 1_200_000_000
OWN_BYTES = 200_000_000
AT_PEAK = SANDBOX_BYTES // OWN_BYTES
OVERCOMMITTED = 5 * AT_PEAK
LIFE_SECONDS = 12.0
PEAK_MB, PEAK_SECONDS = 140, 0.5
BURSTS, CALLS = 4, 3
PROGRAM = "import sys, time; a = b'x' * (int(sys.argv[1]) * 1_000_000); time.sleep(float(sys.argv[2]))"


class Call(NamedTuple):
    """A tool call: seconds to wait before it, megabytes, and seconds in which it holds them."""

    pause: float
    megabytes: int
    seconds: float


def trace(number: int) -> Sequence[Call]:
    """Return the calls of a rollout, always the same for a number."""
    chance = random.Random(number)
    start = chance.uniform(0.31, 0.48) * LIFE_SECONDS
    peak = chance.randrange(BURSTS * CALLS)
    think = (LIFE_SECONDS - start) / (BURSTS + 1)
    calls = []
    for index in range(BURSTS * CALLS):
        pause = (start if index == 0 else think * chance.uniform(0.5, 1)) if index % CALLS == 0 else 0.0
        small = min(16, max(2, round(chance.lognormvariate(1.4, 0.7))))
        is_peak = index == peak
        calls.append(Call(pause, PEAK_MB if is_peak else small, PEAK_SECONDS if is_peak else chance.uniform(0.1, 0.4)))
    return calls


def measure() -> list[Row]:
    """Return how many rollouts a GB carries, how many were lost, and how much longer they took."""
    few, none_lost, _ = asyncio.run(_all(AT_PEAK))
    many, lost, measured = asyncio.run(_all(OVERCOMMITTED))
    # A request needs more workspace-seconds than one run has.
    _, lost_again, more = asyncio.run(_all(OVERCOMMITTED))
    request = request_of(measured + more, OWN_BYTES, OVERCOMMITTED)
    assert request is not None
    as_measured, lost_then, _ = asyncio.run(_all(OVERCOMMITTED, OVERCOMMITTED * request))
    a_gb = SANDBOX_BYTES / 1e9
    slower, slower_then = _times(many, few), _times(as_measured, few)
    return [
        comparison(
            "rollouts a GB", OVERCOMMITTED / a_gb, "", "requests of the peak:", AT_PEAK / a_gb, Target("at least", 4)
        ),
        Row("lost", lost + lost_again + none_lost, "", target=Target("at most", 0)),
        Row("time of the same rollouts", slower, "×", "requests of the peak", target=Target("at most", 1.05)),
        comparison(
            "rollouts a GB, Measured", 1e9 / request, "", "requests of the peak:", AT_PEAK / a_gb, Target("at least", 4)
        ),
        Row("lost, Measured", lost_then, "", target=Target("at most", 0)),
        Row("time, Measured", slower_then, "×", "requests of the peak", target=Target("at most", 1.05)),
    ]


def _times(seconds: Mapping[int, float], few: Mapping[int, float]) -> float:
    """Return how much longer the same rollouts took."""
    both = seconds.keys() & few.keys()
    return sum(seconds[number] for number in both) / sum(few[number] for number in both)


async def _all(count: int, sandbox_bytes: int = SANDBOX_BYTES) -> tuple[dict[int, float], int, Measured]:
    """Run so many rollouts at once; return the seconds of each, how many lost their workspace, and the memory used."""
    with running_executor(mode="Overlay", places=count, memoryBytes=sandbox_bytes) as (address, token):
        client = ExecutorClient(address, token)
        workspaces = [await _workspace(client, number) for number in range(count)]
        jobs = [_run(workspace, number) for number, workspace in enumerate(workspaces)]
        seconds = await asyncio.gather(*jobs)
        measured = Measured.model_validate((await client.health())["memoryBytes"]["measured"])
        await client.close()
    kept = {number: taken for number, taken in enumerate(seconds) if taken is not None}
    return kept, count - len(kept), measured


async def _workspace(client: ExecutorClient, number: int) -> ExecutorWorkspace:
    spec = WorkspaceSpec(group="g0", working_dir="/", resources=Resources(memory=str(OWN_BYTES)))
    workspace = ExecutorWorkspace(client, Hold(f"rollout-{number}", Fence(1, "bench")), spec, handle={}, description={})
    await workspace.create(None, {})
    return workspace


async def _run(workspace: ExecutorWorkspace, number: int) -> float | None:
    """Return the seconds of a rollout; None if its workspace was ended."""
    await asyncio.sleep(random.Random(-1 - number).uniform(0, LIFE_SECONDS))
    started = time.perf_counter()
    try:
        for turn, call in enumerate(trace(number)):
            await asyncio.sleep(call.pause)
            command = ["/usr/bin/python3", "-c", PROGRAM, str(call.megabytes), str(call.seconds)]
            result = await workspace.run(command, key=f"{turn}:call", deadline_seconds=60)
            if not result.ok:
                raise RuntimeError(f"a call of rollout {number} ended with {result}")
    except (SandboxFailure, WorkspaceLimit) as lost:
        print(f"rollout {number} was lost: {lost}", file=sys.stderr)
        return None
    return time.perf_counter() - started
