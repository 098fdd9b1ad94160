"""Tools of real MCP servers, in the workspace by stdio and elsewhere by HTTP, and calls that a killed runner has begun."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.attempt_folder import AttemptFolder
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.records import Observation, ObservationsRecord
from tests.support.own_environment import own_environment, run_killed
from tests.support.vllm_server import Answer, Prompt, VllmStandIn
from tests.support.vllm_server.model import ToolCall

REQUIREMENTS = ("mcp-server-time==2026.7.10", "mcp<2")  # the servers' own SDK, older than ours

# Counts its calls, and answers slowly.
COUNTING = """
import pathlib, sys, time
from mcp.server.fastmcp import FastMCP

server = FastMCP("counting")
count = 0

@server.tool()
def count_slowly() -> str:
    "Count one further."
    global count
    count += 1
    pathlib.Path("begun.txt").open("a").write(f"{count}\\n")
    if count == 2:
        time.sleep(4)  # in which its runner is killed, and the next one starts
    return f"This was call {count}."

@server.tool()
def crash() -> str:
    "End the server."
    print("out of ideas", file=sys.stderr, flush=True)
    import os; os._exit(3)

async def guarded(scope, receive, send):
    key = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
    if scope["type"] == "http" and key != " ".join(["Bearer", *sys.argv[2:]]):
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    await app(scope, receive, send)

if sys.argv[1:]:
    import uvicorn
    app = server.streamable_http_app()
    uvicorn.run(guarded if sys.argv[2:] else app, port=int(sys.argv[1]))
else:
    server.run()
