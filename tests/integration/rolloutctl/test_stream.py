"""An open job that another process feeds while it runs, as a trainer beside the cluster does."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.seals import SealedResults
from agent_runtime.recording.store import READS_AT_ONCE, StorageUnavailable, Store
from agent_runtime.recording.stream import StreamClosed, StreamRecord
from rollout_api.tasks import Tasks, TaskStream
from rolloutctl.commands.results import results as show_results
from rolloutctl.commands.stream import submit as submit_tasks
from rolloutctl.errors import CommandError, Exit
from rolloutctl.job_stream import JobStream
from rolloutctl.ui.console import Form
from tests.support.preloaded import run_rolloutctl
from tests.support.records import completed, small_job

STARTER = Path(__file__).parents[3] / "rolloutctl" / "starter.yaml"


class OpenJob:
    """A `rolloutctl run` of the starter's tasks as a stream, solved by the Oracle, and a shell for other commands."""

    def __init__(self, program: Sequence[str], folder: Path) -> None:
        self._program, self._folder = program, folder
        job = yaml.safe_load(STARTER.read_text())
        tasks = job["spec"]["tasks"]["inline"]
        for task in tasks:
            task.setdefault("solution", ["true"])
        job["spec"] |= {"tasks": {"stream": {}}, "agent": {"type": "Oracle"}, "groupSize": 2}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        self.tasks = folder / "tasks.jsonl"
        self.tasks.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        self.count = len(tasks)
        self.run = subprocess.Popen(
            [*program, "run", "job.yaml"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while not list((folder / "out").glob("*/job.json")):
            assert self.run.poll() is None, self.run.communicate()[1]
            time.sleep(0.05)

    def stream(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return run_rolloutctl("stream", *arguments, folder=self._folder, text=text)


@pytest.fixture
def job(rolloutctl_program: list[str], tmp_path: Path) -> Iterator[OpenJob]:
    opened = OpenJob(rolloutctl_program, tmp_path)
    yield opened
    if opened.run.poll() is None:
        opened.run.terminate()
    opened.run.communicate(timeout=60)


def test_groups_are_submitted_and_returned_once_until_the_job_is_closed(job: OpenJob) -> None:
    submitted = job.stream("submit", "job.yaml", "tasks.jsonl", "--label", "step-1", "-o", "json")
    assert json.loads(submitted.stdout) == list(range(job.count)), submitted.stderr
    more = job.stream("submit", "job.yaml", "-", "--label", "step-2", text=job.tasks.read_text())
    assert more.returncode == 0, more.stderr
    assert f"{job.count} to {2 * job.count - 1}" in more.stderr
    closed = job.stream("close", "job.yaml")
    assert f"{2 * job.count} groups" in closed.stderr, closed.stderr
    tail = job.stream("tail", "job.yaml", "-o", "json")
    groups = [json.loads(line) for line in tail.stdout.splitlines()]
    assert sorted(group["group"] for group in groups) == list(range(2 * job.count)), tail.stderr
    assert {group["label"] for group in groups} == {"step-1", "step-2"}
    assert all(len(group["results"]) == 2 for group in groups)
    stdout, stderr = job.run.communicate(timeout=60)
    assert job.run.returncode == 0, stdout + stderr
    late = job.stream("submit", "job.yaml", "tasks.jsonl")
    assert late.returncode == 2
    assert f"closed with {2 * job.count} groups" in late.stderr


def test_job_with_fixed_tasks_refuses_a_submit(tmp_path: Path) -> None:
    def rolloutctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_rolloutctl(*arguments, folder=tmp_path)

    assert rolloutctl("init").returncode == 0
    assert rolloutctl("run", "job.yaml").returncode == 0
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"name": "a", "prompt": "b"}) + "\n")
    refused = rolloutctl("stream", "submit", "job.yaml", "tasks.jsonl")
    assert refused.returncode == 2
    assert "fixed list of tasks" in refused.stderr
    assert "stream: {}" in refused.stderr


async def test_a_trainer_may_open_a_stream_before_its_runners_have_started(job: OpenJob, tmp_path: Path) -> None:
    [written] = (tmp_path / "out").glob("*/job.json")
    away = written.rename(tmp_path / "job.json")
    with pytest.raises(CommandError, match="contains no run"):
        await JobStream.open(str(written.parent))
    opening = asyncio.create_task(JobStream.open(str(written.parent), patience_seconds=60))
    await asyncio.sleep(0)
    away.rename(written)
    assert await (await opening).close() == 0


async def test_results_are_read_from_their_index_and_streams_are_opened_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await open_job(tmp_path)
    index = SealedResults(record.store)
    for number in range(READS_AT_ONCE + 1):
        await index.add(completed(index=number))
        await record.store.create(f"seals/{number}.json", b"read in vain")
    await index.end()
    await show_results(record.store.uri, Form.JSON)
    assert len(json.loads(capsys.readouterr().out)) == READS_AT_ONCE + 1
    assert await (await JobStream.open(record.store.uri)).submit({"name": "a", "prompt": "b"}) == 0


async def open_job(folder: Path) -> JobRecord:
    """Start an open job's run without a runner."""
    job = small_job()
    spec = job.spec.model_copy(update={"tasks": Tasks(stream=TaskStream())})
    return await JobRecord.open(Store.open(str(folder), {}), job.model_copy(update={"spec": spec}), [])


def test_follower_gets_the_last_group_and_the_reason_when_a_run_is_aborted(
    rolloutctl_program: list[str], tmp_path: Path
) -> None:
    async def give_up() -> JobRecord:
        record = await open_job(tmp_path)
        stream = await JobStream.open(record.store.uri)
        for number in range(2):
            await stream.submit({"name": f"task-{number}", "prompt": "Do it."})
        await StreamRecord(record.store).publish(0, 0, [completed(task="task-0")])
        await record.abort("InfraFailures", "20 of 20 ended rollouts were lost")
        return record

    tail = [*rolloutctl_program, "stream", "tail", asyncio.run(give_up()).store.uri, "-o", "json"]
    followed = subprocess.run(tail, capture_output=True, text=True, timeout=120, check=False)
    assert [json.loads(line)["group"] for line in followed.stdout.splitlines()] == [0]
    assert followed.returncode == Exit.ABORTED
    assert "20 of 20 ended rollouts were lost" in followed.stderr


@pytest.mark.parametrize("is_unknown", [True, False])
async def test_failing_submit_names_the_submitted_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_unknown: bool
) -> None:
    record, create = await open_job(tmp_path), Store.create

    async def fail_at_the_third(store: Store, key: str, data: bytes) -> bool:
        if key == "stream/2.json" and is_unknown:
            await create(store, key, data)
            raise StorageUnavailable("storage is away")
        if key == "stream/2.json":
            await create(store, key, b'{"closed":true}')
        return await create(store, key, data)

    monkeypatch.setattr(Store, "create", fail_at_the_third)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"name": f"task-{number}", "prompt": "Do it."}) + "\n" for number in range(4)))
    with pytest.raises(StorageUnavailable if is_unknown else StreamClosed):
        await submit_tasks(record.store.uri, str(tasks), None, Form.TEXT)
    said = " ".join(capsys.readouterr().err.split())
    assert "Only the first 2 of 4 tasks were submitted" in said
    assert ("The next task, task-2, may have been submitted too" in said) == is_unknown
