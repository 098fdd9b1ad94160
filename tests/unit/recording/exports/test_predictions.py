"""SWE-bench predictions: its harness takes one of an instance and a model's name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime.export.predictions import prediction
from rollout_api.records import BranchRecord, Record, Result
from rollout_api.rollout_job import RolloutJob

BRANCH = {"branch": [{"job": "out/source", "index": 0, "turn": 1, "count": 2}]}


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        ({"inline": [{"name": "swe", "prompt": "p"}]}, ["Nop-0", "Nop-1", "Nop-0", "Nop-1"]),
        ({"stream": {}}, ["Nop-0", "Nop-1", "Nop-2", "Nop-3"]),
        (BRANCH, ["Nop-0", "Nop-1", "Nop-2", "Nop-3"]),
    ],
    ids=["listed", "stream", "branch"],
)
async def test_rollouts_of_an_instance_have_different_model_names(
    tasks: dict[str, Any], names: list[str], make_job: Callable[..., RolloutJob], make_result: Callable[..., Result]
) -> None:
    is_branch = tasks is BRANCH
    start = BranchRecord(time=0, job="out/source", index=0, attempt=0, turn=1) if is_branch else None
    task = "swe@0.1@3.2" if is_branch else "swe"
    results = [make_result(index, task=task, branched_from=start) for index in range(4)]

    async def records(index: int) -> list[Record]:
        return []

    run: Any = SimpleNamespace(
        job=make_job(mode="Eval", tasks=tasks),
        seals={result.index: SimpleNamespace(result=result) for result in results},
        records=records,
        store=None,
    )
    lines = [line for index in range(4) for line in await prediction(run, index)]
    assert [(line["instance_id"], line["model_name_or_path"]) for line in lines] == [("swe", name) for name in names]
