"""A rollout, read step by step, written as JSON, and read again."""

import asyncio
import json
import os
from pathlib import Path

from agent_runtime.models.from_environment import model_from_environment
from rollout_api.base import API_VERSION
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client, Trajectory


async def main() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "read-trajectory"},
            "spec": {
                "mode": "Eval",
                "model": model_from_environment(os.environ),
                "agent": {"tools": ["bash", "finish"], "maxTurns": 5},
                "tasks": {
                    "inline": [
                        {
                            "name": "count",
                            "prompt": "Write the number of lines of log.txt into n.txt.",
                            "files": [{"path": "log.txt", "content": "a\nb\nc\n"}],
                            "verifier": {"commands": ['test "$(cat n.txt)" = 3']},
                        }
                    ]
                },
                "output": {"uri": "out"},
            },
        }
    )
    client = Client()
    async for _ in client.run(job):
        pass
    async for trajectory in client.trajectories(job):
        for step in trajectory.steps:
            print(f"{step.turn} {step.step_type}: {step.tool_name or step.content.splitlines()[0]}")
        print("completed:", trajectory.is_completed)
        print("final response:", trajectory.get_final_response())
        print("total reward:", trajectory.get_total_reward())
        print("commands:", [call.tool_args for call in trajectory.get_tool_calls() if call.tool_name == "bash"])
        Path("trajectory.json").write_text(trajectory.to_json(indent=2))
        print("read again:", Trajectory.from_dict(json.loads(Path("trajectory.json").read_text())) == trajectory)


asyncio.run(main())
