"""A Sandbox's files are stored, and are the same in another executor; also when a try is killed in the middle."""

import asyncio
import contextlib
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import StorageError, Store
from agent_runtime.runner.parking import STATE, ParkedState, ParkingFailed, run
from agent_runtime.sandboxes.base import Fenced, FileError, SandboxFailure
from rollout_api.cluster import STORED_IN_PART
from rollout_api.records import Layer
from tests.integration.executor.test_life import until_made

IDLE_SECONDS = 900
PROGRAM = """
import asyncio, sys
from agent_runtime.recording.store import StorageError, Store
from agent_runtime.runner.parking import run
what, address, token, folder = sys.argv[1:]
print(asyncio.run(run(what, 1, address, token, 900, Store.open(folder, {}))))
"""


async def parking(what: str, executor: Any, folder: Path, number: int = 1) -> str:
    return await run(what, number, executor.address, executor.token, IDLE_SECONDS, Store.open(str(folder), {}))


async def release(client: Any, number: int = 1) -> None:
    """Do as the operator does after a store that failed."""
    answer = await client.call("PUT", "/still", json={"still": False, "parking": number}, keyed=False)
    assert answer.json == {"still": False}


async def begun(what: str, executor: Any, folder: Path) -> asyncio.subprocess.Process:
    """Start it in a process that a test may kill."""
    arguments = (what, executor.address, executor.token, str(folder))
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *arguments)


@contextlib.asynccontextmanager
async def used(connect: Any, executor: Any, **order: Any) -> AsyncIterator[Any]:
    """Yield a client, whose workspaces can be deleted at the end."""
    async with connect(executor, **order) as client:
        try:
            yield client
        finally:
            await client.call("PUT", "/still", json={"still": False, "parking": 99}, keyed=False)
            await client.call("DELETE", f"/attempts?prefix={client.attempt}-fork", keyed=False)


async def put(client: Any, path: str, data: bytes, query: str = "", workspace: str = "~") -> None:
    reply = await client.call("PUT", f"{workspace}/files?path={path}{query}", data=data)
    assert reply.status == 200, reply.body


async def files_of(client: Any, workspace: str) -> dict[str, tuple[object, ...]]:
    """Return everything that a snapshot has, by name."""
    snapshot = await client.call("GET", f"/workspaces/{workspace}/snapshot")
    assert snapshot.status == 200, snapshot.body
    with tarfile.open(fileobj=io.BytesIO(snapshot.body)) as archive:
        return {
            member.name: (
                *(member.type, member.mode, member.uid, member.gid, member.mtime, member.linkname),
                hashlib.sha256(archive.extractfile(member).read()).hexdigest() if member.isfile() else "",  # type: ignore[union-attr]
            )
            for member in archive
            if member.name != ".volumes"  # a folder of the executor's
        }


async def workspaces_of(client: Any) -> list[dict[str, Any]]:
    """Return what is the same in the new pod."""
    listed = (await client.call("GET", "/workspaces")).json["workspaces"]
    return [{key: each[key] for key in ("id", "attempt", "state", "parent", "network", "made")} for each in listed]


async def furnish(client: Any, mode: str) -> list[str]:
    """Write files; in Overlay also into a frozen parent, and delete one of the image. Returns all workspaces."""
    await put(client, "@/mine", b"mine\n", "&mode=640")
    if mode == "Plain":
        return [client.workspace]
    await put(client, "/home/theirs", b"theirs\n", "&owner=1000:1001")
    assert (await client.call("DELETE", "~/files?path=/etc/passwd-&owner=0")).status in (200, 404)
    assert await client.run("rm -r /etc/apt /etc/issue; ln -s nowhere /link; mkdir -m 1777 /shared", cwd="/")
    assert (await client.call("POST", "~/freeze")).status == 200
    other = client.held_by("3:other")
    other.attempt, other.workspace = f"{client.attempt}-fork", "fork"
    assert (await other.raise_fence()).status == 200
    order = {"id": "fork", "parent": client.workspace, "env": {"COLOUR": "blue"}, "shares": True}
    assert (await other.call("POST", "/workspaces", json=order)).status == 200
    assert (await other.call("PUT", "~/network", json={"network": ["files.example.org:443"]})).status == 200
    await put(other, "/home/own", b"own\n" * 1_000_000)
    assert (await other.run("rm -r /shared; sleep 600 & echo", cwd="/"))["exitCode"] == 0
    joined = await other.call("POST", "/workspaces", json={"id": "service", "joins": "fork"})
    assert joined.status == 200, joined.body
    await put(other, "/home/service", b"service\n", workspace="/workspaces/service")
    return [client.workspace, "fork", "service"]


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_parked_files_are_the_same_in_another_executor(
    start_executor: Any, connect: Any, session_of: Any, mode: str, tmp_path: Path
) -> None:
    executor, following = start_executor(mode, places=2), start_executor(mode, places=2)
    order = {"workingDir": "/executor-tests"} if mode == "Plain" else {}
    async with used(connect, executor, **order) as client:
        names = await furnish(client, mode)
        assert (await parking("store", executor, tmp_path)).startswith(f"{len(names)} of {len(names)} workspaces, ")
        refused = await client.call("PUT", "~/files?path=@/late", data=b"")
        assert (refused.code, "being parked" in refused.message) == ("Conflict", True)
        files, workspaces = {name: await files_of(client, name) for name in names}, await workspaces_of(client)
        if mode == "Overlay":
            assert {"etc/.wh.issue", "etc/.wh.apt"} <= files[client.workspace].keys()
            assert files[client.workspace]["home/theirs"][2:4] == (1000, 1001)
        await parking("restore", following, tmp_path)
        async with session_of(following) as (session, base):
            new = type(client)(session, base, client.commands, client.attempt)
            assert await workspaces_of(new) == workspaces
            assert {name: await files_of(new, name) for name in names} == files
            # Its users go on with their own fences.
            assert (await new.raise_fence()).status == 200


