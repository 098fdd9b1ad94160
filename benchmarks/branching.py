"""Branching a rollout sixteen times from its eleventh turn, with 200 MB in its workspace."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_runtime.agents.base import AgentContext
from agent_runtime.engine.events import Event, JobStarted, RolloutSealed, ToolEnded
from agent_runtime.engine.run import run_job
from agent_runtime.models.base import ModelReply, ModelRequest, ToolCall
from benchmarks.jobs import SAYS_DONE, rollout_job
from benchmarks.report import Row, Target, comparison
from rollout_api.records import Usage
from rollout_api.rollout_job import RolloutJob
from tests.support.s3 import serve_s3

BRANCHES = 16
_TASK = {"name": "work", "prompt": "Work."}
TURN = 10
FILES, FILE_BYTES = 2_000, 100_000
FILL = f"for n in $(seq {FILES}); do head -c {FILE_BYTES} /dev/urandom > $n; done"
A_FIFTH = Target("at most", 0.2)


class Instant:
    """A model that answers immediately: with a bash call in each turn before `last_turn`, then with text."""

    def __init__(self, last_turn: int) -> None:
        self._last_turn = last_turn

    name = "instant"
    token_capture = "TextOnly"

    async def complete(self, request: ModelRequest) -> ModelReply:
        is_last = request.turn > self._last_turn
        command = FILL if request.turn == 0 else "true"
        function = {"name": "bash", "arguments": f'{{"command": "{command}"}}'}
        call = {"id": f"c{request.turn}", "type": "function", "function": function}
        message = {"role": "assistant", "content": "done"} if is_last else {"role": "assistant", "tool_calls": [call]}
        return ModelReply(message, "stop" if is_last else "tool_calls", usage=Usage())

    async def check(self) -> None:
        """See Model."""

    async def close(self) -> None:
        """See Model."""


class Brancher:
    """An agent that works for eleven turns, then branches from there sixteen times, with one more turn in each branch. Its
    message has the seconds.
    """

    async def run(self, context: AgentContext) -> str:
        async def turn(number: int) -> None:
            await context.call_model([{"role": "user", "content": "go on"}])
            command = FILL if number == 0 else "true"
            await context.call_tools([ToolCall(id=f"c{number}", name="bash", arguments=f'{{"command": "{command}"}}')])

        for number in range(TURN + 1):
            await turn(number)
        started = time.perf_counter()
        checkpoint = await context.checkpoint()
        for number in range(BRANCHES):
            await context.go_back(checkpoint)
            await turn(TURN + 1 + number)
        return str(time.perf_counter() - started)


def measure() -> list[Row]:
    """Return the seconds until all branches have their first result, and the ratio to copying."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder, serve_s3() as s3:
        copied = _copy(Path(folder))
        own = asyncio.run(_in_its_own_sandbox(Path(folder)))
        first, last = asyncio.run(_from_another_sandbox(Path(folder), s3.uri("branching"), s3.environ()))
    size = f"{FILES * FILE_BYTES // 10**6} MB"
    here, there = f"{BRANCHES} branches in their own sandbox", f"{BRANCHES} branches in another sandbox, over S3"
    return [
        comparison(f"{here}, {size}: all first tool calls ended", own, "s", f"{BRANCHES} × cp -a", copied, A_FIFTH),
        Row(f"{there}: the first one's first tool call ended", first, "s"),
        Row(f"{there}: all first tool calls ended", last, "s"),
    ]


def _copy(folder: Path) -> float:
    source = folder / "source"
    source.mkdir()
    subprocess.run(["sh", "-c", FILL], cwd=source, check=True)
    started = time.perf_counter()
    for number in range(BRANCHES):
        subprocess.run(["cp", "-a", str(source), str(folder / f"copy-{number}")], check=True)
    seconds = time.perf_counter() - started
    for number in range(BRANCHES):
        shutil.rmtree(folder / f"copy-{number}")
    return seconds


async def _in_its_own_sandbox(folder: Path) -> float:
    agent = {"type": f"{__name__}:Brancher", "tools": ["bash"]}
    job = _job({"inline": [_TASK]}, str(folder / "out"), agent=agent)
    message = ""

    def observe(event: Event) -> None:
        nonlocal message
        if isinstance(event, RolloutSealed):
            message = event.result.message

    await run_job(job, base_dir=folder, environ=os.environ, model=Instant(TURN + BRANCHES), observer=observe)
    return float(message)


async def _from_another_sandbox(folder: Path, uri: str, environ: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds from the start of the job to the first and to the last branch's first tool result."""
    source = _job({"inline": [_TASK]}, f"{uri}/source", sandbox={"snapshotEveryTurns": TURN + 1})
    run = ""
    seconds: list[float] = []
    started = 0.0

    def observe(event: Event) -> None:
        nonlocal run, started
        if isinstance(event, JobStarted):
            run, started = event.folder, time.perf_counter()
        elif isinstance(event, ToolEnded):
            seconds.append(time.perf_counter() - started)

    await run_job(source, base_dir=folder, environ=environ, model=Instant(TURN), observer=observe)
    seconds.clear()
    branch = {"job": f"{uri}/source/{run}", "index": 0, "turn": TURN, "count": BRANCHES}
    job = _job({"branch": [branch]}, f"{uri}/branches")
    await run_job(job, base_dir=folder, environ=environ, model=Instant(TURN + 1), observer=observe)
    return min(seconds), max(seconds)


def _job(tasks: Mapping[str, Any], uri: str, **spec: Any) -> RolloutJob:
    # `run_job` gets the model as an argument, but the manifest must name one too.
    return rollout_job(uri, tasks=tasks, model=SAYS_DONE, **({"agent": {"tools": ["bash"]}} | spec))
