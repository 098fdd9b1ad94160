"""A server of Harbor trials, in this process or in a separate one, and a program that calls its model and solves a
task.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from agent_runtime.integrations.harbor_server.plan import ServedJob
from agent_runtime.integrations.harbor_server.runs import Runs
from agent_runtime.integrations.harbor_server.server import serving
from rollout_api.manifest import load_manifest
from rollout_api.rollout_job import RolloutJob

KEY = "a-key-of-the-tests-42"

ASKING = """
import json, os, sys, time, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}],
        "tools": [{"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}]}
for turn in range(int(sys.argv[2])):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]
    body["messages"] += [answer, {"role": "user", "content": f"And {turn}?"}]
    open("turns.txt", "a").write("turn\\n")
open("hello.txt", "w").write("Hello, world!\\n")
"""
"""Calls its model this many times with a tool, then solves `hello_world` whatever the answers were."""


def job_manifest(name: str, agent: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return the manifest of the server's runs. Its own model does not exist, because each run brings one."""
    model = {"endpoint": {"baseURL": "http://127.0.0.1:9/v1", "name": "nobody"}, "allowTextOnly": True}
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "tasks": {"stream": {}},
            "agent": agent,
            "output": {"uri": "out"},
            "attempts": {"limit": 1},
            **({} if agent["type"] in ("Oracle", "Nop") else {"model": model}),
            **spec,
        },
    }


def asking(turns: int) -> dict[str, Any]:
    """Return the agent that runs `ASKING`."""
    return {"type": "Command", "command": [sys.executable, "-c", ASKING, "{prompt}", str(turns)]}


def job(name: str, agent: dict[str, Any], **spec: Any) -> RolloutJob:
    """Return the parsed manifest."""
    return load_manifest(yaml.safe_dump(job_manifest(name, agent, **spec)))


@asynccontextmanager
async def harbor_server(folder: Path, *jobs: RolloutJob, **options: Any) -> AsyncIterator[tuple[str, Runs]]:
    """Run a server in this process. Yields its URL, with the key, and its runs."""
    served = {job.metadata.name: ServedJob(job, folder) for job in jobs}
    runs = Runs(folder / "runs", served, **options)
    runner, port = await serving(runs, KEY, "127.0.0.1", 0)
    try:
        yield f"http://trainer:{KEY}@127.0.0.1:{port}", runs
    finally:
        await runs.close()
        await runner.cleanup()


async def start_serve(folder: Path, port: int) -> asyncio.subprocess.Process:
    """Start `rolloutctl serve job.yaml` in that folder; return once it answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from rolloutctl.main import app; app()", "serve", "job.yaml", "--port", str(port),
        cwd=folder, env={**os.environ, "HARBOR_SERVER_KEY": KEY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    async with aiohttp.ClientSession() as http:
        while process.returncode is None:
            try:
                async with http.get(f"http://127.0.0.1:{port}/health") as reply:
                    assert reply.status == 200
                    return process
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
    raise AssertionError("the server has ended")
