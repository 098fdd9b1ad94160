"""Which of a job's runs a command reads."""

import json
import time
from pathlib import Path

import pytest

from agent_runtime.recording.health import HealthReport
from agent_runtime.recording.store import Store
from rolloutctl.commands.view import newest_with_results
from rolloutctl.runs import find_run_folder
from rolloutctl.viewer.library import Library
from tests.support.made_up_runs import BEGAN, made_up_rollout, write_run


@pytest.mark.parametrize("is_running", [False, True])
async def test_stopped_run_without_a_finished_rollout_is_not_preferred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_running: bool
) -> None:
    good = write_run(tmp_path, "fix", [made_up_rollout(0)])
    job_file = json.loads((good / "job.json").read_text())
    empty = tmp_path / "fix-00000000"
    (empty / "health").mkdir(parents=True)
    (empty / "job.json").write_text(json.dumps(job_file | {"uid": "0" * 32, "created": BEGAN + 1}))
    report = HealthReport(time=time.time(), ended=not is_running)
    (empty / "health/0.json").write_text(report.model_dump_json())

    library = Library(Store.open(str(tmp_path), {}))
    chosen = [newest_with_results(await library.rows())]
    await library.close()
    chosen.append((await find_run_folder(str(tmp_path))).folder)
    assert chosen == [empty.name if is_running else good.name] * 2
    said = f"fix-00000000 has no finished rollout and is not running; {good.name} is used instead."
    assert capsys.readouterr().err.count(said) == (0 if is_running else 2)
    assert (await find_run_folder(str(tmp_path), may_be_empty=True)).folder == empty.name
