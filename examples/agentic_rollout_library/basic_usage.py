"""An agent with a shell, an editor and a search tool makes a file; a command says whether it did.

The model is named by OPENAI_MODEL, OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import asyncio
import os

from agent_runtime.models.from_environment import model_from_environment
from rollout_api.base import API_VERSION
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client


async def main() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "basic-usage"},
            "spec": {
                "mode": "Eval",
                "model": model_from_environment(os.environ),
                "agent": {"type": "Coding", "tools": ["bash", "editor", "search", "finish"], "maxTurns": 10},
                "tasks": {
                    "inline": [
                        {
                            "name": "hello",
                            "prompt": "Create a hello.py in the current directory that prints hello.",
                            "verifier": {"commands": ['test "$(python3 hello.py)" = hello']},
                        }
                    ]
                },
                "output": {"uri": "out"},
            },
        }
    )
    async for group in Client().run(job):
        for result in group.results:
            print(f"{group.task}: {result.stop_reason}, reward {result.reward}")


asyncio.run(main())
