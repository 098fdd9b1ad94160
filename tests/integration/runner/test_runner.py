"""A runner pod's process, real except for pods and API server: killed, stopped, cut off, and never wrong."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.store import Store
from agent_runtime.runner.supervisor import Exit
from tests.integration.runner.conftest import Pods, Runner, StartPods, wait_for
from tests.support.fingerprint import fingerprint
from tests.support.full import first_seed
from tests.support.quickstart import REWARDS
from tests.support.resumed import resumed_rollouts, rollouts_at_work, segments_in

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "job.yaml"
KILLS = 10


def quickstart() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    return job


def counting(groups: int = 4, turns: int = 4, delay: float = 0.05, **spec: Any) -> dict[str, Any]:
    """Return a job in which each turn adds a line and counts all of them, so that a lost or repeated call changes the
    output.
    """
    script: list[dict[str, Any]] = [
        {
            "toolCalls": [{"name": "bash", "arguments": {"command": f"echo {turn} >> log; sleep 0.05; wc -l < log"}}],
            "delaySeconds": delay,
        }
        for turn in range(turns)
    ]
    script.append({"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]})
    tasks = [
        {"name": f"count-{n}", "prompt": "Count.", "verifier": {"commands": [f'test "$(wc -l < log)" -eq {turns}']}}
        for n in range(groups)
    ]
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "counting"},
        "spec": {
            "mode": "Eval",
            "groupSize": 2,
            "tasks": {"inline": tasks},
            "model": {"scripted": {"tasks": [{"task": t["name"], "members": [{"turns": script}]} for t in tasks]}},
            "agent": {"tools": ["bash", "finish"]},
            "runners": {"concurrency": 4},
            "output": {"uri": "out"},
            **spec,
        },
    }


def prints(pods: Pods, name: str) -> dict[int, Any]:
    return asyncio.run(fingerprint(Store.open(str(pods.folder / "out"), {}), name))


def results(pods: Pods) -> list[dict[str, Any]]:
    (path,) = pods.folder.glob("out/*/results.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def sealed(pods: Pods) -> int:
    return len(list(pods.folder.glob("out/*/seals/*.json")))


def complete(pods: Pods, index: int = 0) -> Runner:
    runner = pods.start(index)
    assert runner.end() == Exit.REPORTED, runner.log.read_text()[-3000:]
    return runner


@pytest.mark.full
def test_an_engine_killed_again_and_again_gives_the_results_of_an_undisturbed_one(pods: StartPods) -> None:
    job = quickstart()
    name = job["metadata"]["name"]
    calm, killed = pods("calm", job), pods("killed", job)
    complete(calm)
    rng = random.Random(first_seed())
    runner, kills = killed.start(), 0
    rewards = [reward for group in REWARDS.values() for reward in group]
    total = len(rewards)
    store = Store.open(str(killed.folder / "out"), {})
    while kills < KILLS:
        seals = sealed(killed)
        wait_for(lambda lives=kills + 1: runner.starts() >= lives or runner.process.poll() is not None)
        if kills % 4 == 3:
            # Otherwise a slow machine reaches ten kills before its first seal, which correctly fails the pod.
            wait_for(lambda seals=seals: sealed(killed) > seals or runner.process.poll() is not None)
        enough = segments_in(store) + rng.randrange(20)
        wait_for(lambda enough=enough: segments_in(store) >= enough or runner.process.poll() is not None)
        if kills % 2:
            # On a slow machine, rollouts that ran a moment ago may have ended already.
            wait_for(lambda: rollouts_at_work(store) or runner.process.poll() is not None)
        else:
            time.sleep(rng.uniform(0, 0.2))
        if sealed(killed) == total or (engine := runner.engine) is None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
        kills += 1
    assert runner.end() == Exit.REPORTED, runner.log.read_text()[-3000:]
    assert kills >= 3, "it was disturbed"
    assert prints(killed, name) == prints(calm, name)
    assert resumed_rollouts(store, name), "it met rollouts at work"
    for one in (calm, killed):
        assert [r["reward"] for r in results(one)] == rewards
        report = one.api.runners[0]
        assert (report["state"], report["sealed"], report["total"]) == ("Completed", total, total)
        assert report["sealedIndexes"] == f"0-{total - 1}"
        assert report["rewardSum"] == sum(rewards)
    counts = [report["sealed"] for report in killed.api.reports]
    assert counts == sorted(counts), "a restarted engine never reports less than the one before"


def test_evicted_runner_finishes_its_turns_and_the_next_one_continues(pods: StartPods) -> None:
    drained = pods("drained", counting(groups=4, delay=1))  # many times what it takes to notice the first turns
    first = drained.start()
    store = Store.open(str(drained.folder / "out"), {})
    wait_for(lambda: segments_in(store) >= 12)
    first.process.terminate()
    assert first.end() == Exit.DRAINED
    report = drained.api.runners[0]
    assert (report["state"], report["running"]) == ("Draining", 0)
    assert report["sealed"] == sealed(drained) < 8
    complete(drained)
    for result in results(drained):
        assert (result["outcome"], result["reward"], result["attempt"]) == ("Completed", 1.0, 0), (
            "no attempt was used up"
        )
        assert not result.get("failedAttempts")
        assert result["turns"] == 5
    assert (drained.api.runners[0]["state"], drained.api.runners[0]["drains"]) == ("Completed", 1)


def test_new_runner_lets_the_draining_one_finish_its_turns(pods: StartPods) -> None:
    drained = pods("relieved", counting(groups=2, delay=2))
    first = drained.start()
    wait_for(lambda: drained.api.runners.get(0, {}).get("running"))
    first.process.terminate()
    wait_for(lambda: drained.api.runners[0]["state"] == "Draining")
    # As Kubernetes does: a pod that is on its way out counts as gone. The drain lasts until the second one waits for it.
    engine = first.engine
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    second = drained.start()
    wait_for(lambda: "the previous runner is finishing its turns" in second.log.read_text())
    os.kill(engine, signal.SIGCONT)
    assert first.end() == Exit.DRAINED, "had the second one taken over, its model calls would have been thrown away"
    assert second.end() == Exit.REPORTED, second.log.read_text()[-3000:]
    outcomes = {(r["outcome"], r["reward"], r["attempt"], r["turns"]) for r in results(drained)}
    assert outcomes == {("Completed", 1.0, 0, 5)}


def test_deleted_job_ends_its_runner_immediately_and_keeps_sealed_results(pods: StartPods) -> None:
    cancelled = pods("cancelled", counting(groups=20, delay=300.0))
    runner = cancelled.start()
    wait_for(lambda: cancelled.api.runners.get(0, {}).get("running"))
    cancelled.api.job = None
    runner.process.terminate()
    assert runner.end() == Exit.CANCELLED, "had it waited for its turns, it would have drained"
    assert not list(cancelled.folder.glob("out/*/shards/*"))


def test_an_api_server_that_is_away_neither_stops_rollouts_nor_loses_the_verdict(pods: StartPods) -> None:
    away = pods("away", counting(delay=0.2))
    runner = away.start()
    wait_for(lambda: away.api.runners.get(0, {}).get("running"))
    away.api.stop()
    wait_for(lambda: list(away.folder.glob("out/*/results.jsonl")))
    time.sleep(1)
    assert runner.process.poll() is None, "it waits to deliver its verdict"
    away.api.start()
    assert runner.end() == Exit.REPORTED
    assert (away.api.runners[0]["state"], away.api.runners[0]["sealed"]) == ("Completed", 8)
    told = [line["message"] for line in runner.lines() if "refuses the report" in line["message"]]
    assert len(told) == 1, "an outage is told once"


def test_a_runner_of_a_deleted_job_never_reports_to_its_namesake(pods: StartPods) -> None:
    replaced = pods("replaced", counting(groups=1, delay=0.3))
    runner = replaced.start()
    wait_for(lambda: replaced.api.runners.get(0, {}).get("running"))
    assert replaced.api.job is not None
    replaced.api.job["metadata"]["uid"] = "another"
    replaced.api.job["status"] = {}
    assert runner.end() == Exit.CANCELLED
    assert replaced.api.runners == {}


@pytest.mark.full
def test_three_runners_share_the_groups_and_the_last_writes_the_results(pods: StartPods) -> None:
    shared = pods("shared", counting(groups=7, runners={"replicas": 3, "concurrency": 2}))
    runners = [shared.start(index) for index in range(3)]
    exits = [runner.end() for runner in runners]
    assert exits == [Exit.REPORTED] * 3, [runner.log.read_text()[-1000:] for runner in runners]
    assert [result["index"] for result in results(shared)] == list(range(14))
    reports = shared.api.runners
    assert {index: report["total"] for index, report in reports.items()} == {0: 6, 1: 4, 2: 4}
    assert {index: report["sealedIndexes"] for index, report in reports.items()} == {0: "0-5", 1: "0-3", 2: "0-3"}
    assert {report["state"] for report in reports.values()} == {"Completed"}


def test_a_job_that_cannot_run_as_written_is_aborted_with_the_reason(pods: StartPods) -> None:
    wrong = pods("wrong", counting(agent={"type": "Tolcalling"}))
    runner = wrong.start()
    assert runner.end() == Exit.BAD_JOB
    report = wrong.api.runners[0]
    assert report["state"] == "Aborted"
    assert "Tolcalling" in report["message"]
    assert len([line for line in runner.lines() if line["level"] == "error"]) == 1


def test_a_runner_that_cannot_start_does_not_abort_a_job_that_has_worked(pods: StartPods) -> None:
    worked = pods("worked", counting(agent={"type": "Tolcalling"}))
    worked.api.set_report({"index": 0, "sealed": 5, "running": 3, "outcomes": {"Completed": 5}})
    assert worked.start().end() == Exit.BAD_JOB
    report = worked.api.runners[0]
    assert (report["state"], report["sealed"]) == ("Running", 5), "a plugin's server may be away for a moment"
    assert "Tolcalling" in report["message"]


def test_refusing_storage_is_reported_and_hides_no_counted_rollout(pods: StartPods) -> None:
    refused = pods("refused", counting())
    refused.api.set_report({"index": 0, "sealed": 5, "running": 3, "outcomes": {"Completed": 5}})
    (refused.folder / "out").write_text("a file where a folder is needed")
    runner = refused.start()
    assert runner.end() == Exit.STORAGE
    report = refused.api.runners[0]
    assert (report["state"], report["sealed"], report["running"]) == ("Running", 5, 0), "it may be mended: no verdict"
    assert "out" in report["message"]


def test_metrics_and_health_are_served_while_it_runs(pods: StartPods) -> None:
    shown = pods("shown", counting(groups=3, delay=0.5))
    runner = shown.start()

    def fetch(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{runner.metrics_port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    wait_for(lambda: any("resumes" in line or "starts" in line for line in runner.log.read_text().splitlines()))
    wait_for(lambda: 'rollout_rollouts_total{outcome="Completed"} 0.0' not in fetch("/metrics"))
    text = fetch("/metrics")
    assert fetch("/healthz") == "ok\n"
    for name in ("tool_call", "model_call", "storage_request", "workspace_acquire"):
        counts = [line for line in text.splitlines() if line.startswith(f"rollout_{name}_seconds_count")]
        assert sum(float(line.split()[-1]) for line in counts) > 0, name
    assert runner.end() == Exit.REPORTED
    messages = [line["message"] for line in runner.lines()]
    assert sum("is finished" in message for message in messages) == 3


def test_report_with_an_emoji_is_accepted(pods: StartPods) -> None:
    job = counting(groups=1, groupSize=1, attempts={"limit": 1})
    job["spec"]["tasks"]["inline"][0]["setup"] = ["echo \U0001f680; exit 1"]
    started = pods("emoji", job)
    assert started.start().end() == Exit.REPORTED
    (report,) = started.api.runners.values()
    assert (report["state"], report["sealed"]) == ("Completed", 1)
    assert "\U0001f680" in report["message"]
