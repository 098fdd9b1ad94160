"""Commands over one connection to a real executor: as exact as by HTTP, also when the connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_runtime.executor.commands.streams import framed
from agent_runtime.sandboxes.base import CommandResult, Fence, Fenced
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, ExecutorRefusal, Hold

COUNT_A_RUN = "echo run >> runs; sleep 0.5; wc -l < runs"
MIB = 1024 * 1024


class Runner:
    """A runner's own connection, for the test's attempt."""

    def __init__(self, executor: Any, client: Any, fence: str = "1:runner") -> None:
        epoch, holder = fence.split(":")
        self.client = ExecutorClient(executor.address, client.token)
        self._hold = Hold(client.attempt, Fence(int(epoch), holder))
        self._workspace, self._folder = client.workspace, client.folder

    async def run(self, command: str | list[str], key: str, **how: Any) -> CommandResult:
        rest: dict[str, Any] = {"cwd": self._folder, "user": None, "env": {}, "stdin": b"", "deadline_seconds": 60.0}
        kept = {"head_bytes": MIB, "tail_bytes": MIB}
        return await self.client.run(self._hold, self._workspace, key, command, **{**rest, **kept, **how})

    def lose_connection(self) -> None:
        """Break the connection, as a network may."""
        self.client._streams.close()


@pytest.fixture
async def runner(executor: Any, client: Any) -> AsyncIterator[Runner]:
    runner = Runner(executor, client)
    yield runner
    await runner.client.close()


async def test_arbitrary_bytes_are_unchanged_from_stdin_to_both_streams(runner: Runner) -> None:
    data = bytes(range(256)) * 4000
    result = await runner.run("cat > f; cat f; cat f >&2", "0:cat", stdin=data)
    assert (result.stdout, result.stderr, result.exit_code) == (data, data, 0)
    few = await runner.run("cat", "0:few", stdin=data, head_bytes=3, tail_bytes=2)
    assert (few.stdout, few.stdout_head, few.stdout_omitted) == (data[:3] + data[-2:], 3, len(data) - 5)


async def test_environment_folder_user_and_shell_are_as_requested(runner: Runner, client: Any) -> None:
    result = await runner.run(["sh", "-c", 'echo "$A"; pwd; id -u'], "0:env", env={"A": "ä = b"}, user="65534")
    said, folder, user = result.stdout.decode().splitlines()
    assert (said, user) == ("ä = b", "65534")
    assert folder.endswith(client.folder)
    assert (await runner.run("echo $0 $((1 + 1))", "0:shell")).stdout.split()[1] == b"2"


async def test_a_hundred_concurrent_commands_each_get_their_own_result(runner: Runner) -> None:
    runs = [runner.run(f"sleep 0.0{n % 7}; echo {n}; exit {n}", f"0:{n}") for n in range(100)]
    results = await asyncio.gather(*runs)
    assert [(result.exit_code, int(result.stdout)) for result in results] == [(n, n) for n in range(100)]


async def test_command_of_a_broken_connection_continues_and_is_joined(runner: Runner) -> None:
    first = asyncio.create_task(runner.run(COUNT_A_RUN, "3:call"))
    await asyncio.sleep(0.1)
    runner.lose_connection()
    assert (await first).stdout.strip() == b"1"
    assert await runner.run(COUNT_A_RUN, "3:call") == await first


async def test_next_runner_finds_a_command_by_its_key_and_the_old_runner_is_fenced(
    runner: Runner, executor: Any, client: Any
) -> None:
    command = "echo run >> runs; until [ -e over ]; do sleep 0.05; done; wc -l < runs"
    first = asyncio.create_task(runner.run(command, "3:call"))
    await asyncio.sleep(0.1)
    await client.held_by("2:next").raise_fence()
    with pytest.raises(Fenced):
        await first
    following = Runner(executor, client, "2:next")
    await following.run("touch over", "4:over")
    assert (await following.run(command, "3:call")).stdout.strip() == b"1"
    with pytest.raises(Fenced):
        await runner.run("echo late >> runs", "4:late")
    assert (await following.run("cat runs", "5:see")).stdout == b"run\n"
    await following.client.close()


async def test_key_of_another_command_is_refused_without_effect(runner: Runner, client: Any) -> None:
    await runner.run("echo a >> made", "1:a")
    await client.run("echo b >> made", "1:b")
    for key in ("1:a", "1:b"):
        with pytest.raises(ExecutorRefusal) as refused:
            await runner.run("echo c >> made", key)
        assert refused.value.reason == "KeyReused"
    assert (await client.start("echo d >> made", "1:a")).code == "KeyReused"
    assert (await runner.run("cat made", "1:see")).stdout == b"a\nb\n"


async def test_a_command_below_the_watermark_is_never_run_a_second_time(runner: Runner, client: Any) -> None:
    await runner.run("echo run >> runs", "1:call")
    await client.call("PUT", f"/attempts/{client.attempt}/watermark", json={"turn": 2})
    with pytest.raises(ExecutorRefusal) as refused:
        await runner.run("echo run >> runs", "1:call")
    assert refused.value.reason == "Forgotten"
    assert (await runner.run("cat runs", "2:see")).stdout == b"run\n"


async def test_the_deadline_ends_a_command_and_is_reported(runner: Runner) -> None:
    result = await runner.run("setsid sleep 60 & sleep 60", "0:long", deadline_seconds=0.3)
    assert (result.signal, result.cause) == (9, "Deadline")


async def test_missing_program_is_a_file_error(runner: Runner) -> None:
    with pytest.raises(Exception, match="no-such-program") as failure:
        await runner.run(["no-such-program"], "0:none")
    assert type(failure.value).__name__ == "FileError"


async def test_input_over_its_limit_is_refused_and_the_connection_stays(runner: Runner) -> None:
    assert (await runner.run("wc -c", "0:most", stdin=bytes(8 * MIB))).stdout.strip() == str(8 * MIB).encode()
    with pytest.raises(ExecutorRefusal) as refused:
        await runner.run("wc -c", "0:more", stdin=bytes(10 * MIB))
    assert refused.value.reason == "TooLarge"
    assert (await runner.run("echo on", "0:on")).stdout == b"on\n"


async def test_unread_answers_delay_no_other_runner_and_cost_no_memory(
    executor: Any, client: Any, runner: Runner
) -> None:
    deaf = Runner(executor, client)
    await deaf.run("true", "0:first")
    stream = deaf.client._streams._stream
    assert stream is not None
    stream._transport.pause_reading()
    before = executor.memory_kib()
    asked = [asyncio.create_task(deaf.run("head -c 1000000 /dev/zero", f"1:{n}")) for n in range(60)]
    await asyncio.sleep(1)
    for n in range(20):
        assert (await runner.run("echo here", f"2:{n}")).stdout == b"here\n"
    # Commands from before the pause: at most 60 answers of 1 MB, and the same amount again in their processes.
    assert executor.memory_kib() - before < 150_000
    stream._transport.resume_reading()
    assert {len((await task).stdout) for task in asked} == {1_000_000}
    await deaf.client.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), framed(1, b"")[:-1] + b"\1\2\3"])
async def test_invalid_data_on_the_connection_harms_no_other(
    executor: Any, client: Any, runner: Runner, data: bytes
) -> None:
    stranger = Runner(executor, client)
    await stranger.run("true", "0:first")
    stream = stranger.client._streams._stream
    assert stream is not None
    stream._transport.write(data)
    assert (await runner.run("echo here", "0:second")).stdout == b"here\n"
    assert (await stranger.run("echo again", "0:third")).stdout == b"again\n"
    await stranger.client.close()


async def test_request_without_the_upgrade_header_is_refused_with_the_expected_protocol(client: Any) -> None:
    answer = await client.call("POST", "/commands")
    assert (answer.status, answer.code) == (400, "BadRequest")
    assert "rollout-commands" in answer.message


async def test_connections_that_broke_leave_no_descriptor_behind(executor: Any, client: Any, runner: Runner) -> None:
    async def descriptors() -> int:
        return len(os.listdir(f"/proc/{executor.process.pid}/fd"))

    await runner.run("true", "0:first")
    before = await descriptors()
    for n in range(30):
        task = asyncio.create_task(runner.run("sleep 0.02", f"1:{n}"))
        await asyncio.sleep(0.005)
        runner.lose_connection()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await runner.run("true", "2:last")
    async with asyncio.timeout(60):
        while await descriptors() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
