"""Many prompts at once, at most four under way; what fails, fails alone, and is told apart from a bad answer."""

import asyncio
from typing import Any

from agent_runtime.models.base import ModelError
from rollout_api.base import API_VERSION
from rollout_api.records import Outcome
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client

at_work = most_at_work = 0


async def generate(messages: list[dict[str, Any]], task: str, **kw: Any) -> str:
    """Squares the number in the prompt. The server of one prompt is down."""
    global at_work, most_at_work
    at_work += 1
    most_at_work = max(most_at_work, at_work)
    await asyncio.sleep(0.2)
    at_work -= 1
    if task == "square-5":
        raise ModelError("Unreachable", "the server is down")
    return str(int(messages[-1]["content"].split()[-1]) ** 2)


async def main() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "batch"},
            "spec": {
                "mode": "Eval",
                "model": {"function": "__main__:generate"},
                "agent": {"tools": []},
                "runners": {"concurrency": 4},
                "attempts": {"limit": 1},
                "tasks": {"stream": {}},
                "output": {"uri": "out"},
            },
        }
    )
    prompts = [{"name": f"square-{number}", "prompt": f"Square of {number}"} for number in range(12)]
    async for group in Client().run(job, tasks=prompts):
        for result in group.results:
            answered = result.outcome is Outcome.COMPLETED
            print(f"{group.task}: {result.message}" if answered else f"{group.task}: {result.outcome}, {result.reason}")
    print("at most", most_at_work, "at once")


asyncio.run(main())
