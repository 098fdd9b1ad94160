"""An open job: a trainer submits groups step by step, and the last step uses the pods of the first one."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollout_api.tasks import Task
from rolloutctl.job_stream import JobStream
from tests.support.cluster import Cluster, Job, Object, eventually, small_job

STEPS, GROUPS, MEMBERS = 5, 2, 2


@pytest.fixture
def open_job(new_job: Callable[[Object], Job]) -> Job:
    """An open job whose runner is up."""
    manifest = small_job("open", groupSize=MEMBERS)
    manifest["spec"]["tasks"] = {"stream": {}}
    manifest["spec"]["sandbox"]["workspaces"] = {"mode": "Overlay", "perSandbox": 4}
    job = new_job(manifest).apply()
    job.wait("Ready")
    eventually(lambda: job.keys("") or None, 60, job.describe)
    return job


def tasks_of(step: int) -> list[Object]:
    task = {"prompt": "p", "solution": ["touch solved"], "verifier": {"commands": ["test -e solved"]}}
    return [{"name": f"step-{step}-{number}", **task} for number in range(GROUPS)]


def uids(pods: Sequence[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


async def train(job: Job) -> list[set[str]]:
    """Act as a trainer: submit a step's groups, wait for their results, and continue. Returns the sandbox pods after
    each step.
    """
    stream = await JobStream.open(job.status["resultURI"])
    groups = stream.groups()
    sandboxes = []
    for step in range(STEPS):
        for task in tasks_of(step):
            await stream.submit(Task.model_validate(task), label=f"step-{step}")
        for _ in range(GROUPS):
            group = await anext(groups)
            assert (group.label, [result.reward for result in group.results]) == (f"step-{step}", [1, 1])
        sandboxes.append(uids(job.pods("sandbox")))
    assert await stream.close() == STEPS * GROUPS
    assert [group async for group in groups] == []
    return sandboxes


def test_an_open_job_that_is_fed_for_five_steps_keeps_its_pods(open_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in open_job.cluster.environ.items():
        monkeypatch.setenv(name, value)
    runners = uids(open_job.pods("runner"))
    sandboxes = asyncio.run(train(open_job))
    open_job.wait("Succeeded")
    assert sandboxes[0]
    assert sandboxes == [sandboxes[0]] * STEPS
    assert uids(open_job.pods("runner")) == runners
    assert [result["index"] for result in open_job.results()] == list(range(STEPS * GROUPS * MEMBERS))
    assert open_job.status["total"] == STEPS * GROUPS * MEMBERS


@pytest.mark.full
def test_the_command_line_feeds_follows_and_closes_an_open_job(cluster: Cluster, open_job: Job, tmp_path: Path) -> None:
    uri = open_job.status["resultURI"]
    lines = "".join(json.dumps(task) + "\n" for task in tasks_of(0))
    (tmp_path / "tasks.jsonl").write_text(lines)
    submitted = cluster.rolloutctl("stream", "submit", uri, str(tmp_path / "tasks.jsonl"), "--label", "step-0")
    assert submitted.returncode == 0, submitted.stderr
    more = cluster.rolloutctl("stream", "submit", uri, "-", "-o", "json", text=lines)
    assert json.loads(more.stdout) == [2, 3], more.stderr
    assert "4 groups" in cluster.rolloutctl("stream", "close", uri).stderr

    tail = cluster.rolloutctl("stream", "tail", uri, "-o", "json")
    groups = {group["group"]: group for group in map(json.loads, tail.stdout.splitlines())}
    assert sorted(groups) == [0, 1, 2, 3], tail.stderr
    assert [groups[number]["label"] for number in range(4)] == ["step-0", "step-0", None, None]
    assert {result["reward"] for group in groups.values() for result in group["results"]} == {1}
    open_job.wait("Succeeded")
    late = cluster.rolloutctl("stream", "submit", uri, "-", text=lines)
    assert (late.returncode, "closed with 4 groups" in late.stderr) == (2, True), late.stderr
