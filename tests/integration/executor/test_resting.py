"""Workspaces without processes rest: their init ends, and the next request makes another one over the same files."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from pathlib import Path
from typing import Any

import pytest

REST = {"restSeconds": 0.2}


def inits(executor: Any) -> int:
    """The number of processes of an executor that are the first of a workspace."""
    found, waiting = 0, [str(executor.process.pid)]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            ids = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            assert ids is not None
            found += ids[1].split()[-1] == "1" and len(ids[1].split()) > 1
            waiting += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return found


async def at_rest(executor: Any, client: Any) -> bool:
    """Whether the client's workspace came to rest; its processes are those of no namespace then."""
    for _ in range(600):  # a busy machine
        shown = (await client.call("GET", "~")).json
        if shown["resting"]:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_workspace_goes_on_after_a_rest_as_if_nothing_had_been(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=2, **REST)
    async with connect(executor, env={"OWN": "kept"}) as client:
        client.folder = "/"
        await client.out("mkdir /deep; echo one > /deep/f; chown 3:4 /deep/f; ln /deep/f /hard; rm /etc/hostname")
        for number in range(3):
            assert await at_rest(executor, client)
            told = await client.out(
                f"cat /deep/f; stat -c '%u:%g %h' /hard; ls /etc/hostname 2>&1 | wc -l; echo $OWN; echo {number} >> /n"
            )
            assert told == "one\n3:4 2\n1\nkept\n"
        assert await at_rest(executor, client)
        assert (await client.call("GET", "~/files?path=/n")).body == b"0\n1\n2\n"
        assert await at_rest(executor, client)
        assert (await client.call("GET", "~/snapshot")).status == 200
        assert await at_rest(executor, client)
        assert (await client.call("POST", "~/freeze")).json["state"] == "Frozen"
        parent = client.workspace
        client.workspace = f"{parent}-fork"
        assert (await client.call("POST", "/workspaces", json={"id": client.workspace, "parent": parent})).status == 200
        assert await at_rest(executor, client)
        assert await client.out("cat /n") == "0\n1\n2\n"
        assert await at_rest(executor, client)
        assert (await client.call("DELETE", "~/processes")).status == 200
        assert (await client.call("DELETE", "~")).status == 200


async def test_processes_and_files_in_memory_keep_a_workspace_awake(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=2, **REST)
    async with connect(executor) as client:
        client.folder = "/"
        for hold, let_go in (
            ("(sleep 300 > /dev/null 2>&1 &) ; echo", "pkill sleep"),
            ("echo kept > /dev/shm/f", "cat /dev/shm/f; rm /dev/shm/f"),
            ("ipcmk -M 100 > /dev/null", "test $(ipcs -m | grep -c 0x) = 1 && ipcrm --all"),
        ):
            await client.out(hold)
            await asyncio.sleep(1)
            assert not (await client.call("GET", "~")).json["resting"], hold
            assert (await client.run(let_go))["exitCode"] == 0
            assert await at_rest(executor, client), let_go
        assert (await client.call("PUT", "~/model", json={})).status == 200
        await asyncio.sleep(1)
        assert not (await client.call("GET", "~")).json["resting"], "a program may wait at its model port"


async def test_the_network_is_the_same_after_a_rest(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=2, **REST)
    async with connect(executor) as client:
        client.folder = "/"
        assert (await client.call("PUT", "~/network", json={"network": ["127.0.0.1:1"]})).status == 200
        ask = "python3 -c \"import urllib.request as u; u.urlopen('http://10.1.2.3:80/')\" 2>&1 | grep -o 'Error 403'"
        assert await client.out(ask) == "Error 403\n", "the proxy refuses it"
        assert await at_rest(executor, client)
        assert await client.out(ask) == "Error 403\n"


async def test_a_resting_workspace_has_no_processes_and_many_awake_at_once(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=24, **REST)
    async with connect(executor) as client:
        client.folder = "/"
        names = [f"{client.workspace}-{number}" for number in range(20)]
        for name in names:
            assert (await client.call("POST", "/workspaces", json={"id": name})).status == 200
            client.workspace = name
            await client.out(f"echo {name} > /name")
        for name in names:
            client.workspace = name
            assert await at_rest(executor, client)
        async with asyncio.timeout(60):
            while inits(executor) > 10:  # these are spares  # noqa: ASYNC110 the ends of processes have no event
                await asyncio.sleep(0.05)

        async def name_of(workspace: str) -> str:
            return str((await client.call("GET", f"/workspaces/{workspace}/files?path=/name")).body.decode().strip())

        assert await asyncio.gather(*map(name_of, names)) == names


@pytest.mark.parametrize("seed", range(2))
async def test_no_request_is_lost_between_awake_and_rest(seed: int, start_executor: Any, connect: Any) -> None:
    """Requests at random moments, at a rest time of a few milliseconds."""
    choose = random.Random(seed)
    executor = start_executor("Overlay", places=4, restSeconds=0.03)
    async with connect(executor) as client:
        client.folder = "/"
        lines = 0
        for _ in range(60):
            await asyncio.sleep(choose.choice([0, 0.01, 0.03, 0.035, 0.05, 0.3]))
            count = choose.randint(1, 3)
            calls = [client.run(f"echo x >> /log; echo {choose.random()}") for _ in range(count)]
            calls += [client.call("PUT", "~/files?path=/other", data=b"x")] * choose.randint(0, 1)
            answers = await asyncio.gather(*calls)
            lines += count
            assert all(answer["exitCode"] == 0 for answer in answers[:count]), seed
        assert await client.out("wc -l < /log") == f"{lines}\n", seed
