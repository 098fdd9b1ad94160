"""Memory is overcommitted: workspaces pause before one is ended, and only the last resort ends one within its limit."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from agent_runtime.sandboxes.executor_client.commands import Refused

PYTHON = "/usr/bin/python3"
# All sizes below are in this unit. Programs use one more each 0.05 s, and a sandbox of 600 of them is so large that
# memory is measured in time on a busy machine too.
MB = 4_000_000
LIMIT = 600 * MB
# A pod's limit is higher than the sandbox's: 48 MiB and 6 for each place are for the executor.
OWN_SHARE = (48 + 8 * 6) << 20
OWN = {"memoryBytes": 200 * MB}
ALLOCATE = (
    f"import time; a = [(time.sleep(0.05), b'x' * {MB}) for _ in range({{megabytes}})]; "
    "print('allocated', flush=True); time.sleep({seconds})"
)
HOLD = f"""
import os, time
a = []
while not os.path.exists('/released'):
    time.sleep(0.05)
    if len(a) < {{megabytes}}:
        a.append(b'x' * {MB})
"""


def allocating(megabytes: int, seconds: float) -> list[str]:
    return [PYTHON, "-c", ALLOCATE.format(megabytes=megabytes, seconds=seconds)]


def holding(megabytes: int) -> list[str]:
    """Return a command that keeps its memory until `release`: so a slow machine changes nothing of who waits for whom."""
    return [PYTHON, "-c", HOLD.format(megabytes=megabytes)]


async def release(clients: list[Any]) -> None:
    """Let the commands of `holding` end."""
    for client in clients:
        assert (await client.call("PUT", "~/files?path=@/released", data=b"")).status == 200


async def memory_of(client: Any, *, most: float = LIMIT + OWN_SHARE) -> dict[str, Any]:
    health = (await client.call("GET", "/health")).json["memoryBytes"]
    assert health["used"] < most, "nothing may rely on the kernel"
    return dict(health)


@pytest.fixture
async def six(start_executor: Any, connect: Any) -> Any:
    """Six workspaces that may use 200 MB each, in a sandbox of 600 MB."""
    executor = start_executor("Overlay", places=8, memoryBytes=LIMIT)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(executor, limits=OWN)) for _ in range(6)]
        for client in clients:
            client.folder = "/"
        yield clients


async def run(client: Any, command: str | list[str], **how: Any) -> Any:
    answer = await client.ask(command, client.new_key(), **{"waitSeconds": 120, "deadlineSeconds": 600, **how})
    assert not isinstance(answer, Refused), answer.body
    return answer


async def watched(client: Any, jobs: list[asyncio.Task[Any]], **how: float) -> list[dict[str, Any]]:
    """Return the sandbox's memory, read repeatedly until one of the jobs has ended."""
    seen = []
    while not any(job.done() for job in jobs):
        seen.append(await memory_of(client, **how))
        await asyncio.sleep(0.02)
    return seen


async def test_programs_that_free_their_memory_all_end_by_themselves(six: list[Any]) -> None:
    unpaid: list[float] = []

    async def timed(client: Any) -> Any:
        began = time.monotonic()
        result = await run(client, holding(150))
        unpaid.append(time.monotonic() - began - result.seconds)
        return result

    jobs = [asyncio.create_task(timed(client)) for client in six]
    paused, looked_at = 0.0, time.monotonic()
    # On a busy machine others are paused in turn.
    async with asyncio.timeout(300):
        while paused < 2:
            is_paused, now = (await memory_of(six[0]))["paused"] > 0, time.monotonic()
            paused += now - looked_at if is_paused else 0
            looked_at = now
            await asyncio.sleep(0.02)
    await release(six)
    ended = [await job for job in jobs]
    assert [(result.exit_code, result.cause) for result in ended] == [(0, None)] * 6
    assert sum(unpaid) > paused, "paused time does not count"
    assert (await memory_of(six[0]))["paused"] == 0


