"""Builds a Dockerfile over this machine's root. Arguments: a folder, the lines after FROM. Prints `built`, or why not."""

import asyncio
import sys
from base64 import b64encode
from pathlib import Path

from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.files import ContextFile, Dockerfile
from rollout_api.sandbox import SandboxTemplate
from tests.support.dockerfile_trees import Builds


async def main(folder: Path, lines: list[str]) -> None:
    template = SandboxTemplate.model_validate({"workspaces": {"mode": "Overlay"}, "idleSeconds": 60})
    provider = LocalProvider(folder / "run", template, places=2)
    await provider.open()
    try:
        builds = Builds(provider, folder / "out", {"this-machine": "agent-rollouts-quickstart"})
        file = ContextFile(path="a.txt", content_base64=b64encode(b"a").decode())
        await builds.build(Dockerfile(text="\n".join(("FROM this-machine", *lines, "")), context=[file]))
        print("built")
    except SandboxFailure as failure:
        print(failure)
    finally:
        await provider.close()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
