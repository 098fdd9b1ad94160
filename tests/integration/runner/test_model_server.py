"""A runner's process whose model is a ModelServer: it waits for the server, acknowledges updates, and reports its work."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.runner.supervisor import Exit
from tests.integration.runner.conftest import REPOSITORY, Pods, StartPods, wait_for

TURNS = 12


@pytest.fixture
def server() -> Iterator[str]:
    """URL of a stand-in for vLLM."""
    command = [sys.executable, "-m", "tests.support.vllm_server", "--port", "0", "--print-url", "--model", "policy"]
    process = subprocess.Popen(
        [*command, "--tokens-per-second", "20", "--scheduling-policy", "priority"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


def a_job() -> dict[str, Any]:
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "served"},
        "spec": {
            "groupSize": 2,
            "tasks": {"inline": [{"name": "talk", "prompt": "Talk."}]},
            "model": {"serverRef": "policy"},
            "sampling": {"maxTokens": 10, "extra": {"ignore_eos": True}},
            "agent": {"type": "tests.integration.served.talker:Talker", "tools": [], "maxTurns": TURNS},
            "output": {"uri": "out"},
        },
    }


def post(url: str, body: Any = None) -> None:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


def notify(pods: Pods, server: str, *, ready: bool = True, **policy: Any) -> None:
    entry = {"name": "policy-0", "url": server, "uid": "u", "ready": ready, "state": "Ready"}
    pods.api.set_model_server({"servers": [entry], "policy": policy})


def test_update_is_acknowledged_in_the_report_and_recorded_in_the_results(
    pods: StartPods, server: str, tmp_path: Path
) -> None:
    one = pods("served", a_job())
    notify(one, server, ready=False)
    runner = one.start()
    wait_for(lambda: "waiting for a server of policy" in runner.log.read_text())
    notify(one, server)
    wait_for(lambda: one.api.runners.get(0, {}).get("running"))
    assert one.api.runners[0]["policyUpdate"] == 0

    notify(one, server, gate="Shut", update=1)
    post(f"{server}/pause?mode=keep")
    notify(one, server, ready=False, gate="Shut", update=1, paused=True)
    wait_for(lambda: one.api.runners[0]["policyUpdate"] == 1)
    weights = tmp_path / "weights.json"
    weights.write_text(json.dumps({"version": 1}))
    post(f"{server}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
    post(f"{server}/resume")
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{runner.metrics_port}/metrics", timeout=30).read().decode()
    assert "rollout_model_calls_in_flight" in metrics
    notify(one, server, gate="Open", update=1, current=1)

    assert runner.end() == Exit.REPORTED, runner.log.read_text()[-3000:]
    (path,) = one.folder.glob("out/*/results.jsonl")
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result["turns"] for result in results] == [TURNS, TURNS]
    assert [result["policyVersions"] for result in results] == [["0", "1"], ["0", "1"]]
    assert one.api.runners[0]["policyUpdate"] == 1