async def test_last_resort_ends_one_whose_own_limit_was_not_reached(six: list[Any]) -> None:
    jobs = [asyncio.create_task(run(client, allocating(170, 600))) for client in six]
    await watched(six[0], jobs)
    ended = next(job for job in jobs if job.done())
    assert (ended.result().exit_code, ended.result().cause) == (None, "SandboxMemory")
    client = six[jobs.index(ended)]
    state = (await client.call("GET", "~")).json
    assert (state["state"], state["failure"]["cause"]) == ("Failed", "SandboxMemory")
    assert (await client.start("true")).json["error"]["cause"] == "SandboxMemory"
    await asyncio.sleep(1)
    states = [(await each.call("GET", "~")).json["state"] for each in six]
    # While nobody frees memory, a second one may follow.
    assert states.count("Live") >= 4
    for job in jobs:
        job.cancel()


async def test_own_limit_is_the_cause_if_it_is_exceeded(six: list[Any]) -> None:
    jobs = [asyncio.create_task(run(client, allocating(20, 600))) for client in six[:2]]
    await asyncio.sleep(1)
    # RLIMIT_DATA limits one process, so two of them exceed the limit together.
    one = f'{PYTHON} -c "{ALLOCATE.format(megabytes=150, seconds=600)}"'
    two = f"{one} & {one}; wait"
    assert (await run(six[2], two)).cause == "Memory"
    assert not any(job.done() for job in jobs)
    for job in jobs:
        job.cancel()


async def until_paused(client: Any) -> None:
    async with asyncio.timeout(300):
        while not (await memory_of(client))["paused"]:  # noqa: ASYNC110 the executor has no event for it
            await asyncio.sleep(0.02)


