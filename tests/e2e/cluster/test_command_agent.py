"""Unmodified programs in a sandbox pod are the agents. Their model is the stand-in for vLLM in another pod."""

import random
from collections.abc import Callable

import pytest

from tests.support.cluster import Cluster, Job, Object
from tests.support.full import MODES_ONCE
from tests.support.programs_in_pods import (
    MODEL,
    PORT,
    assert_nothing_was_lost_or_doubled,
    kill_while_they_talk,
    model_pod,
    start_model,
)
from tests.support.talking_program import ASKING, TALKING

pytestmark = [pytest.mark.long, pytest.mark.full]

TURNS = 8
KILLS = 3


def a_task(name: str, program: str) -> Object:
    checks = [
        f'test "$(cat answers.txt | xargs)" = "{" ".join(map(str, range(TURNS)))}"',
        f'test ! -e broken.txt || test "$(wc -l < broken.txt)" -le {KILLS}',
    ]
    files = [{"path": "agent.py", "content": program}]
    return {"name": name, "prompt": "What is there to say?", "files": files, "verifier": {"commands": checks}}


def a_job(mode: str, model: str, image: str) -> Object:
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": f"program-{mode.lower()}"},
        "spec": {
            "mode": "Train",
            "tasks": {"inline": [a_task("streamed", TALKING), a_task("openai-package", ASKING)]},
            "model": {"endpoint": {"baseURL": f"http://{model}:{PORT}/v1", "name": MODEL}},
            "sampling": {"maxTokens": 40},
            "agent": {
                "type": "Command",
                "command": ["python3", "/tmp/agent/agent.py", "{promptFile}", str(TURNS)],
                "install": ["mkdir -p /tmp/agent && mv agent.py /tmp/agent/"],
            },
            "sandbox": {"image": image, "workspaces": {"mode": mode, "perSandbox": 2}},
            "attempts": {"limit": 1},
        },
    }


@pytest.mark.parametrize("mode", MODES_ONCE)
def test_programs_of_a_killed_runner_continue_and_every_token_is_recorded(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], mini_swe_agent_image: str, mode: str
) -> None:
    address = start_model(cluster, namespace, model_pod(namespace))
    job = new_job(a_job(mode, address, mini_swe_agent_image)).apply()
    chance = random.Random(0)
    kill_while_they_talk(cluster, job, [chance.random() for _ in range(KILLS)])
    job.wait("Succeeded")
    assert_nothing_was_lost_or_doubled(cluster, namespace, job, mode, TURNS)
