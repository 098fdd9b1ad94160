"""Which rollout `show` and `logs` mean."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rolloutctl.commands.show import index_of
from rolloutctl.errors import CommandError
from tests.support.made_up_runs import write_run


async def test_a_rollout_of_a_task_that_has_not_ended_is_found_by_its_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "live", [], total=4, group_size=2, finished=False)
    run = await open_run(Store.open(str(tmp_path), {}), folder.name)
    first, second = run.job_file.tasks.names[:2]
    assert [index_of(run, f"{first}/1"), index_of(run, f"{second}/0"), index_of(run, "3")] == [1, 2, 3]
    with pytest.raises(CommandError, match="has no task 'nothing'"):
        index_of(run, "nothing/0")


def test_task_that_a_stream_got_several_times_needs_an_index() -> None:
    ended = [SimpleNamespace(group=group, task=task) for group, task in ((0, "a"), (1, "b"), (3, "a"), (3, "a"))]
    run = SimpleNamespace(
        total=None,
        folder="run",
        results=lambda: ended,
        job=SimpleNamespace(spec=SimpleNamespace(group_size=2)),
        job_file=SimpleNamespace(tasks=SimpleNamespace(names=[])),
    )
    assert index_of(cast(RunReader, run), "b/1") == 3
    with pytest.raises(CommandError, match="'a' was submitted 2 times; give an index instead of a/1: 1, 7"):
        index_of(cast(RunReader, run), "a/1")
