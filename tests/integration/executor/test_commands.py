"""What a tool call gets to see of its command, and what it can do with it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import pytest


async def test_a_command_gives_its_exit_code_and_both_streams_apart(client: Any) -> None:
    status = await client.run("echo out; echo err >&2; exit 7")
    assert (status["exitCode"], status["signal"], status["cause"]) == (7, None, None)
    assert status["stdout"]["head"] == {"encoding": "utf-8", "data": "out\n"}
    assert status["stderr"]["head"] == {"encoding": "utf-8", "data": "err\n"}


async def test_arbitrary_bytes_are_unchanged_from_stdin_to_stdout(client: Any) -> None:
    data = bytes(range(256)) * 40
    stdin = {"encoding": "base64", "data": base64.b64encode(data).decode()}
    head = (await client.run(["cat"], stdin=stdin))["stdout"]["head"]
    assert head["encoding"] == "base64"
    assert base64.b64decode(head["data"]) == data


@pytest.mark.parametrize("user", [None, "65534"])
async def test_programs_open_their_streams_by_name(client: Any, user: str | None) -> None:
    shell = "echo out > /dev/stdout; echo err | tee /dev/stderr > /dev/null; cat /dev/stdin > /proc/self/fd/1"
    status = await client.run(shell, stdin={"encoding": "utf-8", "data": "in\n"}, user=user)
    assert (status["stdout"]["head"]["data"], status["stderr"]["head"]["data"]) == ("out\nin\n", "err\n")


async def test_stdin_larger_than_any_pipe_arrives_whole(client: Any) -> None:
    text = "0123456789abcdef" * 180_000
    said = await client.out(["sha256sum"], stdin={"encoding": "utf-8", "data": text})
    assert said.split()[0] == hashlib.sha256(text.encode()).hexdigest()


async def test_environment_folder_and_shell_are_those_of_the_call(client: Any) -> None:
    await client.call("PUT", "~/files?path=@/here/x", data=b"")
    said = await client.out(
        "echo $COLOUR in ${PWD##*/executor-tests/*/}", env={"COLOUR": "blue"}, cwd=f"{client.folder}/here"
    )
    assert said == "blue in here\n"


async def test_missing_program_is_explained_and_is_not_a_server_error(client: Any) -> None:
    answer = await client.start(["no-such-program"])
    assert (answer.status, answer.code) == (422, "FileError")
    assert "no-such-program" in answer.message
    assert answer.json["error"]["errno"] == "ENOENT"


async def test_output_is_read_from_a_cursor_while_the_command_runs(client: Any) -> None:
    process = (await client.start("echo one; read line; echo two $line", stdin="Open")).json["id"]
    output = f"~/processes/{process}/output"
    first = await client.call("GET", f"{output}?waitSeconds=10")
    assert (first.body, first.headers["Rollout-Output-Next"], first.headers["Rollout-Output-End"]) == (
        b"one\n",
        "4",
        "false",
    )
    waiting = asyncio.create_task(client.call("GET", f"{output}?cursor=4&waitSeconds=10"))
    written = await client.call("POST", f"~/processes/{process}/stdin?offset=0&end=true", data=b"words\n")
    assert written.json == {"offset": 6}
    assert (await waiting).body == b"two words\n"
    assert (await client.status(process, wait=10))["exitCode"] == 0
    last = await client.call("GET", f"{output}?cursor=14&waitSeconds=10")
    assert (last.body, last.headers["Rollout-Output-End"]) == (b"", "true")


async def test_large_output_keeps_both_ends_in_the_status_and_the_middle_readable(client: Any) -> None:
    status = await client.run("seq 1 300000", output={"headBytes": 100, "tailBytes": 100})
    whole = "".join(f"{n}\n" for n in range(1, 300_001)).encode()
    out = status["stdout"]
    assert out["bytes"] == len(whole)
    assert out["head"]["data"].encode() == whole[:100]
    assert out["tail"]["data"].encode() == whole[-100:]
    assert out["omitted"] == len(whole) - 200
    read, cursor = b"", 0
    while cursor < len(whole):
        piece = await client.call("GET", f"~/processes/{status['id']}/output?cursor={cursor}&limit=700001")
        read += piece.body
        cursor = int(piece.headers["Rollout-Output-Next"])
    assert read == whole


async def test_output_beyond_the_spill_file_is_counted_as_lost(client: Any) -> None:
    caps = {"headBytes": 10, "tailBytes": 1000, "spillBytes": 5000}
    status = await client.run("seq 1 100000", output=caps)
    whole = "".join(f"{n}\n" for n in range(1, 100_001)).encode()
    output = f"~/processes/{status['id']}/output"
    early = await client.call("GET", f"{output}?cursor=0&limit=10")
    middle = await client.call("GET", f"{output}?cursor=10")
    assert early.body + middle.body == whole[:5010]
    late = await client.call("GET", f"{output}?cursor=5010")
    lost = int(late.headers["Rollout-Output-Lost"])
    assert lost > 0
    assert late.body == whole[5010 + lost :]
    assert late.headers["Rollout-Output-End"] == "true"
    assert status["stdout"]["tail"]["data"].encode() == whole[-1000:]


async def test_endless_output_uses_no_memory_and_blocks_no_other_call(client: Any, executor: Any) -> None:
    await client.run(["true"])
    process = (await client.start(["yes"], output={"spillBytes": 1_000_000})).json["id"]

    async def until_written(megabytes: int) -> None:
        async with asyncio.timeout(600):
            while (await client.status(process))["stdout"]["bytes"] < megabytes * 2**20:
                await client.run(["true"])
                await asyncio.sleep(0.1)

    await until_written(20)
    early = executor.memory_kib()
    await until_written(200)
    growth = executor.memory_kib() - early
    assert (await client.call("POST", f"~/processes/{process}/signal", json={"signal": "KILL"})).status == 200
    status = await client.status(process, wait=60)
    assert status["state"] == "Exited"
    assert status["stdout"]["tail"]["data"].count("y\n") >= 32 * 1024 // 2 - 1
    assert growth < 2048


async def test_a_background_server_keeps_running_and_does_not_delay_the_calls_result(client: Any) -> None:
    server = "until [ -e asked ]; do sleep 0.05; done; echo later"
    status = await client.run(f"echo started; ({server}) & ", waitSeconds=30)
    assert status["stdout"]["head"]["data"] == "started\n"
    await client.run("touch asked")
    later = await client.output_until(status["id"], b"later\n", cursor=8)
    assert later.headers["Rollout-Output-End"] == "true"


async def test_deadline_ends_exactly_the_processes_of_its_command(client: Any) -> None:
    other = (await client.start(["sleep", "3600"])).json["id"]
    hidden = "setsid sh -c 'sleep 3601 & exec sleep 3602' & (sh -c 'sleep 3603 &') ; sleep 3604"
    status = await client.run(hidden, deadlineSeconds=0.5)
    assert (status["cause"], status["signal"]) == ("Deadline", 9)
    # In Plain everything on the machine is seen, so only these very sleeps are looked for.
    left = await client.out("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -o 'sleep 360[0-9]' | sort -u")
    assert left.split("\n") == ["sleep 3600", ""]
    assert (await client.status(other))["state"] == "Running"


async def test_signal_reaches_the_command_and_the_status_has_its_cause(client: Any) -> None:
    process = (await client.start(["sleep", "600"])).json["id"]
    assert (await client.call("POST", f"~/processes/{process}/signal", json={"signal": "TERM"})).status == 200
    status = await client.status(process, wait=10)
    assert (status["signal"], status["cause"], status["exitCode"]) == (15, "Signal", None)
    wrong = await client.call("POST", f"~/processes/{process}/signal", json={"signal": "PLEASE"})
    assert (wrong.status, wrong.code) == (400, "BadRequest")
    assert "PLEASE" in wrong.message


async def test_a_terminal_is_a_terminal_and_can_be_resized(client: Any) -> None:
    size = {"rows": 24, "columns": 80}
    shell = "test -t 0 && test -t 1 && stty size; read line; stty size; echo got $line"
    process = (await client.start(shell, tty=size)).json["id"]
    output = f"~/processes/{process}/output"
    assert (await client.call("GET", f"{output}?waitSeconds=10")).body.startswith(b"24 80")
    resized = await client.call("POST", f"~/processes/{process}/resize", json={"rows": 50, "columns": 132})
    assert resized.status == 200
    await client.call("POST", f"~/processes/{process}/stdin?offset=0", data=b"hello\n")
    status = await client.status(process, wait=10)
    assert status["exitCode"] == 0
    said = status["stdout"]["head"]["data"]
    assert "50 132" in said
    assert "got hello" in said
    assert status["stderr"]["bytes"] == 0


async def test_input_repeated_after_a_lost_reply_is_written_once(client: Any) -> None:
    process = (await client.start(["cat"], stdin="Open")).json["id"]
    stdin = f"~/processes/{process}/stdin"
    assert (await client.call("POST", f"{stdin}?offset=0", data=b"abc")).status == 200
    overlapping = await client.call("POST", f"{stdin}?offset=1", data=b"bcdef")
    assert overlapping.json == {"offset": 6}
    gap = await client.call("POST", f"{stdin}?offset=100", data=b"x")
    assert (gap.status, gap.code) == (409, "Conflict")
    assert (await client.call("POST", f"{stdin}?offset=6&end=true", data=b"")).status == 200
    status = await client.status(process, wait=10)
    assert status["stdout"]["head"]["data"] == "abcdef"


async def test_ended_processes_are_forgotten_with_their_turn_and_living_ones_are_not(client: Any) -> None:
    old = (await client.run(["true"], key="1:old"))["id"]
    server = (await client.start(["sleep", "600"], key="1:server")).json["id"]
    new = (await client.run(["true"], key="2:new"))["id"]
    assert (await client.call("PUT", f"/attempts/{client.attempt}/watermark", json={"turn": 2})).json == {
        "watermark": 2
    }
    assert (await client.call("GET", f"~/processes/{old}")).code == "NotFound"
    assert (await client.status(server))["state"] == "Running"
    assert (await client.status(new))["state"] == "Exited"


async def test_files_are_streamed_in_both_directions(client: Any, executor: Any) -> None:
    piece = bytes(range(256)) * 1024
    count = 400

    async def pieces() -> Any:
        for _ in range(count):
            yield piece

    before = executor.memory_kib()
    assert (await client.call("PUT", "~/files?path=@/big", data=pieces())).status == 200
    assert (await client.call("GET", "~/stat?path=@/big")).json["size"] == count * len(piece)
    assert await client.digest_of("~/files?path=@/big") == hashlib.sha256(piece * count).hexdigest()
    grown = executor.memory_kib() - before
    print(f"{count * len(piece) >> 20} MiB up and down: memory grew by {grown} KiB")
    assert grown < 8192
