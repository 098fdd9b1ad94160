"""The time of a tool call that runs `true` and reads its output: as a bare process, through our executor, and through
SWE-ReX.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agent_runtime.sandboxes.base import Fence, Workspace, WorkspaceSpec
from agent_runtime.sandboxes.factory import open_provider
from benchmarks.conversation import Subject
from benchmarks.jobs import SAYS_DONE, inline_tasks, rollout_job
from benchmarks.measuring import quantile
from benchmarks.peers import SWE_REX, install
from benchmarks.report import Row, Target, comparison, percentile_rows

ROUNDS = 10  # alternating, so that other load of the machine affects all of them
CALLS = 50  # per round
SESSION_CALLS = 10  # per round: each takes 40 times as long
BARE, OURS, EXECUTE, SESSION = "bare asyncio spawn", "our executor", "SWE-ReX execute", "SWE-ReX run_in_session"


def measure() -> list[Row]:
    seconds = asyncio.run(_all_rounds())
    rows = [row for who, found in seconds.items() for row in percentile_rows(who, found)]
    middle = {who: quantile(found, 0.5) * 1e3 for who, found in seconds.items()}
    ours = middle[OURS]
    return [
        *rows,
        comparison("ours, times the bare spawn", ours, "ms", BARE, middle[BARE], Target("at most", 2)),
        comparison("times faster", ours, "ms", EXECUTE, middle[EXECUTE], Target("at least", 3), inverse=True),
        comparison("times faster", ours, "ms", SESSION, middle[SESSION], Target("at least", 40), inverse=True),
    ]


async def _all_rounds() -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {BARE: [], OURS: [], EXECUTE: [], SESSION: []}
    with (
        Subject("benchmarks.subjects.swe_rex", install(SWE_REX)) as rex,
        tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder,
    ):
        job = rollout_job(
            f"{folder}/output", tasks=inline_tasks(1), model=SAYS_DONE, sandbox={"workspaces": {"mode": "Overlay"}}
        )
        provider = open_provider(job.spec, Path(folder))
        await provider.open()
        try:
            fence = Fence(1, "benchmark")
            spec = WorkspaceSpec(group="g0", working_dir="/workspace")
            workspace = await provider.acquire(spec, attempt="0-0", fence=fence, name="agent")
            for number in range(ROUNDS + 1):
                taken = {
                    BARE: await _bare(CALLS),
                    OURS: await _ours(workspace, number * CALLS, CALLS),
                    EXECUTE: rex.ask(call="execute", times=CALLS)["seconds"],
                    SESSION: rex.ask(call="session", times=SESSION_CALLS)["seconds"],
                }
                if number:  # the first round is a warm-up
                    for who, found in taken.items():
                        seconds[who] += found
            await workspace.release()
        finally:
            await provider.close()
    return seconds


async def _bare(times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            "true", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await process.communicate()
        seconds.append(time.perf_counter() - started)
    return seconds


async def _ours(workspace: Workspace, first: int, times: int) -> Sequence[float]:
    seconds = []
    for turn in range(first, first + times):
        started = time.perf_counter()
        result = await workspace.run(["true"], key=f"{turn}:true", deadline_seconds=60)
        seconds.append(time.perf_counter() - started)
        if not result.ok:
            raise RuntimeError(f"true did not succeed in the workspace: {result}")
    await workspace.acknowledge(first + times)
    return seconds
