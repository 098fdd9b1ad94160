"""The jobs that the benchmarks run: small tasks, a tool that does nothing, no grading."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from agent_runtime.tools.base import ToolContext, ToolResult
from benchmarks.instant_model import NAME, TOOL
from rollout_api.base import API_VERSION
from rollout_api.manifest import validate
from rollout_api.rollout_job import RolloutJob

PROMPT = "Call noop until told otherwise."


class Noop:
    """A tool that does nothing and runs in the runner, so that a turn takes only the time that the engine needs."""

    name = TOOL
    description = "Does nothing."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}
    runs_in: ClassVar[Literal["Sandbox", "Runner"]] = "Runner"
    idempotent: ClassVar[bool] = True

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult("ok")


async def say_done(messages: list[dict[str, Any]]) -> str:
    return "done"


def rollout_job(
    output: str,
    *,
    tasks: Mapping[str, Any],
    model: Mapping[str, Any],
    group_size: int = 1,
    concurrency: int = 64,
    **spec: Any,
) -> RolloutJob:
    """Return a job that only needs a model. `spec` adds or replaces fields of its spec."""
    return validate(
        RolloutJob,
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "benchmark"},
            "spec": {
                "mode": "Eval",
                "groupSize": group_size,
                "tasks": dict(tasks),
                "model": dict(model),
                "agent": {"tools": ["benchmarks.jobs:Noop"], "maxTurns": 1000},
                "runners": {"concurrency": concurrency},
                "output": {"uri": output},
                **spec,
            },
        },
    )


def inline_tasks(number: int) -> dict[str, Any]:
    return {"inline": [{"name": f"task-{task:05}", "prompt": PROMPT} for task in range(number)]}


def tasks_in(file: Path, number: int) -> dict[str, Any]:
    """Write so many tasks to a file, and return the tasks of a manifest that reads it."""
    lines = (json.dumps({"name": f"task-{task:06}", "prompt": PROMPT}) + "\n" for task in range(number))
    file.write_text("".join(lines))
    return {"from": {"uri": str(file)}}


def endpoint(base_url: str) -> dict[str, Any]:
    return {"endpoint": {"baseURL": base_url, "name": NAME}}


SAYS_DONE = {"function": "benchmarks.jobs:say_done"}