async def test_store_and_restore_that_are_killed_are_repeated(
    start_executor: Any, connect: Any, session_of: Any, tmp_path: Path
) -> None:
    executor, following = start_executor("Overlay", places=2), start_executor("Overlay", places=2)
    async with used(connect, executor) as client:
        names = await furnish(client, "Overlay")
        for stored in range(1, 4):
            process = await begun("store", executor, tmp_path)
            while len(list(tmp_path.glob("1/layers/*.tar.zst"))) < stored:
                assert process.returncode is None
                await asyncio.sleep(0.01)
            process.kill()
            await process.wait()
        await parking("store", executor, tmp_path)
        assert [each.name for each in tmp_path.iterdir()] == ["1"]
        files = {name: await files_of(client, name) for name in names}
        async with session_of(following) as (session, base):
            new = type(client)(session, base, client.commands, client.attempt)
            for made in range(1, 4):
                process = await begun("restore", following, tmp_path)
                while len(await workspaces_of(new)) < made:
                    assert process.returncode is None
                    await asyncio.sleep(0.005)
                process.kill()
                await process.wait()
            await parking("restore", following, tmp_path)
            assert {name: await files_of(new, name) for name in names} == files


async def test_sandbox_whose_store_failed_can_be_used_again_after_its_release(
    start_executor: Any, connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = start_executor("Overlay", places=2)
    async with used(connect, executor) as client:
        command = asyncio.create_task(client.run("touch begun; sleep 777", deadlineSeconds=777, waitSeconds=700))
        await until_made(client, "begun")

        async def fail(self: Store, key: str, data: bytes) -> bool:
            raise StorageError("it is full")

        monkeypatch.setattr(Store, "create", fail)
        with pytest.raises(StorageError):
            await parking("store", executor, tmp_path)
        assert ((await command)["signal"], (await command)["cause"]) == (9, "Parked")
        assert (await client.start("true")).code == "Conflict", "another try may go on"
        await release(client)
        await release(client)
        assert await client.out("echo on", cwd="/") == "on\n"
        with pytest.raises(SandboxFailure, match="parking 1 is over"):
            await parking("store", executor, tmp_path)
        assert await client.out("echo on", cwd="/") == "on\n"


async def test_late_try_of_a_parking_does_not_touch_what_a_later_one_has_stored(
    start_executor: Any, connect: Any, session_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = [start_executor("Overlay") for _ in range(3)]
    create, held, go_on = Store.create, asyncio.Event(), asyncio.Event()

    async def hold_first(self: Store, key: str, data: bytes) -> bool:
        if not held.is_set():
            held.set()
            await go_on.wait()
        return await create(self, key, data)

    async with used(connect, executors[0]) as client:
        await put(client, "/home/file", b"one")
        monkeypatch.setattr(Store, "create", hold_first)
        late = asyncio.create_task(parking("store", executors[0], tmp_path, 1))
        await held.wait()
        await parking("store", executors[0], tmp_path, 1)
        await parking("restore", executors[1], tmp_path, 1)
        async with session_of(executors[1]) as (session, base):
            new = type(client)(session, base, client.commands, client.attempt)
            assert (await new.raise_fence()).status == 200
            await put(new, "/home/file", b"two")
        await parking("store", executors[1], tmp_path, 2)
        assert {each.name for each in tmp_path.iterdir()} == {"1", "2"}, "the operator has not confirmed the second yet"
        go_on.set()
        await late
        await parking("restore", executors[2], tmp_path, 2)
        assert not [path for path in tmp_path.glob("1/**/*") if path.is_file()], "the second was confirmed"
        async with session_of(executors[2]) as (session, base):
            newest = type(client)(session, base, client.commands, client.attempt)
            assert (await newest.call("GET", "~/files?path=/home/file")).body == b"two"


@pytest.mark.parametrize("begins", ["before", "after"])
async def test_late_try_to_restore_does_not_touch_what_another_one_has_brought_back(
    start_executor: Any, connect: Any, session_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    executor, following = start_executor("Overlay", places=2), start_executor("Overlay", places=2)
    load, held, go_on = Layers.load, asyncio.Event(), asyncio.Event()

    async def hold_first(self: Layers, layer: Layer) -> AsyncIterator[bytes]:
        if not held.is_set():
            held.set()
            await go_on.wait()
        async for chunk in load(self, layer):
            yield chunk

    async with used(connect, executor) as client, session_of(following) as (session, base):
        names = await furnish(client, "Overlay")
        await parking("store", executor, tmp_path)
        files, workspaces = {name: await files_of(client, name) for name in names}, await workspaces_of(client)
        new = type(client)(session, base, client.commands, client.attempt)
        if begins == "before":
            monkeypatch.setattr(Layers, "load", hold_first)
            late = asyncio.create_task(parking("restore", following, tmp_path))
            await held.wait()
            early = await new.raise_fence()
            assert (early.code, "wait until it is Ready" in early.message) == ("Conflict", True)
        await parking("restore", following, tmp_path)
        if begins == "after":
            late = asyncio.create_task(parking("restore", following, tmp_path))
        go_on.set()
        with pytest.raises((SandboxFailure, Fenced, FileError)):
            await late
        assert await workspaces_of(new) == workspaces
        assert {name: await files_of(new, name) for name in names} == files


async def test_restore_refuses_damaged_and_missing_state(start_executor: Any, connect: Any, tmp_path: Path) -> None:
    executor, following = start_executor("Overlay"), start_executor("Overlay")
    with pytest.raises(ParkingFailed, match="does not exist"):
        await parking("restore", following, tmp_path)
    async with used(connect, executor) as client:
        await put(client, "/home/file", b"content")
        await parking("store", executor, tmp_path)
    path = tmp_path / "1" / STATE
    state = ParkedState.model_validate(json.loads(path.read_text()))
    path.write_text(json.dumps(state.model_copy(update={"mode": "Plain"}).model_dump()))
    with pytest.raises(ParkingFailed, match="mode Plain"):
        await parking("restore", following, tmp_path)
    path.write_text(json.dumps(state.model_dump()))
    (layer,) = tmp_path.glob("*/layers/*.tar.zst")
    layer.write_bytes(layer.read_bytes()[:-9] + b"x" * 9)
    with pytest.raises(Exception, match="layers/"):
        await parking("restore", following, tmp_path)


async def test_failed_workspace_and_what_needs_it_are_left_out(
    start_executor: Any, connect: Any, end_init_of: Any, tmp_path: Path
) -> None:
    executor = start_executor("Overlay", places=2)
    async with used(connect, executor) as client:
        for order in ({"id": "fails", "shares": True}, {"id": "joined", "joins": "fails"}):
            assert (await client.call("POST", "/workspaces", json=order)).status == 200
        held = client.held_by(client.fence)
        held.workspace = "fails"
        sleeper = asyncio.create_task(held.ask(["sleep", "778"], "0:sleep", waitSeconds=60, cwd="/"))
        await end_init_of("sleep 778")
        await sleeper
        assert (await client.call("GET", "/workspaces/fails")).json["state"] == "Failed"
        said = await parking("store", executor, tmp_path)
        assert said.startswith("1 of 3 workspaces, ")
        assert "; left out fails: it has failed: " in said
        assert "; left out joined: it " in said


DEEP = """
import os
os.chdir("/home")
for _ in range(60):
    os.mkdir("d" * 90)
    os.chdir("d" * 90)
"""


async def test_workspace_that_cannot_be_stored_does_not_keep_others_from_it(
    start_executor: Any, connect: Any, tmp_path: Path
) -> None:
    executor = start_executor("Overlay", places=3)
    async with used(connect, executor) as client:
        assert (await client.run(["python3", "-c", DEEP], cwd="/"))["exitCode"] == 0
        with pytest.raises(ParkingFailed, match=r"0 of 1 .*left out .* 4096 bytes or more"):
            await parking("store", executor, tmp_path, 1)
        await release(client)
        orders: list[dict[str, Any]] = [{"id": "good"}, {"id": "volumes", "volumes": {"data": "/data"}, "shares": True}]
        for order in orders:
            assert (await client.call("POST", "/workspaces", json=order)).status == 200
        said = await parking("store", executor, tmp_path, 2)
        assert said.startswith(f"{STORED_IN_PART}1 of 3 workspaces, ")
        assert f"; left out {client.workspace}: its files cannot be stored: home/ddd" in said
        assert "; left out volumes: its files cannot be stored: it has volumes" in said
        path = tmp_path / "2" / STATE
        state = ParkedState.model_validate(json.loads(path.read_text()))
        assert [each.id for each in state.workspaces] == ["good"]
        path.write_text(json.dumps(state.model_copy(update={"result": "of another try"}).model_dump()))
        assert await parking("store", executor, tmp_path, 2) == "of another try"
