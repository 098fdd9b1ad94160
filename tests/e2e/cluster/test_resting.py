"""Workspaces of sandbox pods that rest while their model thinks."""

from collections.abc import Callable

import pytest

from tests.support.cluster import Job, Object, small_job


@pytest.mark.full  # waits for longer than a workspace takes to rest
def test_a_workspace_in_a_pod_goes_on_after_a_rest(new_job: Callable[[Object], Job]) -> None:
    turns = [
        {"toolCalls": [{"name": "bash", "arguments": {"command": "echo kept > file; echo $$ > first"}}]},
        {"toolCalls": [{"name": "bash", "arguments": {"command": "echo $$ > second"}}], "delaySeconds": 75},
        {"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]
    manifest = small_job("resting", agent={"tools": ["bash", "finish"]}, groupSize=2)
    task = manifest["spec"]["tasks"]["inline"][0]
    del task["solution"]
    # Process ids start again after a rest; without one, they grow.
    rested = "test $(cat second) -le $(cat first)"
    task["verifier"] = {"mode": "Shared", "commands": ["grep -qx kept file", rested]}
    manifest["spec"]["model"] = {"scripted": {"tasks": [{"task": task["name"], "members": [{"turns": turns}]}]}}
    manifest["spec"]["mode"] = "Eval"
    manifest["spec"]["sandbox"]["workspaces"] = {"mode": "Overlay", "perSandbox": 2}
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    assert [(result["reward"], result["attempt"]) for result in job.results()] == [(1.0, 0)] * 2
