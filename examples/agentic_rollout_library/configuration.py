"""A job from a file, with the model of the environment and a few fields changed in Python."""

import asyncio
import os
import sys
from pathlib import Path

from agent_runtime.models.from_environment import model_from_environment
from rollout_api.manifest import load_manifest
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client


async def main(max_turns: int) -> None:
    job = load_manifest(Path(__file__).with_name("react_math.yaml"))
    fields = job.wire()
    fields["spec"]["model"] = model_from_environment(os.environ).wire()
    fields["spec"]["agent"]["maxTurns"] = max_turns
    client, changed = Client(), RolloutJob.model_validate(fields)
    async for group in client.run(changed):
        print(f"{group.task}: {group.results[0].message}")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
