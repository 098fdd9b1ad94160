"""An unmodified program in a sandbox pod is the agent; its model is the stand-in for vLLM, in a pod. The image of that:
`hack/images/build --tag test vllm-standin`, then `hack/cluster/load-image`."""

import json
import random
from collections.abc import Callable, Sequence

import pytest

from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object
from tests.support.programs_in_pods import (
    MODEL,
    PORT,
    assert_nothing_was_lost_or_doubled,
    kill_while_they_talk,
    model_pod,
    start_model,
)
from tests.support.talking_program import TALKING

TURNS = 8
KILLS = 3

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
    address = start_model(cluster, namespace, model_pod(namespace))
    api = cluster.get("service", "kubernetes", "default")
    assert api is not None
    job = new_job(a_job(mode, address, [(address, PORT), (api["spec"]["clusterIP"], 443)])).apply()
    chance = random.Random(0)
    kill_while_they_talk(cluster, job, [chance.random() for _ in range(KILLS)])
    job.wait("Succeeded", 300)
    assert_nothing_was_lost_or_doubled(cluster, namespace, job, mode, TURNS)
