"""Tasks with Dockerfiles, and with stored setups, in sandbox pods of their base image."""

import json
from collections.abc import Callable

import pytest

from tests.support.cluster import QUICKSTART_IMAGE, Job, Object, small_job


@pytest.mark.full
def test_tasks_with_dockerfiles_share_the_pods_of_their_base(new_job: Callable[[Object], Job]) -> None:
    tasks: list[Object] = [
        {
            "name": f"t{number}",
            "prompt": "Do nothing.",
            "dockerfile": {
                "text": "FROM python:3.12\nRUN sleep 1; date +%N > /common\nCOPY own /own/\nUSER 1000\n",
                "context": [{"path": "own", "content": f"t{number}"}],
            },
            "solution": ["true"],
            "verifier": {"commands": [f"grep -qx t{number} /own/own && test -s /common"]},
        }
        for number in range(4)
    ]
    manifest = small_job("dockerfiles", agent={"type": "Oracle"}, groupSize=2)
    manifest["spec"]["tasks"] = {"inline": tasks, "dockerfiles": {"bases": {"python:3.12": QUICKSTART_IMAGE}}}
    manifest["spec"].pop("model", None)
    manifest["spec"]["sandbox"] = {"workspaces": {"mode": "Overlay", "perSandbox": 4}}
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    results = job.results()
    assert [result["reward"] for result in results] == [1.0] * 8
    assert not [result for result in results if result["failedAttempts"]]


@pytest.mark.full
def test_second_job_starts_from_the_stored_setup_in_other_pods(new_job: Callable[[Object], Job]) -> None:
    made: list[set[str]] = []
    for number in range(2):
        tasks: list[Object] = [
            {
                "name": f"t{task}",
                "prompt": f"Do nothing {task}.",
                "setup": ["cat /proc/sys/kernel/random/uuid > made"],
                "solution": ["true"],
                "verifier": {"commands": ["cat made; test -s made"]},
            }
            for task in range(3)
        ]
        manifest = small_job(f"stored-setup-{number}", agent={"type": "Oracle"}, groupSize=2)
        manifest["spec"]["tasks"] = {"inline": tasks}
        manifest["spec"].pop("model", None)
        manifest["spec"]["sandbox"] |= {"storeSetup": True, "workspaces": {"mode": "Overlay", "perSandbox": 4}}
        job = new_job(manifest).apply()
        job.wait("Succeeded")
        results = job.results()
        assert [result["reward"] for result in results] == [1.0] * 6
        assert not [result for result in results if result["failedAttempts"]]
        seals = [json.loads(job.read(key)) for key in job.keys("seals")]
        made.append({seal["verdict"]["commands"][0]["output"] for seal in seals})
    assert made[0] == made[1]
    assert len(made[0]) == 1
