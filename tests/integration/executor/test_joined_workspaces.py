"""Workspaces that share network, users, volumes and limits, each with a root of its own."""

from __future__ import annotations

import asyncio
from typing import Any

SERVER = "python3 -m http.server --bind 127.0.0.1 80 >/dev/null 2>&1"
FETCH = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:80/data/f').read().decode())"


async def _join(client: Any, leader: str, name: str, **body: Any) -> str:
    workspace = f"{leader}-{name}"
    made = await client.call("POST", "/workspaces", json={"id": workspace, "joins": leader, **body})
    assert made.status == 200, made.message
    return workspace


async def test_a_joined_workspace_has_the_network_and_volumes_but_not_the_files_and_processes(
    start_executor: Any, connect: Any
) -> None:
    executor = start_executor("Overlay", places=2)
    async with connect(executor) as client:
        volumes = {"data": "/srv/data"}
        leader = f"{client.workspace}-leader"
        first = client.workspace
        assert (await client.call("DELETE", f"/workspaces/{first}")).status == 200
        made = await client.call("POST", "/workspaces", json={"id": leader, "shares": True, "volumes": volumes})
        assert made.status == 200, made.message
        service = await _join(client, leader, "web", volumes={"data": "/data"})
        client.workspace, client.folder = leader, "/"
        assert await client.out("echo shared > /srv/data/f; echo own > /own; sleep 300 & echo done") == "done\n"
        client.workspace = service
        assert await client.out("cat /data/f; ls /own /srv/data 2>&1 | wc -l; pgrep -c sleep") == "shared\n2\n0\n"
        assert await client.out(f"cd /; {SERVER} & echo up") == "up\n"
        assert await client.out("touch /data/back; id -u; cat /proc/self/uid_map | tr -s ' '") != ""
        client.workspace = leader
        assert await client.out(f'until python3 -c "{FETCH}" 2>/dev/null; do sleep 0.1; done') == "shared\n\n"
        assert await client.out("stat -c %u /srv/data/back") == "0\n"


async def test_a_volume_of_two_joined_workspaces_is_hidden_from_the_one_they_join(
    start_executor: Any, connect: Any
) -> None:
    executor = start_executor("Overlay", places=2)
    async with connect(executor) as client:
        leader = f"{client.workspace}-leader"
        body = {"id": leader, "shares": True, "volumes": {"data": "/data"}}
        assert (await client.call("POST", "/workspaces", json=body)).status == 200
        first = await _join(client, leader, "a", volumes={"private": "/p", "data": "/data"})
        second = await _join(client, leader, "b", volumes={"private": "/q"})
        client.workspace, client.folder = first, "/"
        assert await client.out("echo secret > /p/f; echo open > /data/f; ls -A /.volumes") == ""
        client.workspace = second
        assert await client.out("cat /q/f") == "secret\n"
        client.workspace = leader
        hidden = "ls -A /.volumes; cat /.volumes/private/f 2>/dev/null; touch /.volumes/x 2>/dev/null; cat /data/f"
        assert await client.out(hidden) == "open\n"


async def test_a_joined_workspace_uses_no_place_and_needs_one_that_shares(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=2)
    async with connect(executor) as client:
        plain, leader = client.workspace, f"{client.workspace}-leader"
        refused = await client.call("POST", "/workspaces", json={"id": f"{plain}-a", "joins": plain})
        assert "does not share" in refused.message
        assert (await client.call("POST", "/workspaces", json={"id": leader, "shares": True})).status == 200
        for number in range(4):
            await _join(client, leader, f"service-{number}")
        health = (await client.call("GET", "/health")).json
        assert health["places"] == {"total": 2, "free": 0}
        bad = {"id": f"{plain}-b", "joins": leader, "volumes": {"data": "/proc/x"}}
        assert "outside /proc" in (await client.call("POST", "/workspaces", json=bad)).message
        gone = await client.call("POST", "/workspaces", json={"id": f"{plain}-c", "joins": "none"})
        assert (gone.status, gone.code) == (404, "NotFound")


