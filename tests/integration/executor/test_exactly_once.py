"""Lost replies, broken connections and killed callers: every call happens once, and its result is never lost."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agent_runtime.executor.commands.streams import UPGRADE, framed
from agent_runtime.sandboxes.executor_client.commands import command_content

COUNT_A_RUN = "echo run >> runs; sleep 0.5; wc -l < runs"


def request_bytes(client: Any, method: str, path: str, key: str, body: bytes, length: int | None = None) -> bytes:
    """Return a request's bytes; `length` announces a longer body than it has."""
    path = path.replace("~", f"/workspaces/{client.workspace}").replace("@", client.folder)
    lines = [
        f"{method} /v1{path} HTTP/1.1",
        f"Authorization: Bearer {client.token}",
        f"Rollout-Attempt: {client.attempt}",
        f"Rollout-Fence: {client.fence}",
        f"Idempotency-Key: {key}",
        f"Content-Length: {length or len(body)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def test_a_runner_that_lost_the_reply_gets_the_same_result_not_a_second_run(client: Any) -> None:
    first = await client.start(COUNT_A_RUN, "3:call", waitSeconds=30)
    again = await client.start(COUNT_A_RUN, "3:call", waitSeconds=30)
    assert first.json["stdout"]["head"]["data"].strip() == "1"
    assert again.body == first.body


async def test_a_resumed_runner_may_have_less_time_left_for_its_command(client: Any) -> None:
    calls = [client.start(COUNT_A_RUN, "3:call", waitSeconds=30, deadlineSeconds=seconds) for seconds in (300, 0.1)]
    for answer in await asyncio.gather(*calls):
        assert answer.status == 200, answer.body
        assert answer.json["stdout"]["head"]["data"].strip() == "1", "the first deadline holds"


async def test_a_runner_killed_in_the_middle_of_a_call_finds_its_result(client: Any, executor: Any) -> None:
    names = (client.attempt, client.fence, "3:call", client.workspace)
    command = command_content(
        names, COUNT_A_RUN, cwd=client.folder, user=None, env={}, stdin=b"", deadline_seconds=None, **client.KEPT
    )
    upgrade = f"POST /v1/commands HTTP/1.1\r\nAuthorization: Bearer {client.token}\r\nUpgrade: {UPGRADE}\r\n\r\n"
    request = upgrade.encode() + framed(1, command)
    script = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "s.sendall(sys.stdin.buffer.read()); print('sent', flush=True); time.sleep(60)"
    )
    pipe = asyncio.subprocess.PIPE
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, executor.socket, stdin=pipe, stdout=pipe
    )
    assert runner.stdin is not None
    assert runner.stdout is not None
    runner.stdin.write(request)
    runner.stdin.close()
    assert await runner.stdout.readline() == b"sent\n"
    runner.kill()
    await runner.wait()
    joined = await client.start(COUNT_A_RUN, "3:call", waitSeconds=30)
    assert joined.json["stdout"]["head"]["data"].strip() == "1"


async def test_a_hundred_callers_with_one_key_make_one_call(client: Any) -> None:
    calls = [client.start(COUNT_A_RUN, "3:call", waitSeconds=30) for _ in range(100)]
    bodies = {answer.body for answer in await asyncio.gather(*calls)}
    assert len(bodies) == 1
    assert json.loads(bodies.pop())["stdout"]["head"]["data"].strip() == "1"


async def test_wait_ends_with_the_caller_and_the_command_continues(client: Any, executor: Any) -> None:
    process = (await client.start("sleep 1; echo done", "3:call")).json["id"]
    async with asyncio.timeout(25):
        for _ in range(5):
            waiting = asyncio.create_task(client.status(process, wait=30))
            await asyncio.sleep(0.05)
            waiting.cancel()
        assert (await client.status(process, wait=30))["stdout"]["head"]["data"] == "done\n"


async def test_key_of_another_call_is_refused_without_effect(client: Any) -> None:
    await client.run("echo one", "3:call")
    other_body = await client.start("touch oops", "3:call")
    other_path = await client.call("PUT", "~/files?path=@/oops", key="3:call", data=b"")
    assert [(a.status, a.code) for a in (other_body, other_path)] == [(422, "KeyReused")] * 2
    assert (await client.call("GET", "~/stat?path=@/oops")).code == "NotFound"


