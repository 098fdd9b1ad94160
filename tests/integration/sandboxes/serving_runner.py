"""A runner that serves an agent in a workspace, and asks to be killed at critical moments.

Arguments: run folder, mode, epoch. The first one creates the workspace and starts the agent; the later ones take over.
It prints what it serves, `kill me` before it would begin to answer turn 1 (epoch 1) and in the middle of the answer to
turn 2 (epoch 2), and at the end how the agent ended, as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web

from agent_runtime.sandboxes.base import Fence, WorkspaceSpec
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.sandbox import SandboxTemplate


async def main(run_dir: str, mode: str, epoch: int) -> None:
    folder = Path(run_dir)
    template = SandboxTemplate.model_validate({"workspaces": {"mode": mode}, "idleSeconds": 60})
    provider = LocalProvider(folder / "run", template, places=2)
    await provider.open()
    spec = WorkspaceSpec(group="task-1", working_dir="/workspace")
    fence = Fence(epoch, f"runner-{epoch}")
    handle = folder / "handle"
    if epoch == 1:
        workspace = await provider.acquire(spec, attempt="0-1", fence=fence, name="agent")
        handle.write_text(json.dumps(dict(workspace.handle)))
    else:
        workspace = await provider.reattach(json.loads(handle.read_text()), spec=spec, fence=fence)

    seen = asyncio.Event()
    """The agent has the beginning of an answer, and says so."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/seen":
            seen.set()
            return web.Response()
        turn = json.loads(await request.read())["turn"]
        print(f"{epoch} serves {turn}", flush=True)
        if epoch == turn == 1:
            print("kill me", flush=True)
            await asyncio.sleep(60)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"said": ')
        if epoch == turn == 2:
            await seen.wait()
            print("kill me", flush=True)
            await asyncio.sleep(60)
        await response.write(json.dumps(f"by {epoch}").encode() + b"}")
        await response.write_eof()
        return response

    async with workspace.serve_model(web.Server(answer)) as url:
        command = ["python3", "-c", (folder / "agent.py").read_text(), url]
        result = await workspace.run(command, key="1:agent", deadline_seconds=60)
    print(
        json.dumps({"exitCode": result.exit_code, "stdout": result.stdout.decode(), "stderr": result.stderr.decode()})
    )
    await provider.close()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