"""


def manifest(server: VllmStandIn, servers: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    task = {"name": "ask", "prompt": "Ask.", "files": [{"path": "counting.py", "content": COUNTING}]}
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "mcp"},
        "spec": {
            "mode": "Eval",
            "tasks": {"inline": [{**task, **spec.pop("task", {})}]},
            "model": {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy"}},
            "agent": {"tools": ["bash"], "mcpServers": servers, "maxTurns": 8},
            "attempts": {"limit": 1},
            "completion": {"maxInfraFailureFraction": 1.0},
            "output": {"uri": "out"},
            **spec,
        },
    }


def environment() -> Path:
    """A Python environment with the servers, created once."""
    return own_environment("mcp-servers", *REQUIREMENTS)


def counting_server() -> list[dict[str, Any]]:
    return [{"name": "counting", "command": [str(environment() / "bin" / "python"), "counting.py"]}]


def calls(*wanted: ToolCall | Answer) -> Any:
    """Return a model that makes these calls, one a turn, and then ends."""

    def script(prompt: Prompt) -> Answer | None:
        if not prompt.session:
            return None
        if prompt.turn >= len(wanted):
            return Answer("That is all.")
        call = wanted[prompt.turn]
        return call if isinstance(call, Answer) else Answer("", [call])

    return script


async def run(folder: Path, job: dict[str, Any], kill: asyncio.Event | None = None) -> RunReader:
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    name = await run_killed(folder, environment(), kill or asyncio.Event(), lambda: None)
    return await open_run(Store.open(str(folder / "out"), {}), name)


async def observations(reader: RunReader) -> list[Observation]:
    records = await reader.records(0)
    return [result for record in records if isinstance(record, ObservationsRecord) for result in record.results]


@pytest.mark.full
async def test_a_public_server_in_the_workspace_answers_the_models_calls(tmp_path: Path) -> None:
    convert = {"source_timezone": "Europe/Berlin", "target_timezone": "Asia/Tokyo", "time": "12:00"}
    script = calls(
        ToolCall("time__convert_time", convert), ToolCall("time__convert_time", {**convert, "time": "noon"}),
        ToolCall("time__get_current_time", {"timezone": "UTC"}),
    )  # fmt: skip
    servers = [{"name": "time", "command": ["mcp-server-time"], "tools": ["convert_time"]}]
    async with VllmStandIn(script=script) as server:
        reader = await run(tmp_path, manifest(server, servers))
    (result,) = reader.results()
    assert (result.outcome, result.stop_reason) == ("Completed", "Finished"), result
    converted, refused, unknown = await observations(reader)
    assert "Asia/Tokyo" in json.loads(converted.content)["target"]["timezone"]
    assert (converted.error, refused.error, "time" in refused.content) == (False, True, True)
    assert "no tool named 'time__get_current_time'" in unknown.content, "only those that the manifest names are offered"


async def test_call_interrupted_by_a_killed_runner_is_made_once(tmp_path: Path) -> None:
    count, kill = ToolCall("counting__count_slowly", {}), asyncio.Event()
    script = calls(count, count, count, ToolCall("bash", {"command": "cat begun.txt"}))
    async with VllmStandIn(script=script) as server:

        async def kill_in_the_second_call() -> None:
            while len(server.served_in("rollout-0")) < 2:  # noqa: ASYNC110 nothing tells of it
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
            kill.set()

        killing = asyncio.ensure_future(kill_in_the_second_call())
        reader = await run(tmp_path, manifest(server, counting_server()), kill)
        killing.cancel()
    assert await AttemptFolder.of_rollout(reader.store, 0, 0).latest_epoch() == 2, "a second runner went on with it"
    *counted, told = await observations(reader)
    assert [result.content for result in counted] == [f"This was call {number}." for number in (1, 2, 3)]
    assert told.content.split()[:4] == ["1", "2", "3", "[exit"], "the server was asked exactly once for each call"


async def test_ended_mcp_server_is_reported_to_the_model_and_costs_no_attempt(tmp_path: Path) -> None:
    script = calls(ToolCall("counting__crash", {}), ToolCall("counting__count_slowly", {}))
    async with VllmStandIn(script=script) as server:
        reader = await run(tmp_path, manifest(server, counting_server()))
    (result,) = reader.results()
    assert (result.outcome, result.stop_reason, result.attempt) == ("Completed", "Finished", 0)
    for observation in await observations(reader):
        assert observation.error
        assert "Its last output: " in observation.content
        assert observation.content.endswith("out of ideas")


async def test_mcp_server_that_cannot_start_gives_no_reward(tmp_path: Path) -> None:
    async with VllmStandIn() as server:
        broken = [{"name": "broken", "command": ["sh", "-c", "echo no config >&2; exit 4"]}]
        reader = await run(tmp_path, manifest(server, broken))
    (result,) = reader.results()
    assert (result.outcome, result.reason) == ("InfraFailed", "McpServerFailed")
    assert "broken (in the sandbox): Connection closed. Its last output: no config" in result.message


async def listening(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.close()
            await writer.wait_closed()
            return


@asynccontextmanager
async def counting_elsewhere(folder: Path, port: int, *key: str) -> AsyncIterator[str]:
    """Serve the counting server by HTTP; yields its URL. With a key, it refuses other callers."""
    (folder / "counting.py").write_text(COUNTING)
    process = await asyncio.create_subprocess_exec(
        str(environment() / "bin" / "python"), "counting.py", str(port), *key, cwd=folder,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await listening(port)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_a_server_that_wants_a_key_gets_the_one_that_the_manifest_names(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TICKETS_KEY", "a-key\n")
    async with (
        VllmStandIn(script=calls(ToolCall("counting__count_slowly", {}))) as server,
        counting_elsewhere(tmp_path, unused_tcp_port, "a-key") as url,
    ):
        counting = {"name": "counting", "url": url, "apiKeyFrom": {"env": "TICKETS_KEY"}}
        reader = await run(tmp_path, manifest(server, [counting]))
    (counted,) = await observations(reader)
    assert counted.content == "This was call 1."
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and b"a-key" in path.read_bytes()]


async def test_remote_mcp_server_is_called_by_the_runner_in_one_session_per_rollout(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    count = ToolCall("counting__count_slowly", {})
    async with (
        VllmStandIn(script=calls(count, ToolCall("counting__crash", {}), count)) as server,
        counting_elsewhere(tmp_path, unused_tcp_port) as url,
    ):
        reader = await run(tmp_path, manifest(server, [{"name": "counting", "url": url}]))
    (result,) = reader.results()
    assert (result.outcome, result.stop_reason) == ("Completed", "Finished"), result.message
    counted, *lost = await observations(reader)
    assert (counted.content, counted.error) == ("This was call 1.", False)
    assert [observation.error for observation in lost] == [True, True], "a server that has gone is told to the model"
