"""Records and runs that the recording tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.store import Store
from rollout_api.records import Outcome, Result, StopReason
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task

MakeJob = Callable[..., RolloutJob]
MakeResult = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    """A store on a local folder."""
    return Store.open(str(tmp_path / "out"), {})


@pytest.fixture
def memory() -> Store:
    """A store in memory."""
    return Store("memory:", MemoryStore())


@pytest.fixture
def make_job() -> MakeJob:
    """Return a job with two tasks; keywords are fields of its spec."""

    def make(name: str = "fix", uid: str | None = None, **spec: Any) -> RolloutJob:
        metadata = {"name": name} | ({"uid": uid} if uid else {})
        body = {
            "tasks": {"inline": [{"name": task, "prompt": f"do {task}"} for task in ("first", "second")]},
            "agent": {"type": "Nop"},
            "groupSize": 2,
            "output": {"uri": "out"},
        }
        manifest = {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "metadata": metadata}
        return RolloutJob.model_validate({**manifest, "spec": body | spec})

    return make


@pytest.fixture
def tasks(make_job: MakeJob) -> list[Task]:
    """Return the tasks of that job."""
    return make_job().spec.tasks.inline or []


@pytest.fixture
async def record(folder: Store, make_job: MakeJob, tasks: list[Task]) -> JobRecord:
    """A run that has just started in a folder."""
    return await JobRecord.open(folder, make_job(), tasks)


@pytest.fixture
def make_result() -> MakeResult:
    """Return a graded result; keywords replace its fields."""

    def make(index: int = 0, **fields: Any) -> Result:
        given = {
            "group": index // 2,
            "member": index % 2,
            "task": "first" if index < 2 else "second",
            "mode": "Train",
            "seed": 1,
            "outcome": Outcome.COMPLETED,
            "stop_reason": StopReason.FINISHED,
            "reward": 1.0,
            "passed": True,
            "attempt": 0,
        }
        return Result(index=index, **(given | fields))

    return make
