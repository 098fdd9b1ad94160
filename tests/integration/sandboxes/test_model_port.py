"""A program in a workspace and its model, with every provider, and with runners that are killed."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent_runtime.sandboxes.base import Fence, SandboxProvider, Workspace
from tests.integration.sandboxes.conftest import FETCH, FIRST, Case, spec
from tests.support.full import MODES_ONCE

REPOSITORY = Path(__file__).parents[3]
SERVING_RUNNER = Path(__file__).with_name("serving_runner.py")


async def acquire(provider: SandboxProvider, attempt: str = "0-1") -> Workspace:
    return await provider.acquire(spec(), attempt=attempt, fence=FIRST, name="agent")


async def fetch(workspace: Workspace, url: str, key: str) -> str:
    """Return the reply that a program in the workspace gets from a URL."""
    command = f"python3 -c {shlex.quote(FETCH)} {url}"
    result = await workspace.run(command, key=key, deadline_seconds=120)
    assert result.ok, result.stderr.decode()
    return result.stdout.decode().strip()


def says(text: str) -> web.Server:
    """Return a model that answers every request with its path and this text."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=f"{request.path} {text}")

    return web.Server(answer)


@asynccontextmanager
async def next_runner(case: Case, handle: Any) -> AsyncIterator[Workspace]:
    """Return the same workspace, taken over by another process."""
    provider = case.provider()
    await provider.open()
    yield await provider.reattach(handle, spec=spec(), fence=Fence(2, "second"))
    await provider.close(keep=True)


async def test_a_program_in_a_workspace_without_network_reaches_its_model(provider: SandboxProvider) -> None:
    one, other = await asyncio.gather(acquire(provider, "0-1"), acquire(provider, "1-1"))
    async with one.serve_model(says("one")) as url, other.serve_model(says("other")) as other_url:
        answers = await asyncio.gather(
            *(fetch(one, f"{url}/{number}", f"1:{number}") for number in range(8)),
            fetch(other, f"{other_url}/x", "1:x"),
        )
    assert answers == [*(f"/{number} one" for number in range(8)), "/x other"]


async def test_request_without_a_server_waits_for_the_next_one(case: Case, provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    async with workspace.serve_model(says("first")) as url:
        assert await fetch(workspace, f"{url}/a", "1:a") == "/a first"
    asking = asyncio.create_task(fetch(workspace, f"{url}/b", "1:b"))
    await asyncio.sleep(0.3)
    assert not asking.done()
    async with workspace.serve_model(says("again")) as same:
        assert same == url
        assert await asking == "/b again"
    asking = asyncio.create_task(fetch(workspace, f"{url}/c", "1:c"))
    await asyncio.sleep(0.3)
    async with next_runner(case, workspace.handle) as newer, newer.serve_model(says("second")) as same:
        assert same == url
        asking.cancel()
        assert await fetch(newer, f"{url}/c", "1:c") == "/c second"


async def test_model_port_is_closed_in_the_next_phase(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    async with workspace.serve_model(says("agent")) as url:
        await workspace.enter("verifier", key="1:enter")
        with pytest.raises((AssertionError, OSError), match=r"(?i)refused"):
            await fetch(workspace, f"{url}/a", "1:a")


@pytest.mark.parametrize("case", ["Overlay", "Plain"], indirect=True)
async def test_a_stopped_program_stops_its_model_call(provider: SandboxProvider) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()
        raise AssertionError("nobody waits so long")

    workspace = await acquire(provider)
    async with workspace.serve_model(web.Server(answer, handler_cancellation=True)) as url:
        asking = asyncio.create_task(fetch(workspace, url, "1:a"))
        await asyncio.wait_for(begun.wait(), 120)
        await workspace.kill_all(key="1:b")
        await asyncio.wait_for(stopped.wait(), 120)
        with pytest.raises(AssertionError):
            await asking


AGENT = """
import http.client, json, sys
host = sys.argv[1].removeprefix("http://")
log = []
for turn in range(4):
    for attempt in range(3):
        connection = http.client.HTTPConnection(host, timeout=60)
        try:
            connection.request("POST", "/v1/turn", json.dumps({"turn": turn}))
            response = connection.getresponse()
            begin = response.read(1)
            told = http.client.HTTPConnection(host, timeout=60)
            told.request("POST", "/v1/seen", "")
            told.getresponse().read()
            answer = json.loads(begin + response.read())
        except (http.client.HTTPException, OSError) as error:
            log.append(f"retry {turn}: {type(error).__name__}")
            continue
        log.append(f"turn {turn}: {answer['said']}")
        break
print("\\n".join(log))
"""


@pytest.mark.parametrize("mode", MODES_ONCE)
async def test_killed_runner_is_replaced_and_the_agent_sees_one_broken_answer(tmp_path: Path, mode: str) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    lines: list[str] = []
    for epoch in (1, 2, 3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVING_RUNNER), str(tmp_path), mode, str(epoch),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(300):
            while (line := (await process.stdout.readline()).decode().strip()) and line != "kill me":
                lines.append(line)
        if line:
            process.send_signal(signal.SIGKILL)
        await process.wait()
    served, result = lines[:-1], json.loads(lines[-1])
    assert result["exitCode"] == 0, result
    assert result["stdout"].splitlines() == [
        "turn 0: by 1",
        "turn 1: by 2",  # held: the first runner died before it had begun to answer
        "retry 2: IncompleteRead",  # cut: the second one died in the middle of its answer
        "turn 2: by 3",
        "turn 3: by 3",
    ]
    assert served == ["1 serves 0", "1 serves 1", "2 serves 1", "2 serves 2", "3 serves 2", "3 serves 3"]