async def test_joined_workspaces_are_stopped_before_a_smaller_other_one_for_the_sandboxs_limit(
    start_executor: Any, connect: Any
) -> None:
    executor = start_executor("Overlay", places=2, memoryBytes=800 << 20)
    use = "python3 -c 'import time; a = b\"x\" * ({} << 20); time.sleep(600)'"
    async with connect(executor) as client:
        other, leader = client.workspace, f"{client.workspace}-leader"
        client.folder = "/"
        largest = asyncio.create_task(client.ask(use.format(250), client.new_key(), waitSeconds=600))
        await asyncio.sleep(0.5)
        assert (await client.call("POST", "/workspaces", json={"id": leader, "shares": True})).status == 200
        members = []
        for name in ("a", "b", "c"):
            client.workspace = await _join(client, leader, name)
            members.append(asyncio.create_task(client.ask(use.format(180), client.new_key(), waitSeconds=600)))
            await asyncio.sleep(0.5)
        done, _ = await asyncio.wait([largest, *members], return_when=asyncio.FIRST_COMPLETED, timeout=600)
        assert [task.result().cause for task in done] == ["Memory"]
        assert largest not in done, "it uses less than the other workspaces together"
        for task in (largest, *members):
            task.cancel()
        client.workspace = other


async def test_the_limits_hold_for_all_of_them_together(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=2)
    limits = {"memoryBytes": 300 << 20}
    use = 'python3 -c \'import time; a = b"x" * ({} << 20); open("/allocated", "w"); time.sleep(600)\''
    async with connect(executor) as client:
        leader = f"{client.workspace}-leader"
        body = {"id": leader, "shares": True, "limits": limits}
        assert (await client.call("POST", "/workspaces", json=body)).status == 200
        service = await _join(client, leader, "db", limits=limits)
        client.workspace, client.folder = service, "/"
        larger = asyncio.create_task(client.ask(use.format(180), client.new_key(), waitSeconds=600))
        while (await client.call("GET", "~/stat?path=/allocated")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert not larger.done()
        client.workspace = leader
        assert await client.out("echo small") == "small\n"
        smaller = asyncio.create_task(client.ask(use.format(150), client.new_key(), waitSeconds=600))
        ended = await larger
        assert ended.cause == "Memory"
        assert not smaller.done()
        smaller.cancel()


async def test_an_empty_volume_gets_the_content_of_the_folder_that_it_replaces(
    start_executor: Any, connect: Any
) -> None:
    executor = start_executor("Overlay", places=4)
    async with connect(executor) as client:
        made = "mkdir -p /app/deep && echo code > /app/deep/f && chmod 640 /app/deep/f && ln -s deep/f /app/l"
        client.folder = "/"
        await client.out(f"{made} && chown 5:6 /app /app/deep/f && chmod 710 /app && mkfifo /app/pipe")
        parent, leader = client.workspace, f"{client.workspace}-leader"
        assert (await client.call("POST", "~/freeze")).status == 200
        body = {"id": leader, "shares": True, "volumes": {"code": "/mine", "empty": "/nothing"}}
        assert (await client.call("POST", "/workspaces", json=body)).status == 200
        service = await _join(client, leader, "web", parent=parent, volumes={"code": "/app"})
        other = await _join(client, leader, "other", parent=parent, volumes={"code": "/app", "empty": "/app/deep"})
        for workspace, folder in ((service, "/app"), (leader, "/mine")):
            client.workspace = workspace
            assert await client.out(f"cat {folder}/l; ls {folder}; stat -c '%a %u:%g' {folder} {folder}/deep/f") == (
                "code\ndeep\nl\n710 5:6\n640 5:6\n"
            )
        client.workspace = other
        assert await client.out("echo more > /app/deep/g; ls /app/deep") == "f\ng\n"
        client.workspace = service
        assert await client.out("ls /app/deep") == "f\n"


async def test_link_in_a_start_state_does_not_lead_a_volume_to_other_volumes(start_executor: Any, connect: Any) -> None:
    """The empty volume would be filled with the content of the private one."""
    async with connect(start_executor("Overlay", places=4)) as client:
        leader = f"{client.workspace}-leader"
        body = {"id": leader, "shares": True, "volumes": {"data": "/data"}}
        assert (await client.call("POST", "/workspaces", json=body)).status == 200
        keeper = await _join(client, leader, "keeper", volumes={"private": "/kept"})
        client.folder = "/"
        await client.out("rm -rf /srv; ln -s /.volumes /srv")
        assert (await client.call("POST", "~/freeze")).status == 200
        link = {
            "id": f"{leader}-link",
            "joins": leader,
            "parent": client.workspace,
            "volumes": {"data": "/srv/private"},
        }
        client.workspace = keeper
        await client.out("echo secret > /kept/f")
        refused = await client.call("POST", "/workspaces", json=link)
        assert "/srv/private: it leads to a folder that cannot be a volume" in refused.message
        client.workspace = leader
        assert await client.out("ls -A /data") == ""


COUNTING = "import os; n = 0\nwhile n := n + 1: open('{0}/.n', 'w').write(str(n)); os.rename('{0}/.n', '{0}/n')"


async def _counts(client: Any, leader: str, service: str) -> tuple[int, int]:
    read = [(await client.call("GET", f"/workspaces/{name}/files?path=/n")).body for name in (leader, service)]
    return int(read[0]), int(read[1])


async def _counting(client: Any) -> tuple[str, str]:
    """Start a program that counts in a file in a workspace, and another one in a workspace that joins it."""
    leader = f"{client.workspace}-leader"
    assert (await client.call("POST", "/workspaces", json={"id": leader, "shares": True})).status == 200
    service = await _join(client, leader, "db")
    for client.workspace in (leader, service):
        client.folder = "/"
        # With a child, so that there is more than one process to stop.
        await client.out(f'echo 0 > /n; (python3 -c "{COUNTING.format("")}"; true) >/dev/null 2>&1 & echo up')
    client.workspace = leader
    return leader, service


async def _until_counted(client: Any, leader: str, service: str, beyond: tuple[int, int]) -> None:
    async with asyncio.timeout(60):
        while not all(  # noqa: ASYNC110
            now > then for now, then in zip(await _counts(client, leader, service), beyond, strict=True)
        ):
            await asyncio.sleep(0.01)


async def test_a_pause_stops_all_joined_workspaces_until_it_ends(start_executor: Any, connect: Any) -> None:
    async with connect(start_executor("Overlay", places=2)) as client:
        leader, service = await _counting(client)
        assert (await client.call("PUT", "~/pause", json={"seconds": 60}, keyed=False)).status == 200
        before = await _counts(client, leader, service)
        waiting = asyncio.create_task(client.out("echo started"))
        await asyncio.sleep(0.5)
        extended = await client.call("PUT", "~/pause", json={"seconds": 60, "extends": True}, keyed=False)
        assert (extended.status, await _counts(client, leader, service)) == (200, before)
        assert not waiting.done(), "commands wait for the end of the pause"
        assert (await client.call("PUT", "~/pause", json={"seconds": 0}, keyed=False)).status == 200
        assert await waiting == "started\n"
        await _until_counted(client, leader, service, before)


async def test_a_pause_that_is_not_extended_ends_by_itself_and_is_reported(start_executor: Any, connect: Any) -> None:
    async with connect(start_executor("Overlay", places=2)) as client:
        leader, service = await _counting(client)
        assert (await client.call("PUT", "~/pause", json={"seconds": 0.2}, keyed=False)).status == 200
        await _until_counted(client, leader, service, await _counts(client, leader, service))
        late = await client.call("PUT", "~/pause", json={"seconds": 60, "extends": True}, keyed=False)
        assert (late.status, late.code) == (409, "Conflict")
        assert "the pause has ended" in late.message
        other = await client.held_by("2:other").raise_fence()
        assert other.status == 200
        stale = await client.call("PUT", "~/pause", json={"seconds": 60}, keyed=False)
        assert (stale.status, stale.code) == (409, "Fenced")


async def test_pause_in_which_a_program_continues_itself_is_reported(start_executor: Any, connect: Any) -> None:
    """A timer of the kernel can send SIGCONT to a stopped process: only once, in new kernels, to one without a handler."""
    timer = (
        "import ctypes, signal, struct, time; signal.signal(signal.SIGCONT, lambda *_: None); "
        "libc = ctypes.CDLL(None, use_errno=True); name = ctypes.c_void_p(); "
        "event = struct.pack('<qii48x', 0, signal.SIGCONT, 0); assert not libc.timer_create(1, event, ctypes.byref(name)); "
        "assert not libc.timer_settime(name, 0, struct.pack('<qqqq', 0, 50000000, 0, 50000000), None); print(1, flush=1)\n"
        "while True: pass"
    )
    async with connect(start_executor("Overlay", places=2)) as client:
        client.folder = "/"
        started = (await client.start(["python3", "-c", timer])).json["id"]
        await client.output_until(started, b"1")
        answers = [await client.call("PUT", "~/pause", json={"seconds": 60}, keyed=False)]
        async with asyncio.timeout(60):
            while answers[-1].status == 200:
                await asyncio.sleep(0.05)
                answers.append(await client.call("PUT", "~/pause", json={"seconds": 60, "extends": True}, keyed=False))
        assert answers[-1].code == "Conflict"
        assert await client.out("echo still usable") == "still usable\n"
