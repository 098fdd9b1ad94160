"""One run in a line."""

from pathlib import Path

from agent_runtime.recording.overview import overviews
from agent_runtime.recording.store import Store
from tests.support.made_up_runs import made_up_rollout, write_run


async def test_a_damaged_reason_of_an_abort_is_its_runs_problem_only(tmp_path: Path) -> None:
    rollouts = [made_up_rollout(0)]
    write_run(tmp_path, "good", rollouts, finished=False)
    (write_run(tmp_path, "odd", rollouts, finished=False) / "abort.json").write_text("{}")
    runs, damaged = await overviews(Store.open(str(tmp_path), {}))
    assert not damaged
    assert {run.job.metadata.name: run.damaged for run in runs} == {
        "good": None,
        "odd": "abort.json: it has no message; the object was changed or damaged after it was written",
    }
