"""A runner whose workspace's program calls a model, and which asks to be killed at critical moments.

Arguments: folder, mode, epoch. The first one creates the workspace and starts the program; the later ones take over. It
prints `kill me` while the model works on the second question (epoch 1), and in the middle of the answer to the third
one (epoch 2). At the end it prints how the program ended, as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

from agent_runtime.engine.program.program import serve_model
from agent_runtime.proxy.limits import Limits
from agent_runtime.recording.attempt_folder import AttemptFolder
from agent_runtime.recording.epoch_log import EpochLog
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, WorkspaceSpec
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.model import Sampling
from rollout_api.sandbox import SandboxTemplate
from tests.support.speller import Speller


async def ask_to_be_killed() -> None:
    print("kill me", flush=True)
    await asyncio.sleep(60)


async def main(run_dir: str, mode: str, epoch: int) -> None:
    folder = Path(run_dir)
    log = await EpochLog.claim(
        AttemptFolder.of_rollout(Store.open((folder / "record").as_uri(), {}), 0, 1), "the test's attempt"
    )
    assert log.epoch == epoch
    template = SandboxTemplate.model_validate({"workspaces": {"mode": mode}, "idleSeconds": 60})
    provider = LocalProvider(folder / "run", template, places=2)
    await provider.open()
    spec = WorkspaceSpec(group="task-1", working_dir="/workspace", network={"agent": "None"})
    fence, handle = Fence(epoch, log.holder), folder / "handle"
    if epoch == 1:
        workspace = await provider.acquire(spec, attempt="0-1", fence=fence, name="agent")
        handle.write_text(json.dumps(dict(workspace.handle)))
    else:
        workspace = await provider.reattach(json.loads(handle.read_text()), spec=spec, fence=fence)
    recorded = await log.begin()

    async def before(question: int, letter: int) -> None:
        if (epoch, question, letter) == (1, 2, 0):
            await ask_to_be_killed()
        if (epoch, question, letter) == (2, 3, 10):
            look = 0
            while not (await workspace.run(["test", "-e", "begun-3"], key=f"2:look-{look}", deadline_seconds=60)).ok:
                look += 1
            await ask_to_be_killed()

    async with serve_model(
        workspace, Speller(f"runner {epoch}", before), log, recorded,
        session="rollout-0-1", task="spelling", member=0, seed=1, sampling=Sampling(), limits=Limits(turns=20),
    ) as model:  # fmt: skip
        command = ["python3", "-c", (folder / "agent.py").read_text()]
        result = await workspace.run(command, key="1:agent", deadline_seconds=60, env=model.environment())
    print(
        json.dumps({"exitCode": result.exit_code, "stdout": result.stdout.decode(), "stderr": result.stderr.decode()})
    )
    await provider.close()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
