"""Programs in sandbox pods whose runners are killed. Their model is the stand-in for vLLM in a separate pod."""

import asyncio
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.cluster import job_tag
from tests.support.cluster import Cluster, Job, Object, eventually
from tests.support.runner_pods import kill_engine, live_runner
from tests.support.talking_program import exported, one_conversation

STANDIN_IMAGE = "agent-rollouts-vllm-standin:test"
MODEL = "model"
PORT = 8000
TAKEOVER = 6
"""Objects that a takeover of two attempts writes before anything else."""

# Reads what the stand-in says of itself.
_SERVED = (
    "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/_standin/served').read().decode())"
)


def model_pod(namespace: str) -> Object:
    """Return a pod with the stand-in, whose answers take some seconds."""
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


def start_model(cluster: Cluster, namespace: str, *objects: Object) -> str:
    """Apply objects with the model's pod among them; return the model's address."""
    cluster.apply(*objects)
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{MODEL}", "-n", namespace, "--timeout=120s")
    pod = cluster.get("pod", MODEL, namespace)
    assert pod is not None
    address: str = pod["status"]["podIP"]
    return address


def _wait_for_more_than(job: Job, count: int) -> None:
    eventually(lambda: len(job.keys("attempts")) > count or None, 300, job.describe)


def kill_while_they_talk(cluster: Cluster, job: Job, waits: Sequence[float]) -> None:
    """Kill the runner's engine this many seconds after something was recorded, in the middle of an answer; once for
    each wait.
    """
    for seconds in waits:
        _wait_for_more_than(job, len(job.keys("attempts")) + TAKEOVER)
        assert job.sealed() == 0, "the programs were done before the last kill; let them ask more"
        time.sleep(seconds)
        kill_engine(cluster, live_runner(job))


def assert_nothing_was_lost_or_doubled(cluster: Cluster, namespace: str, job: Job, mode: str, turns: int) -> None:
    """Check that each rollout passed at its first attempt, and that its training data has the tokens that the model
    read and sampled.
    """
    for result in job.results():
        assert (result["outcome"], result["stopReason"], result["reward"]) == ("Completed", "Finished", 1), result
        assert (result["attempt"], result["failedAttempts"], result["turns"]) == (0, [], turns), result
        assert (result["sandbox"]["mode"], result["tokenCapture"]) == (mode, "Tokens")
        (branch,) = samples(job, result["index"])
        assert exported(branch) == one_conversation(
            served(cluster, namespace, f"{job_tag(job.uid)}rollout-{result['index']}-0")
        )


def served(cluster: Cluster, namespace: str, session: str) -> Sequence[Any]:
    """Return the stand-in's record of a session."""
    told = json.loads(cluster.kubectl("exec", MODEL, "-n", namespace, "--", "python3", "-c", _SERVED).stdout)
    return [SimpleNamespace(**request) for request in told if request["session"] == session]


def samples(job: Job, index: int) -> Sequence[Branch]:
    """Return a rollout's training data."""
    store = Store.open(job.manifest["spec"]["output"]["uri"], job.cluster.environ, patience_seconds=30)

    async def read() -> Sequence[Branch]:
        return await (await open_run(store, f"{job.name}-{job.uid[:8]}")).tokens(index)

    return asyncio.run(read())
