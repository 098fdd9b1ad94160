"""A ReAct agent, for models without native tool calls, works something out with the calculator."""

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
            "metadata": {"name": "react-calculator"},
            "spec": {
                "mode": "Eval",
                "model": model_from_environment(os.environ),
                "sampling": {"temperature": 0.7, "maxTokens": 512, "stop": ["\nObservation:"]},
                "agent": {"type": "ReAct", "tools": ["calculator"], "maxTurns": 5},
                "tasks": {"inline": [{"name": "factorial", "prompt": "What is the factorial of 5?"}]},
                "output": {"uri": "out"},
            },
        }
    )
    client = Client()
    async for _ in client.run(job):
        pass
    async for trajectory in client.trajectories(job):
        for call in trajectory.get_tool_calls():
            print(f"{call.tool_name}({call.tool_args})")
        print(trajectory.get_final_response())


asyncio.run(main())
