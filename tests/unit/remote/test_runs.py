"""Runs of a server whose storage or disk is unavailable for a time."""

from pathlib import Path
from typing import Any

import pytest

from agent_runtime.integrations.harbor_server import runs as runs_module
from agent_runtime.integrations.harbor_server.plan import ServedJob, plan_run
from agent_runtime.integrations.harbor_server.runs import Runs
from agent_runtime.integrations.harbor_server.schemas import RunRequest, RunResult, RunStatus
from agent_runtime.models.base import ModelError
from agent_runtime.recording.store import StorageUnavailable
from agent_runtime.sandboxes.base import SandboxFailure
from rollout_api.tasks import Task
from tests.support.harbor_server import job

RUN = "run-" + "0" * 24
DONE = RunResult(run_id=RUN, status=RunStatus.COMPLETED, rewards={"reward": 1.0})


async def result_of_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, results: list[Any], *, is_resumed: bool = True
) -> RunResult | None:
    """Return a client's result of a run whose job ends with these results or errors, one after another."""
    monkeypatch.setattr(runs_module, "AGAIN_SECONDS", 0.0)
    runs = Runs(folder, {})

    async def result(*_: object) -> RunResult:
        if isinstance(given := results.pop(0), Exception):
            raise given
        assert isinstance(given, RunResult)
        return given

    monkeypatch.setattr(runs, "_result", result)
    served = ServedJob(job("a", {"type": "Nop"}), folder)
    plan = plan_run(RUN, RunRequest(task_path="t"), Task(name="t", prompt="Do it."), {"a": served})
    kept = runs_module._Kept(digest="d", awaited=False, plan=plan)
    (folder / RUN).mkdir()
    (folder / RUN / "request.json").write_text(kept.model_dump_json())
    runs._start(RUN, kept, is_resumed=is_resumed)
    return await runs.wait(RUN)


async def test_run_is_resumed_when_its_storage_was_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await result_of_run(tmp_path, monkeypatch, [StorageUnavailable("s3://bucket is away"), DONE])
    assert found is not None
    assert found.rewards == DONE.rewards


@pytest.mark.parametrize("is_resumed", [True, False])
@pytest.mark.parametrize(
    "absent", [ModelError("Unreachable", "connection refused"), SandboxFailure("Unreachable", "connection refused")]
)
async def test_run_that_had_begun_waits_for_its_model_and_its_provider(
    absent: Exception, is_resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [absent, DONE]
    found = await result_of_run(tmp_path, monkeypatch, given, is_resumed=is_resumed)
    assert found is not None
    assert (found.rewards, found.error) == (
        (DONE.rewards, None) if is_resumed else (None, f"{type(absent).__name__}: Unreachable: connection refused")
    )


async def test_run_has_its_result_when_the_disk_was_full_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failures = runs_module._write, [OSError(28, "No space left on device")]

    def fail_once(path: Path, text: str) -> None:
        if failures:
            raise failures.pop()
        write(path, text)

    monkeypatch.setattr(runs_module, "_write", fail_once)
    found = await result_of_run(tmp_path, monkeypatch, [DONE])
    assert found is not None
    assert found.rewards == DONE.rewards


async def test_run_with_an_unreadable_plan_has_failed_and_the_server_starts(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "request.json").write_text('{"digest": ')
    runs = Runs(tmp_path, {})

    await runs.open()
    await runs.close()

    found = runs.result(RUN)
    assert found is not None
    assert (found.status, found.rewards) == (RunStatus.FAILED, None)
    assert "submit it again" in (found.error or "")
    assert runs._is_known(RUN, "any"), "its key cannot begin a second run"
