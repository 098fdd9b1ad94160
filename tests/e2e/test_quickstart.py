"""The job that a new user runs first: by the command line on this machine, then with a model server."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import ObservationsRecord, Record
from tests.support.quickstart import REWARDS, STUMBLES

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "job.yaml"
ROLLOUTCTL = str(Path(sys.executable).parent / "rolloutctl")


def rolloutctl(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROLLOUTCTL, *arguments],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def results(folder: Path) -> list[dict[str, Any]]:
    (found,) = folder.glob("out/*/results.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for one run, which must leave nothing in it. Its path is short, because sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        yield Path(folder)
        left = [str(path.relative_to(folder)) for path in Path(folder).rglob("*")]
    assert left == [f"agent-rollouts-{os.getuid()}"], "the folder of all runs"


def test_quickstart_rewards_its_solution_and_no_cheat(tmp_path: Path, temporary: Path) -> None:
    target = ("run", str(QUICKSTART), "--output", str(tmp_path / "out"), "-o", "json")
    run = rolloutctl(*target, cwd=tmp_path, TMPDIR=str(temporary))
    assert run.returncode == 0, run.stderr
    rewards: dict[str, list[float]] = {}
    for line in results(tmp_path):
        rewards.setdefault(line["task"], []).append(line["reward"])
        assert line["outcome"] == "Completed"
        assert line["sandbox"]["provider"] == "local"
    assert rewards == REWARDS
    stumbling = {(result["task"], result["member"]) for result in results(tmp_path) if tool_errors(tmp_path, result)}
    assert not {who for who in stumbling if rewards[who[0]][who[1]] == 1} - {STUMBLES}, (
        "members that do all of it right"
    )
    assert STUMBLES in stumbling


@pytest.mark.full
def test_run_with_a_sandbox_for_each_workspace_leaves_no_files(tmp_path: Path, temporary: Path) -> None:
    job = yaml.safe_load(QUICKSTART.read_text())
    job["spec"]["sandbox"]["workspaces"] = {"perSandbox": 1}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run = rolloutctl("run", "job.yaml", cwd=tmp_path, TMPDIR=str(temporary))
    assert run.returncode == 0, run.stderr


def tool_errors(folder: Path, result: dict[str, Any]) -> list[str]:
    """Return the errors of a rollout's tool calls."""
    store = Store.open(str(folder / "out"), {})
    records = asyncio.run(records_of(store, result["index"]))
    return [
        r.content for record in records if isinstance(record, ObservationsRecord) for r in record.results if r.error
    ]


async def records_of(store: Store, index: int) -> list[Record]:
    return await (await open_run(store, "quickstart")).records(index)


def test_one_workspace_per_sandbox_gives_the_same_rewards_as_many(tmp_path: Path) -> None:
    """`Plain`, which isolates less, runs the same manifest, because its tasks need only a shell."""
    job = yaml.safe_load(QUICKSTART.read_text())
    job["metadata"]["name"] = "plain"
    spec = job["spec"]
    spec["tasks"] = {
        "inline": [
            {
                "name": "greet",
                "prompt": "Write hello into greeting.txt.",
                "setup": ["echo prepared > setup.txt"],
                "verifier": {
                    "files": [{"path": "expected.txt", "content": "hello\n"}],
                    "commands": ["cmp greeting.txt expected.txt", "grep -q prepared setup.txt"],
                },
            }
        ]
    }
    members = [
        {"turns": [{"toolCalls": [{"name": "bash", "arguments": {"command": command}}]}, {"content": "done"}]}
        for command in ("echo hello > greeting.txt", "echo bye > greeting.txt")
    ]
    spec["model"] = {"scripted": {"tasks": [{"task": "greet", "members": members}]}}
    spec["groupSize"] = 2
    spec.pop("completion", None)
    for mode in ("Plain", "Overlay"):
        spec["sandbox"] = {"workspaces": {"mode": mode}}
        folder = tmp_path / mode
        folder.mkdir()
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        run = rolloutctl("run", "job.yaml", "--output", str(folder / "out"), cwd=folder)
        assert run.returncode == 0, run.stderr
        assert [(line["reward"], line["sandbox"]["mode"]) for line in results(folder)] == [(1, mode), (0.5, mode)]


@pytest.fixture
def model_server() -> Iterator[str]:
    """A server with OpenAI's chat API that requires a key and always gives the same final answer."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    over = asyncio.Event()
    ports: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer sesame":
            return web.json_response({"error": {"message": "Incorrect API key provided"}}, status=401)
        message = {"role": "assistant", "content": "It looks right to me."}
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
        )

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        ready.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{ports[0]}/v1"
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def test_the_same_job_runs_against_a_real_endpoint(tmp_path: Path, model_server: str) -> None:
    options = ["--model-url", model_server, "--model-name", "m", "--api-key-env", "THE_KEY"]
    job = yaml.safe_load(QUICKSTART.read_text())
    job["spec"]["tasks"]["inline"] = job["spec"]["tasks"]["inline"][:1]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run = rolloutctl("run", "job.yaml", "--output", str(tmp_path / "out"), *options, cwd=tmp_path, THE_KEY="sesame")
    assert run.returncode == 0, run.stderr
    lines = results(tmp_path)
    assert len(lines) == 4
    assert {line["reward"] for line in lines} == {0}
    assert {line["usage"]["completionTokens"] for line in lines} == {5}


def test_wrong_key_is_reported_before_anything_runs(tmp_path: Path, model_server: str) -> None:
    options = ["--model-url", model_server, "--model-name", "m", "--api-key-env", "THE_KEY"]
    target = ["run", str(QUICKSTART), "--output", str(tmp_path / "out")]
    run = rolloutctl(*target, *options, cwd=tmp_path, THE_KEY="abracadabra")
    assert run.returncode != 0
    assert "THE_KEY" in run.stderr
    assert "Incorrect API key" in run.stderr
    assert not list((tmp_path / "out").glob("*/attempts"))
