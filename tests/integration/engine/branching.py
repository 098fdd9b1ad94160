"""Jobs to branch, and agents that branch their own workspace. The tests and the runs that they start import this
module.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_runtime.agents.base import AgentContext
from agent_runtime.engine.run import run_job
from agent_runtime.models.base import ToolCall
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import RolloutJob

TURNS = 5


def bash(command: str, delay: float = 0) -> dict[str, Any]:
    """Return a turn that runs a command."""
    return {"toolCalls": [{"name": "bash", "arguments": {"command": command}}], "delaySeconds": delay}


FINISH: dict[str, Any] = {"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]}


def job(name: str, tasks: Mapping[str, Any], scripts: Mapping[str, Sequence[Any]], **spec: Any) -> dict[str, Any]:
    """Return a RolloutJob whose model follows a script for each task."""
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "mode": "Eval",
            "tasks": dict(tasks),
            "model": {
                "scripted": {
                    "tasks": [{"task": task, "members": [{"turns": list(turns)}]} for task, turns in scripts.items()]
                }
            },
            "agent": {"tools": ["bash", "finish"]},
            "output": {"uri": "./out"},
            **spec,
        },
    }


def counting(name: str = "source", *, commands: Sequence[str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a rollout of five turns that each add a line and show all of them. A second setup would write something
    else.
    """
    commands = commands or [f"echo {turn} >> log.txt; cat log.txt" for turn in range(TURNS)]
    task = {
        "name": "count",
        "prompt": "Count.",
        "setup": ["date +%s.%N > when.txt"],
        "verifier": {"commands": ["grep -q b log.txt"]},
    }
    return job(name, {"inline": [task]}, {"count": [*map(bash, commands), FINISH]}, **spec)


def branching(
    run: str,
    *turns: int,
    count: int = 2,
    name: str = "branch",
    then: str = "echo b >> log.txt; cat log.txt when.txt",
    **more: Any,
) -> dict[str, Any]:
    """Return a job that branches rollout 0 of a run after those turns. Each branch runs one more command."""
    spec = {field: more.pop(field) for field in list(more) if field in ("sandbox", "agent", "attempts", "groupSize")}
    entries = [{"job": run, "index": 0, "turn": turn, "count": count, **more} for turn in turns]
    copied = [{"content": "never asked for"}]
    scripts = {f"count@0.{turn}": [*copied * (turn + 1), bash(then), FINISH] for turn in turns}
    return job(name, {"branch": entries}, scripts, **spec)


def searching(sandbox: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job of one rollout whose agent searches."""
    task = {
        "name": "search",
        "prompt": "Search.",
        "verifier": {"commands": ['test "$(cat log.txt | xargs)" = "start two"']},
    }
    turns = [{"content": "go", "delaySeconds": 0.05}] * 5
    agent = {"type": "tests.integration.engine.branching:Searcher", "tools": ["bash"]}
    return job("search", {"inline": [task]}, {"search": turns}, agent=agent, sandbox=dict(sandbox))


class Searcher:
    """Tries three ways from one checkpoint, each in the same state, and continues in the second."""

    async def run(self, context: AgentContext) -> str:
        """See Agent."""
        seen: list[str] = []

        async def step(command: str) -> None:
            await context.call_model([{"role": "user", "content": command}])
            call = ToolCall(id=f"c{len(seen)}", name="bash", arguments=f'{{"command": "{command}"}}')
            seen.append((await context.call_tools([call]))[0].content)

        await step("mkdir -p ../else; echo start > log.txt; echo start > ../else/log")
        await context.snapshot()
        start = await context.checkpoint()
        ends = []
        for way in ("one", "two", "three"):
            await context.go_back(start)
            await step(f"sleep 0.05; echo {way} >> log.txt; echo {way} >> ../else/log; cat log.txt ../else/log")
            ends.append(await context.checkpoint())
        await context.go_back(ends[1])
        await step("cat log.txt")
        return " | ".join(seen)


async def done(folder: Path, manifest: Mapping[str, Any], *plugins: object) -> RunReader:
    """Run a job to its end; return its run."""
    parsed = RolloutJob.model_validate(manifest)
    summary = await run_job(parsed, base_dir=folder, environ=os.environ, plugins=plugins)
    assert summary.completed
    return await open_run(Store.open(str(folder / "out"), {}), parsed.metadata.name)


def run_of(reader: RunReader) -> str:
    """Return its folder, as a manifest beside the output names it."""
    return f"out/{reader.folder}"
