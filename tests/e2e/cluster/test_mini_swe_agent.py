"""mini-swe-agent from PyPI works in sandbox pods while its runner is killed."""

import asyncio
import json
from collections.abc import Callable

import pytest

from agent_runtime.export.formats import Format, export
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.support.cluster import Cluster, Job, Object
from tests.support.mini_swe_agent import COMMAND, DONE, ENVIRONMENT, STEPS, TURNS
from tests.support.programs_in_pods import (
    MODEL,
    PORT,
    assert_nothing_was_lost_or_doubled,
    kill_while_they_talk,
    model_pod,
    start_model,
)

pytestmark = [pytest.mark.long, pytest.mark.full]

SLOWLY = "Let me think about this step for a while before I take it, for there is no hurry. " * 2
"""Takes some seconds at the stand-in's 20 tokens a second, so that a kill hits an answer."""


def thinking_model(cluster: Cluster, namespace: str) -> str:
    """Run a pod with a model that counts in steps.txt, one command a turn, and then submits. Returns its address."""
    commands = [*(f"echo {number} >> steps.txt" for number in range(STEPS)), DONE]
    answers = [{"text": SLOWLY, "tool_calls": [{"name": "bash", "arguments": {"command": text}}]} for text in commands]
    script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script", "namespace": namespace}}
    script["data"] = {"script.json": json.dumps({"*": answers})}
    pod = model_pod(namespace)
    container = pod["spec"]["containers"][0]
    flags = "--tokens-per-second 20 --script /script/script.json --enable-auto-tool-choice --tool-call-parser hermes"
    container["env"] = [{"name": "STANDIN_ARGS", "value": flags}]
    container["volumeMounts"] = [{"name": "script", "mountPath": "/script"}]
    pod["spec"]["volumes"] = [{"name": "script", "configMap": {"name": "script"}}]
    return start_model(cluster, namespace, script, pod)


def a_job(mode: str, model: str, image: str) -> Object:
    checks = [f'test "$(cat steps.txt | xargs)" = "{" ".join(map(str, range(STEPS)))}"']
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": f"mini-{mode.lower()}"},
        "spec": {
            "mode": "Train",
            "groupSize": 2,
            "tasks": {"inline": [{"name": "count", "prompt": "Count in steps.txt.", "verifier": {"commands": checks}}]},
            "model": {"endpoint": {"baseURL": f"http://{model}:{PORT}/v1", "name": MODEL}},
            "agent": {"type": "Command", "command": COMMAND, "trajectory": {"path": "mini.traj.json"}},
            "sandbox": {
                "image": image,
                "env": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()],
                "workspaces": {"mode": mode, "perSandbox": 2},
            },
            "attempts": {"limit": 1},
        },
    }


def own_trajectories(job: Job) -> list[Object]:
    """Return the trajectories that the programs wrote, as ATIF."""
    store = Store.open(job.manifest["spec"]["output"]["uri"], job.cluster.environ, patience_seconds=30)

    async def read() -> list[Object]:
        run = await open_run(store, f"{job.name}-{job.uid[:8]}")
        return [json.loads(line) async for line in export(run, Format.PROGRAM_ATIF)]

    return asyncio.run(read())


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
def test_mini_swe_agent_in_pods_continues_when_its_runner_is_killed(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], mini_swe_agent_image: str, mode: str
) -> None:
    job = new_job(a_job(mode, thinking_model(cluster, namespace), mini_swe_agent_image)).apply()
    kill_while_they_talk(cluster, job, [0, 0])
    job.wait("Succeeded")
    assert_nothing_was_lost_or_doubled(cluster, namespace, job, mode, TURNS)
    trajectories = own_trajectories(job)
    assert [trajectory["agent"]["name"] for trajectory in trajectories] == ["mini-swe-agent"] * 2
    for trajectory in trajectories:
        calls = [call for step in trajectory["steps"] for call in step.get("tool_calls", [])]
        assert [call["arguments"]["command"] for call in calls][-1] == DONE
        assert len(calls) == TURNS
