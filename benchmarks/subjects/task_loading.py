"""Reads a file of instances, with pyarrow alone or as tasks, and tells what it took."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from agent_runtime.tasks import load_tasks
from benchmarks.conversation import answer_questions
from benchmarks.measuring import Meter
from rollout_api.tasks import Tasks


async def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Answers {reader, file} with wall seconds, and bytes that were resident at most above those at the start."""
    meter = Meter()
    if question["reader"] == "pyarrow":
        held = pq.read_table(question["file"])
    else:
        tasks = Tasks.model_validate({"from": {"uri": question["file"], "format": "SWEBench"}})
        held = load_tasks(tasks, Path(), os.environ)
    cost = meter.read()
    del held
    return {"seconds": cost.wall_seconds, "bytes": cost.peak_bytes - cost.start_bytes}


if __name__ == "__main__":
    asyncio.run(answer_questions(measure))
