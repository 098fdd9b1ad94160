"""Claude, or whatever speaks Anthropic's Messages, answers.

The model is named by ANTHROPIC_MODEL and ANTHROPIC_API_KEY, and ANTHROPIC_BASE_URL where it is not Anthropic's own.
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
            "metadata": {"name": "claude-client"},
            "spec": {
                "mode": "Eval",
                "model": model_from_environment(os.environ),
                "sampling": {"maxTokens": 1024},
                "agent": {"tools": ["calculator"], "maxTurns": 5},
                "tasks": {"inline": [{"name": "product", "prompt": "What is 17 * 23?"}]},
                "output": {"uri": "out"},
            },
        }
    )
    async for group in Client().run(job):
        print(f"{group.task}: {group.results[0].message}")


asyncio.run(main())