async def until_waiting(client: Any) -> None:
    async with asyncio.timeout(300):
        while not (await memory_of(client))["waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def paused(client: Any, others: list[Any]) -> list[asyncio.Task[Any]]:
    """Use so much memory in the others that commands pause; return the jobs, which end after `release`."""
    jobs = [asyncio.create_task(run(other, holding(150))) for other in others]
    await until_paused(client)
    return jobs


async def test_deadline_leaves_out_the_time_of_a_pause(six: list[Any]) -> None:
    seconds = 7

    async def timed(client: Any) -> tuple[float, Any]:
        began = time.monotonic()
        result = await run(client, holding(150), deadlineSeconds=seconds)
        return time.monotonic() - began, result

    oldest = asyncio.create_task(run(six[0], holding(150)))
    jobs = [asyncio.create_task(timed(client)) for client in six[1:]]
    await until_paused(six[0])
    await asyncio.sleep(seconds)
    await release(six)
    ended = [await job for job in jobs]
    for _, result in ended:
        # What was not paused ran for so long.
        assert result.exit_code == 0 or (result.cause == "Deadline" and result.seconds >= seconds)
    assert max(wall for wall, result in ended if result.exit_code == 0) > seconds
    assert (await oldest).exit_code == 0


async def test_a_steady_workspace_runs_while_others_pause(six: list[Any]) -> None:
    """Time limits inside a workspace count its pauses; verifiers have some."""
    steady = await six[1].call("PUT", "~/steady", json={}, keyed=False)
    assert (steady.status, steady.json) == (200, {})
    others = [six[0], *six[2:]]
    jobs = await paused(six[0], others)
    running = asyncio.create_task(run(six[1], allocating(60, 1)))
    while not running.done():
        assert (await memory_of(six[0]))["waiting"] == 0
        await asyncio.sleep(0.01)
    assert (await running).exit_code == 0
    assert not all(job.done() for job in jobs)
    for job in jobs:
        job.cancel()


async def test_new_commands_wait_while_others_are_paused(six: list[Any]) -> None:
    jobs = await paused(six[0], six[:5])
    asked = time.monotonic()
    late = asyncio.create_task(run(six[5], "echo late"))
    await until_waiting(six[0])
    began = seen_waiting = time.monotonic()
    # On a slow machine all may resume for a moment, and then it rightly starts: only what was seen is asserted.
    while seen_waiting - began < 1 and (await memory_of(six[0]))["waiting"]:
        seen_waiting = time.monotonic()
        await asyncio.sleep(0.02)
    await release(six[:5])
    result = await late
    assert (result.exit_code, result.stdout) == (0, b"late\n")
    assert result.seconds < time.monotonic() - asked - (seen_waiting - began), "time that it waited does not count"
    assert [(await job).exit_code for job in jobs] == [0] * 5


async def test_command_that_waits_for_its_start_ends_with_the_processes(six: list[Any]) -> None:
    """Otherwise it would run while the artifacts are read, or beside the verifier."""
    jobs = await paused(six[0], six[:5])
    late = asyncio.create_task(run(six[5], "touch /late"))
    await until_waiting(six[0])
    assert (await six[5].call("DELETE", "~/processes", key=six[5].new_key())).status == 200
    assert (await late).exit_code is None
    assert not any(job.done() for job in jobs)
    await release(six[:5])
    for job in jobs:
        await job
    assert (await run(six[5], "ls /late")).exit_code == 2


ESCAPING = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:  # outlives its command's session, and continues all others
            os.kill(-1, signal.SIGCONT)
            if os.fork() == 0:
                os._exit(0)
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
    os._exit(0)
a, began, last, longest = [], time.monotonic(), time.monotonic(), 0
while time.monotonic() - began < 600:
    a.append(b'x' * 4_000_000) if len(a) < 170 else None
    time.sleep(0.002)
"""


async def test_tree_that_continues_itself_is_paused_again_and_does_not_prevent_the_last_resort(six: list[Any]) -> None:
    jobs = [asyncio.create_task(run(client, [PYTHON, "-c", ESCAPING])) for client in six]
    # Between two stops they grow, on a busy machine by more than a pod has left. There the kernel is the last limit.
    seen = await watched(six[0], jobs, most=math.inf)
    assert max(memory["paused"] for memory in seen) > 0
    assert {job.result().cause for job in jobs if job.done()} == {"SandboxMemory"}
    for job in jobs:
        job.cancel()


async def test_shell_does_not_notice_that_its_children_were_stopped(six: list[Any]) -> None:
    others = await paused(six[0], six[:4])
    script = (
        f'set -m; ({PYTHON} -c "{ALLOCATE.format(megabytes=120, seconds=0)}"; echo inner) & wait $!; echo code $?; jobs'
    )
    running = asyncio.create_task(run(six[5], ["/bin/bash", "-c", script]))
    await until_waiting(six[0])
    await release(six[:4])
    result = await running
    assert result.stdout.decode().split("\n")[:3] == ["allocated", "inner", "code 0"]
    assert b"Stopped" not in result.stdout + result.stderr
    assert [(await job).cause for job in others] == [None] * 4


async def test_processes_that_a_tool_has_stopped_stay_stopped_after_a_pause(six: list[Any]) -> None:
    state = "sleep 600 & kill -STOP $!; echo $! > /tmp/pid; "
    hold = f"{PYTHON} -c \"{ALLOCATE.format(megabytes=100, seconds=1)}\"; sed 's/.*) //' /proc/$(cat /tmp/pid)/stat"
    jobs = [asyncio.create_task(run(client, state + hold)) for client in six]
    for job in jobs:
        assert (await job).stdout.decode().split("\n")[1][0] == "T"


async def test_sandbox_without_overcommitment_pauses_nothing(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=3, memoryBytes=LIMIT)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(executor, limits=OWN)) for _ in range(3)]
        jobs = [asyncio.create_task(run(client, allocating(185, 1), cwd="/")) for client in clients]
        while not all(job.done() for job in jobs):
            assert (await memory_of(clients[0]))["paused"] == 0
            await asyncio.sleep(0.02)
        assert [(await job).exit_code for job in jobs] == [0] * 3


async def test_files_in_memory_of_workspaces_without_processes_count(six: list[Any]) -> None:
    """Otherwise one running workspace exceeds the sandbox's limit with them, and the kernel ends any of its processes."""
    for client in six[:3]:
        assert (await run(client, f"head -c {180 * MB} /dev/zero > /dev/shm/file")).exit_code == 0
    seen = await watched(six[0], [job := asyncio.create_task(run(six[3], allocating(190, 1)))])
    assert (job.result().exit_code, job.result().cause) == (0, None)
    assert max(memory["used"] for memory in seen) < LIMIT
    states = [(await each.call("GET", "~")).json for each in six]
    failures = [state["failure"]["cause"] for state in states if state["state"] == "Failed"]
    assert set(failures) == {"SandboxMemory"}
    assert states[3]["state"] == "Live"


# Writes to a mapping that processes could share, and removes the pages from its own page table. They are not freed.
UNMAPPED = """
import ctypes, mmap, time
count, step = {count}, 4096 * 2000
shared = mmap.mmap(-1, count, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(shared))
for at in range(0, count - step, step):
    ctypes.memset(start + at, 1, step)
    shared.madvise(mmap.MADV_DONTNEED, at, step)
print("held", flush=True)
time.sleep({seconds})
"""


async def test_memory_that_no_process_has_mapped_counts(six: list[Any]) -> None:
    small = await run(six[0], [PYTHON, "-c", UNMAPPED.format(count=100 * MB, seconds=1)])
    assert (small.exit_code, small.cause, small.stdout) == (0, None, b"held\n")
    assert (await run(six[0], [PYTHON, "-c", UNMAPPED.format(count=400 * MB, seconds=60)])).cause == "Memory"
    async with asyncio.timeout(60):
        while (await memory_of(six[0]))["used"] >= 50 * MB:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_health_shows_what_workspaces_have_used_over_time(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=3)
    size, seconds = 100_000_000, 2.0
    began = time.monotonic()
    async with AsyncExitStack() as stack, asyncio.timeout(300):
        first, idle = [await stack.enter_async_context(connect(executor)) for _ in range(2)]

        async def used(least: float, most: float) -> None:
            while not least <= (await memory_of(idle))["used"] <= most:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        async def more() -> tuple[dict[str, float], float]:
            """Return what is added to the sums in at least a second, and the longest time that may have passed."""
            since = time.monotonic()
            before = (await memory_of(idle))["measured"]
            await asyncio.sleep(1)
            after = (await memory_of(idle))["measured"]
            return {name: after[name] - before[name] for name in before}, time.monotonic() - since

        held = [PYTHON, "-c", f"import time; a = b'x' * {size}; time.sleep({seconds})"]
        assert (await run(first, held, cwd="/")).exit_code == 0
        measured = (await memory_of(idle))["measured"]
        passed = time.monotonic() - began
        # The program has held the memory for at least as long as it slept.
        assert seconds < measured["seconds"] < 2 * passed + 1  # the executor's own trial counts too
        assert 0.7 * size * seconds < measured["byteSeconds"] < 1.5 * size * passed
        assert 0.7 * size**2 * seconds < measured["squareSeconds"] < 1.5 * size**2 * passed
        await used(0, 0.05 * size)
        added, passed = await more()
        assert added["seconds"] >= 2, "workspaces between two commands count"
        assert added["byteSeconds"] < 0.1 * size * passed, "with what they hold"
        assert (await run(idle, f"head -c {size} /dev/zero > /dev/shm/file", cwd="/")).exit_code == 0
        await used(0.95 * size, 2 * size)
        added, _ = await more()
        assert added["byteSeconds"] > 0.9 * size, "also while nothing runs"
        await first.call("DELETE", f"/attempts/{first.attempt}")
        added, passed = await more()
        assert 1 <= added["seconds"] <= passed, "a workspace that has ended does not count"
