"""The life of workspaces as a caller sees it."""

from __future__ import annotations

import asyncio
import re
from typing import Any


async def test_a_fork_starts_from_the_frozen_state_and_shares_nothing_after_it(overlay: Any, connect: Any) -> None:
    async with connect(overlay) as client:
        await client.run("echo base > f")
        parent = client.workspace
        unfrozen = await client.call("POST", "/workspaces", json={"id": f"{parent}-x", "parent": parent})
        assert (unfrozen.status, unfrozen.code) == (409, "Conflict")
        assert (await client.call("POST", "~/freeze")).json["state"] == "Frozen"
        assert (await client.start("true")).code == "Conflict"
        for fork in ("f1", "f2"):
            made = await client.call("POST", "/workspaces", json={"id": f"{parent}-{fork}", "parent": parent})
            assert made.json["layers"] == [parent]
            client.workspace = f"{parent}-{fork}"
            assert await client.out(f"cat f; echo {fork} >> f; cat f") == f"base\nbase\n{fork}\n"
        client.workspace = parent
        below = await client.call("DELETE", "~")
        assert (below.status, below.code) == (409, "Conflict")
        assert f"{parent}-f1" in below.message


async def test_full_executor_reports_its_number_of_places_and_accepts_a_retry(
    start_executor: Any, connect: Any
) -> None:
    executor = start_executor("Overlay", places=1)
    async with connect(executor) as client:
        first, second = client.workspace, f"{client.workspace}-2"
        full = await client.call("POST", "/workspaces", key="0:second", json={"id": second})
        assert (full.status, full.code) == (503, "NoPlace")
        assert full.json["error"]["places"] == {"total": 1, "free": 0}
        assert (await client.call("DELETE", f"/workspaces/{first}")).status == 200
        assert (await client.call("POST", "/workspaces", key="0:second", json={"id": second})).status == 200


async def test_repeated_create_returns_the_workspace_and_refuses_another_specification(client: Any) -> None:
    same = await client.call("POST", "/workspaces", json={"id": client.workspace})
    assert same.status == 200
    other = await client.call("POST", "/workspaces", json={"id": client.workspace, "env": {"A": "b"}})
    assert (other.status, other.code) == (409, "Conflict")


async def test_destroyed_workspace_ends_its_processes_and_waiting_callers(client: Any) -> None:
    command = "setsid sleep 4321 & touch begun; sleep 4322"
    waiting = asyncio.create_task(client.ask(command, client.new_key(), waitSeconds=60))
    while (await client.call("GET", "~/stat?path=@/begun")).status != 200:  # noqa: ASYNC110 nothing tells of it
        await asyncio.sleep(0.05)
    assert await client.out("echo later") == "later\n"  # starts are reported in order, so that of the command is known
    assert (await client.call("DELETE", "~")).status == 200
    assert (await waiting).cause == "WorkspaceEnded"
    ps = await asyncio.create_subprocess_exec("ps", "-eo", "args", stdout=asyncio.subprocess.PIPE)
    listing = (await ps.communicate())[0].decode()
    assert not re.search(r"^sleep 432[12]$", listing, re.MULTILINE)


async def test_a_workspace_over_its_memory_is_named_as_the_cause(overlay: Any, connect: Any) -> None:
    async with connect(overlay, limits={"memoryBytes": 64 * 2**20}) as client:
        # Each process stays below the limit of a process; only their sum exceeds the workspace's limit.
        eat = "for n in 1 2 3; do (head -c 40000000 /dev/zero; sleep 600) | tail -c 40000000 > /dev/null & done; wait"
        status = await client.run(eat, waitSeconds=600)
        assert status["cause"] == "Memory", status


async def test_a_workspace_whose_init_died_fails_its_processes_and_later_calls_with_the_cause(
    overlay: Any, connect: Any, end_init_of: Any
) -> None:
    async with connect(overlay) as client:
        process = (await client.start(["sleep", "777"])).json["id"]
        waiting = asyncio.create_task(client.status(process, wait=60))
        await end_init_of("sleep 777")
        assert (await waiting)["cause"] == "WorkspaceEnded"
        assert (await client.call("GET", "~")).json["state"] == "Failed"
        later = await client.start("true")
        assert (later.status, later.code, later.json["error"]["cause"]) == (500, "WorkspaceFailed", "WorkspaceEnded")


async def test_a_snapshot_restored_elsewhere_gives_the_same_files(overlay: Any, connect: Any) -> None:
    async with connect(overlay) as one, connect(overlay) as other:
        await one.run("mkdir -p /srv/d && echo deep > /srv/d/f && ln -s d /srv/l && rm -f /etc/motd")
        tar = (await one.call("GET", "~/snapshot")).body
        assert (await other.call("PUT", "~/restore", data=tar)).status == 200
        assert await other.out("cat /srv/l/f; test -e /etc/motd || echo gone") == "deep\ngone\n"


async def test_folder_is_downloaded_and_uploaded_as_a_tar(client: Any) -> None:
    await client.call("PUT", "~/files?path=@/d/keep", data=b"k")
    await client.call("PUT", "~/files?path=@/d/skip.log", data=b"s")
    tar = await client.call("GET", "~/tar?path=@/d&part=keep&part=missing")
    assert (await client.call("PUT", "~/tar?path=@/e", data=tar.body)).status == 200
    entries = (await client.call("GET", "~/list?path=@/e")).json["entries"]
    assert [entry["name"] for entry in entries] == ["keep"]


async def test_file_name_that_is_not_utf8_is_kept(client: Any) -> None:
    assert (await client.call("PUT", "~/files?path=@/n/%ff%fe", data=b"odd")).status == 200
    listed = (await client.call("GET", "~/list?path=@/n")).json["entries"][0]["name"]
    assert listed.encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert (await client.call("GET", "~/files?path=@/n/%ff%fe")).body == b"odd"


async def test_fifo_or_folder_in_place_of_a_file_is_refused(client: Any) -> None:
    await client.run("mkdir -p x; mkfifo x/fifo")
    async with asyncio.timeout(10):
        for path in ("@/x/fifo", "@/x"):
            answer = await client.call("GET", f"~/files?path={path}")
            assert (answer.status, answer.code) in {(422, "FileError"), (404, "NotFound")}
