"""An unmodified program in a sandbox pod is the agent; its model is the stand-in for vLLM, in a pod. The image of that:
`hack/images/build --tag test vllm-standin`, then `hack/cluster/load-image`."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object, eventually
from tests.support.runner_pods import kill_engine, live_runner
from tests.support.talking_program import TALKING, exported, one_conversation

STANDIN_IMAGE = "agent-rollouts-vllm-standin:test"
MODEL = "model"
PORT = 8000
TURNS = 8
KILLS = 3
TAKEOVER = 6
"""Objects that a takeover of two attempts writes, before anything new is said."""

# Tries to reach what only its runner may, once all is answered.
REACHES = """
import socket
for host, port in json.load(open("targets.json")):
    try:
        socket.create_connection((host, port), 3).close()
    except OSError:
        continue
    print(host, port, file=open("reached.txt", "a"))
"""

# Reads what the stand-in says of itself.
SERVED = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/_standin/served').read().decode())"


def model_pod(namespace: str) -> Object:
    """A pod in which the stand-in answers, some seconds an answer."""
    container = {
        "name": "engine",
        "image": STANDIN_IMAGE,
        "args": [MODEL, "--port", str(PORT)],
        "env": [{"name": "STANDIN_ARGS", "value": "--tokens-per-second 20"}],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": MODEL, "namespace": namespace},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }


def served(cluster: Cluster, namespace: str, session: str) -> Sequence[Any]:
    """What the stand-in did for a session."""
    told = json.loads(cluster.kubectl("exec", MODEL, "-n", namespace, "--", "python3", "-c", SERVED).stdout)
    return [SimpleNamespace(**request) for request in told if request["session"] == session]


def samples(job: Job, index: int) -> Sequence[Branch]:
    """What a trainer gets of a rollout."""
    store = Store.open(job.manifest["spec"]["output"]["uri"], job.cluster.environ, patience_seconds=30)

    async def read() -> Sequence[Branch]:
        return await (await open_run(store, f"{job.name}-{job.uid[:8]}")).tokens(index)

    return asyncio.run(read())


def a_job(mode: str, model: str, targets: Sequence[tuple[str, int]]) -> Object:
    checks = [
        f'test "$(cat answers.txt | xargs)" = "{" ".join(map(str, range(TURNS)))}"',
        f'test ! -e broken.txt || test "$(wc -l < broken.txt)" -le {KILLS}',
        "cat reached.txt; test ! -e reached.txt",
    ]
    task = {
        "name": "talk",
        "prompt": "What is there to say?",
        "files": [
            {"path": "agent.py", "content": TALKING + REACHES},
            {"path": "targets.json", "content": json.dumps(targets)},
        ],
        "verifier": {"commands": checks},
    }
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": f"program-{mode.lower()}"},
        "spec": {
            "mode": "Train",
            "groupSize": 2,
            "tasks": {"inline": [task]},
            "model": {"endpoint": {"baseURL": f"http://{model}:{PORT}/v1", "name": MODEL}},
            "sampling": {"maxTokens": 40},
            "agent": {
                "type": "Command",
                "command": ["python3", "/tmp/agent/agent.py", "{promptFile}", str(TURNS)],
                "install": ["mkdir -p /tmp/agent && mv agent.py /tmp/agent/"],
            },
            "sandbox": {"image": QUICKSTART_IMAGE, "workspaces": {"mode": mode, "perSandbox": 2}},
            "attempts": {"limit": 1},
        },
    }


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
def test_a_program_whose_runner_is_killed_goes_on_and_every_token_is_recorded(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], mode: str
) -> None:
    cluster.apply(model_pod(namespace))
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{MODEL}", "-n", namespace, "--timeout=120s")
    pod, api = cluster.get("pod", MODEL, namespace), cluster.get("service", "kubernetes", "default")
    assert pod is not None
    assert api is not None
    address = pod["status"]["podIP"]
    job = new_job(a_job(mode, address, [(address, PORT), (api["spec"]["clusterIP"], 443)])).apply()
    chance = random.Random(0)
    for _ in range(KILLS):
        before = len(job.keys("attempts"))
        eventually(lambda seen=before: len(job.keys("attempts")) > seen + TAKEOVER or None, 90, job.describe)
        assert job.sealed() == 0, "the programs were done before the last kill; let them ask more"
        time.sleep(chance.random())  # somewhere in an answer
        kill_engine(cluster, live_runner(job))
    job.wait("Succeeded", 300)
    for result in job.results():
        assert (result["outcome"], result["stopReason"], result["reward"]) == ("Completed", "Finished", 1), result
        assert (result["attempt"], result["failedAttempts"], result["turns"]) == (0, [], TURNS), result
        assert (result["sandbox"]["mode"], result["tokenCapture"]) == (mode, "Tokens")
        (branch,) = samples(job, result["index"])
        assert exported(branch) == one_conversation(served(cluster, namespace, f"rollout-{result['index']}-0"))
