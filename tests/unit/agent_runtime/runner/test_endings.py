"""How the engine ended decides whether a job succeeds, fails, or is retried."""

import pytest

from agent_runtime.engine.events import JobSummary
from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ModelConfigError, ModelError
from agent_runtime.recording.job_record import ManifestChanged
from agent_runtime.recording.journal import Superseded
from agent_runtime.recording.store import StorageError, StorageUnavailable
from agent_runtime.runner.shard_run import Ending, ending_of
from agent_runtime.runner.supervisor import Exit
from agent_runtime.sandboxes.base import Fenced, SandboxFailure
from agent_runtime.tasks import TaskProblem, TaskSourceUnavailable
from rollout_api.rollout_job import RunnerState


def summary(*, completed: bool = False, aborted: str | None = None) -> JobSummary:
    return JobSummary("job", "f", "uri", 2, {}, None, completed, aborted, resumable=not completed)


def test_only_a_verdict_completes_the_index() -> None:
    assert ending_of(summary(completed=True)) == Ending(Exit.REPORTED, RunnerState.COMPLETED)
    assert ending_of(summary(aborted="too much was lost")) == Ending(
        Exit.REPORTED, RunnerState.ABORTED, "too much was lost"
    )
    assert ending_of(summary()) == Ending(Exit.DRAINED, RunnerState.DRAINING)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageUnavailable("away"), Exit.STORAGE),
        (StorageError("refused"), Exit.STORAGE),
        (TaskSourceUnavailable([TaskProblem("s3://b/tasks.jsonl", None, "cannot be read")]), Exit.STORAGE),
        (AgentBroken("Traceback"), Exit.AGENT),
        (ModelError("Unreachable", "refused"), Exit.MODEL),
        (ModelConfigError("NoKey", "the Secret has none"), Exit.MODEL),
        (SandboxFailure("ProviderUnavailable", "no rights"), Exit.SANDBOXES),
        (Superseded("epoch 3 is claimed"), Exit.SUPERSEDED),
        (Fenced("epoch 3"), Exit.SUPERSEDED),
    ],
)
def test_correctable_error_is_not_a_final_result(error: Exception, code: Exit) -> None:
    assert ending_of(error) == Ending(code, RunnerState.RUNNING, str(error))


@pytest.mark.parametrize("error", [ExtensionError("no such agent"), ManifestChanged("job", ["seed: 1 → 2"])])
def test_error_that_every_pod_would_meet_fails_the_job_at_once(error: Exception) -> None:
    assert ending_of(error) == Ending(Exit.BAD_JOB, RunnerState.ABORTED, str(error))


def test_bug_is_retried_and_not_a_final_result() -> None:
    assert ending_of(ValueError("bug")) is None
