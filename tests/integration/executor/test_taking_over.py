"""Fencing over the network: an old runner can neither act nor delay the new one, and commands continue."""

from __future__ import annotations

import asyncio
from typing import Any


async def test_an_old_runner_cannot_act_after_the_new_one_has_taken_over(client: Any) -> None:
    new = client.held_by("2:new")
    assert (await new.raise_fence()).status == 200
    for answer in (
        await client.start("touch old"),
        await client.call("PUT", "~/files?path=@/old", data=b""),
        await client.call("PUT", f"/attempts/{client.attempt}/watermark", json={"turn": 9}),
        await client.call("DELETE", f"/attempts/{client.attempt}"),
        await client.raise_fence(),
    ):
        assert (answer.status, answer.code) == (409, "Fenced"), answer.body
    assert (await new.call("GET", "~/stat?path=@/old")).code == "NotFound"


async def test_of_two_runners_with_one_epoch_only_the_first_is_accepted(client: Any) -> None:
    assert (await client.held_by("2:first").raise_fence()).status == 200
    assert (await client.held_by("2:second").raise_fence()).code == "Fenced"
    assert (await client.held_by("2:second").start("true")).code == "Fenced"
    assert (await client.held_by("2:first").raise_fence()).status == 200
    assert (await client.held_by("2:first").start("true")).status == 200


async def test_attempt_without_a_fence_or_with_an_old_epoch_cannot_act(client: Any) -> None:
    ahead = await client.held_by("7:runner").start("true")
    assert (ahead.status, ahead.code) == (409, "Fenced")
    stranger = client.held_by("1:runner")
    stranger.attempt = "never-fenced"
    assert (await stranger.start("true")).code == "Fenced"


async def test_processes_continue_and_the_new_runner_finds_them_by_key(client: Any) -> None:
    command = "touch begun; until [ -e over ]; do sleep 0.05; done; echo survived"
    waiting = asyncio.create_task(client.start(command, "5:call", waitSeconds=60))
    while (await client.call("GET", "~/stat?path=@/begun")).status != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    new = client.held_by("2:new")
    assert (await new.raise_fence()).json == {"epoch": 2, "holder": "new", "watermark": 0}
    assert (await waiting).code == "Fenced"
    assert (await new.run("touch over"))["exitCode"] == 0
    found = await new.start(command, "5:call", waitSeconds=60)
    assert found.json["stdout"]["head"]["data"] == "survived\n"


async def test_hung_upload_or_input_of_the_old_runner_does_not_delay_the_new_one(client: Any) -> None:
    process = (await client.start(["sleep", "60"], stdin="Open")).json["id"]

    async def endless() -> Any:
        yield b"half"
        await asyncio.sleep(60)

    upload = asyncio.create_task(client.call("PUT", "~/files?path=@/f", data=endless()))
    stuck = asyncio.create_task(client.call("POST", f"~/processes/{process}/stdin?offset=0", data=b"x" * 200_000))
    await asyncio.sleep(0.3)
    new = client.held_by("2:new")
    async with asyncio.timeout(50):
        assert (await new.raise_fence()).status == 200
        assert (await stuck).code == "Fenced"
    upload.cancel()
    assert (await new.call("GET", "~/stat?path=@/f")).code == "NotFound"


async def test_deleted_attempt_is_not_restored_by_late_calls(client: Any) -> None:
    await client.start(["sleep", "600"])
    create = {"id": client.workspace}
    for _ in range(2):
        assert (await client.call("DELETE", f"/attempts/{client.attempt}")).json == {}
    assert (await client.call("GET", "~")).code == "NotFound"
    late = await client.call("POST", "/workspaces", json=create)
    assert (late.status, late.code) == (410, "Forgotten")
    assert (await client.raise_fence()).status == 200
    assert (await client.call("POST", "/workspaces", json=create)).status == 200


async def test_attempt_cannot_change_the_workspace_of_another(client: Any) -> None:
    other = client.held_by("1:runner")
    other.attempt = f"{client.attempt}-other"
    assert (await other.raise_fence()).status == 200
    answer = await other.start("true")
    assert (answer.status, answer.code) == (409, "Conflict")
    assert client.attempt in answer.message
