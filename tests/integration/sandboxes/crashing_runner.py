"""A runner that is killed while its command runs.

Arguments: run folder, mode. Prints the handle as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

from agent_runtime.sandboxes.base import Fence, WorkspaceSpec
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.sandbox import SandboxTemplate


async def main(run_dir: str, mode: str) -> None:
    template = SandboxTemplate.model_validate({"workspaces": {"mode": mode}, "idleSeconds": 60})
    provider = LocalProvider(Path(run_dir), template, places=4)
    await provider.open()
    spec = WorkspaceSpec(group="task-1", working_dir="/workspace", setup=["echo prepared >> setup.log"])
    workspace = await provider.acquire(spec, attempt="0-1", fence=Fence(1, "first"), name="agent")
    print(json.dumps({"handle": dict(workspace.handle), "warnings": list(provider.warnings)}), flush=True)
    await workspace.run("sleep 1.5; echo once >> count; cat count", key="1:slow", deadline_seconds=60)
    print("ended", flush=True)


asyncio.run(main(*sys.argv[1:]))
