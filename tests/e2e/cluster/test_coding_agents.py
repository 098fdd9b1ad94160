"""The coding agents of npm, unmodified, fix a bug in sandbox pods while their runner is killed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent_runtime.agents.catalog import CATALOG
from rollout_api.cluster import job_tag
from tests.support import coding_agents
from tests.support.cluster import Cluster, Job, Object
from tests.support.coding_agents import manifest, turns
from tests.support.images import OnNodes
from tests.support.programs_in_pods import PORT, kill_while_they_talk, model_pod, samples, served, start_model
from tests.support.talking_program import check_tokens

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

AGENTS = [name for name, entry in CATALOG.items() if entry.package.registry == "npm"]
# 30 tokens a second, so that a kill hits an answer.
SERVE = f"""
import asyncio, sys
from tests.support.coding_agents import answer
from tests.support.vllm_server import VllmStandIn

def script(prompt):
    return answer(sys.argv[1], prompt) if prompt.session else None

async def serve():
    async with VllmStandIn(script=script, max_model_len=400_000, tokens_per_second=30, host="0.0.0.0", port={PORT}):
        await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.fixture(scope="module")
def image(on_nodes: OnNodes) -> str:
    return on_nodes("coding-agents")


def scripted_model(namespace: str, agent: str) -> list[Object]:
    """Return a pod with the stand-in that answers as an agent needs to fix the bug, and the script that it needs."""
    name = Path(coding_agents.__file__).name
    script: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script", "namespace": namespace}}
    script["data"] = {name: Path(coding_agents.__file__).read_text()}
    pod = model_pod(namespace)
    container = pod["spec"]["containers"][0]
    container |= {"command": ["python3", "-c", SERVE, agent], "args": []}
    container["volumeMounts"] = [{"name": "script", "mountPath": f"/app/tests/support/{name}", "subPath": name}]
    pod["spec"]["volumes"] = [{"name": "script", "configMap": {"name": "script"}}]
    return [script, pod]


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_in_a_pod_fixes_a_bug_and_every_token_is_recorded_once_when_its_runner_is_killed(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], image: str, agent: str
) -> None:
    address = start_model(cluster, namespace, *scripted_model(namespace, agent))
    sandbox = {"image": image, "workspaces": {"mode": "Overlay"}}
    job = new_job(manifest(agent, f"http://{address}:{PORT}", Path("/"), sandbox=sandbox)).apply()
    kill_while_they_talk(cluster, job, [0.5])
    job.wait("Succeeded")
    (result,) = job.results()
    end = result["outcome"], result["stopReason"], result["reward"], result["attempt"]
    assert end == ("Completed", "Finished", 1, 0), result
    assert result["turns"] >= len(turns(agent))
    check_tokens(served(cluster, namespace, f"{job_tag(job.uid)}rollout-0-0"), samples(job, 0))
