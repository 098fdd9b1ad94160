"""What an operator needs of executors that several jobs share: draining them, and ending what a deleted job left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


async def create(client: Any, name: str, **fields: Any) -> Any:
    return await client.call("POST", "/workspaces", json={"id": name, **fields})


async def other_attempt(client: Any, attempt: str) -> Any:
    """Return a client of another attempt at the same executor, fenced."""
    other = client.held_by(client.fence)
    other.attempt, other.workspace = attempt, f"w-{attempt}"
    assert (await other.raise_fence()).status == 200
    return other


async def test_draining_executor_refuses_new_places_and_serves_the_rest(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=4)
    async with connect(executor, shares=True) as client:
        health = (await client.call("GET", "/health")).json
        assert (health["draining"], health["live"], health["uses"]) == (False, 1, 1)
        assert (await create(client, "layer")).status == 200
        assert (await client.call("POST", "/workspaces/layer/freeze")).status == 200
        assert (await create(client, "0-1.agent.2")).status == 200
        assert (await client.call("POST", "/workspaces/0-1.agent.2/freeze")).status == 200
        for _ in range(2):
            drained = await client.call("PUT", "/drain", json={}, keyed=False)
            assert (drained.status, drained.json) == (200, {"live": 1})
        refused = await create(client, "new")
        assert (refused.status, refused.code) == (503, "NoPlace")
        assert "draining" in refused.message
        assert (await create(client, "fork", parent="layer")).code == "NoPlace"
        assert (await create(client, "0-1.agent.3", parent="0-1.agent.2")).status == 200, "the rollout goes on"
        assert (await create(client, "0-2.agent.3", parent="0-1.agent.2")).code == "NoPlace"
        health = (await client.call("GET", "/health")).json
        assert (health["live"], health["rollouts"]) == (2, 1)
        assert (await client.call("DELETE", "/workspaces/0-1.agent.3")).status == 200
        assert (await client.call("GET", "/health")).json["rollouts"] == 1, "its checkpoint is there"
        assert (await client.call("DELETE", "/workspaces/0-1.agent.2")).status == 200
        assert (await create(client, "service", joins=client.workspace)).status == 200
        assert await client.out("echo on", cwd="/") == "on\n"
        health = (await client.call("GET", "/health")).json
        assert (health["draining"], health["live"], health["uses"]) == (True, 1, 4)
        assert (await client.call("DELETE", "/workspaces/service")).status == 200
        assert (await client.call("DELETE", "~")).status == 200
        assert (await client.call("GET", "/health")).json["live"] == 0


async def test_attempts_of_a_prefix_end_whoever_holds_them(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=6)
    async with connect(executor) as client:
        gone = [await other_attempt(client, f"job-gone.{number}") for number in range(2)]
        other = await other_attempt(client, "job-goes.0")
        for each in (*gone, other):
            assert (await create(each, each.workspace)).status == 200
        # A layer of the first attempt below a workspace of the second, whose command runs meanwhile.
        assert (await create(gone[0], "layer")).status == 200
        assert (await gone[0].call("POST", "/workspaces/layer/freeze")).status == 200
        assert (await create(gone[1], "above", parent="layer")).status == 200
        command = "touch /begun; sleep 600"
        running = asyncio.create_task(gone[1].ask(command, gone[1].new_key(), waitSeconds=600, cwd="/"))
        while (await gone[1].call("GET", "~/stat?path=/begun")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        ended = await client.call("DELETE", "/attempts?prefix=job-gone", keyed=False)
        assert (ended.status, ended.json) == (200, {"deleted": 2})
        assert (await running).cause == "WorkspaceEnded"
        left = {found["id"] for found in (await client.call("GET", "/workspaces")).json["workspaces"]}
        assert left == {client.workspace, other.workspace}
        assert (await create(gone[0], "again")).code == "Forgotten"
        assert (await client.call("DELETE", "/attempts?prefix=job-gone", keyed=False)).json == {"deleted": 0}
        assert await other.out("echo on", cwd="/") == "on\n"
        assert (await gone[0].raise_fence()).status == 200
        assert (await create(gone[0], "again")).status == 200


async def test_layers_below_other_attempts_outlive_the_end_of_a_prefix(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay", places=4)
    async with connect(executor) as client:
        gone = await other_attempt(client, "job-gone.0")
        other = await other_attempt(client, "job-goes.0")
        assert (await create(gone, "layer")).status == 200
        await gone.call("PUT", "/workspaces/layer/files?path=/kept", data=b"kept")
        assert (await gone.call("POST", "/workspaces/layer/freeze")).status == 200
        assert (await create(gone, "own", parent="layer")).status == 200
        assert (await create(other, other.workspace, parent="layer")).status == 200
        for _ in range(2):
            assert (await client.call("DELETE", "/attempts?prefix=job-gone", keyed=False)).json == {"deleted": 0}
            left = {found["id"] for found in (await client.call("GET", "/workspaces")).json["workspaces"]}
            assert left == {client.workspace, other.workspace, "layer"}
        assert await other.out("cat /kept", cwd="/") == "kept"
        assert (await other.call("DELETE", "~")).status == 200
        assert (await client.call("DELETE", "/attempts?prefix=job-gone", keyed=False)).json == {"deleted": 1}


@pytest.mark.parametrize("query", ["", "?prefix=", "?prefix=short", "?prefix=eight%20long", "?prefix=job-gone&more=1"])
async def test_prefix_must_have_eight_visible_characters(client: Any, query: str) -> None:
    assert (await client.call("DELETE", f"/attempts{query}", keyed=False)).code == "BadRequest"
    assert await client.out("echo on") == "on\n"