async def test_a_call_below_the_watermark_is_never_run_a_second_time(client: Any) -> None:
    await client.run("echo run >> runs", "3:call")
    await client.call("PUT", f"/attempts/{client.attempt}/watermark", json={"turn": 4})
    late = await client.start("echo run >> runs", "3:call")
    assert (late.status, late.code) == (410, "Forgotten")
    assert (await client.call("GET", "~/files?path=@/runs")).body == b"run\n"


async def test_repeated_upload_does_not_undo_later_changes(client: Any) -> None:
    upload = ("PUT", "~/files?path=@/f&mode=600")
    first = await client.call(*upload, key="1:up", data=b"first")
    await client.run("echo changed > f")
    again = await client.call(*upload, key="1:up", data=b"first")
    assert (again.status, again.body) == (first.status, first.body)
    assert (await client.call("GET", "~/files?path=@/f")).body == b"changed\n"
    other = await client.call(*upload, key="1:up", data=b"other")
    assert (other.status, other.code) == (422, "KeyReused")


async def test_interrupted_upload_leaves_no_partial_file_and_can_be_repeated(client: Any, executor: Any) -> None:
    await client.call("PUT", "~/files?path=@/dir/f", data=b"old")
    _, writer = await asyncio.open_unix_connection(executor.socket)
    writer.write(request_bytes(client, "PUT", "~/files?path=@/dir/f", "1:up", b"ha" * 50_000, length=10**6))
    await writer.drain()
    await asyncio.sleep(0.3)
    writer.transport.abort()
    await asyncio.sleep(0.3)
    assert (await client.call("GET", "~/files?path=@/dir/f")).body == b"old"
    again = await client.call("PUT", "~/files?path=@/dir/f", key="1:up", data=b"whole")
    assert again.status == 200, again.body
    assert (await client.call("GET", "~/files?path=@/dir/f")).body == b"whole"
    names = [entry["name"] for entry in (await client.call("GET", "~/list?path=@/dir")).json["entries"]]
    assert [name for name in names if not name.endswith(".partial")] == ["f"]


async def test_keyed_read_repeats_the_first_content(client: Any) -> None:
    for size in (10, 500_000):
        path, key = f"read{size}", f"1:read{size}"
        await client.call("PUT", f"~/files?path={path}", data=b"a" * size)
        first = await client.call("GET", f"~/files?path={path}", key=key)
        await client.call("PUT", f"~/files?path={path}", data=b"b" * size)
        assert (await client.call("GET", f"~/files?path={path}", key=key)).body == first.body == b"a" * size
        assert (await client.call("GET", f"~/files?path={path}")).body == b"b" * size


async def test_keyed_read_that_is_too_large_to_store_is_refused(client: Any) -> None:
    await client.run("head -c 1048577 /dev/zero > large")
    answer = await client.call("GET", "~/files?path=@/large", key="1:large")
    assert (answer.status, answer.code) == (413, "TooLarge")
    assert "parts" in answer.message


async def test_a_failed_call_is_repeated_as_the_same_failure(client: Any) -> None:
    first = await client.call("DELETE", "~/files?path=@/none", key="1:rm")
    await client.call("PUT", "~/files?path=@/none", data=b"")
    again = await client.call("DELETE", "~/files?path=@/none", key="1:rm")
    assert first.status == again.status == 404
    assert first.body == again.body


async def test_a_malformed_call_does_not_use_its_key_up(client: Any) -> None:
    assert (await client.start("true", "1:k", deadlineSeconds=-1)).status == 400
    assert (await client.start("true", "1:k", waitSeconds=10)).status == 200


async def test_remembered_replies_are_removed_from_disk_with_their_turn(client: Any, executor: Any) -> None:
    folder = Path(executor.folder) / "state" / "daemon"
    await client.call("PUT", "~/files?path=@/f", data=b"x" * 100_000)
    await client.call("GET", "~/files?path=@/f", key="1:read")
    await client.run("seq 1 100000", "1:spill")
    mine = {entry for entry in os.listdir(folder) if (folder / entry).stat().st_size in (100_000, 523_359)}
    assert mine
    await client.call("PUT", f"/attempts/{client.attempt}/watermark", json={"turn": 2})
    assert not mine & set(os.listdir(folder))
