"""Reads a file of instances, either only with pyarrow or as tasks, and reports the cost."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from agent_runtime.tasks import load_tasks, swe_bench
from benchmarks.conversation import answer_questions
from benchmarks.measuring import Meter
from rollout_api.tasks import Tasks


def read_values(file: str) -> object:
    """Return Python values of the columns from which a task is made."""
    names = pq.read_schema(file).names
    columns = [name for name in names if name in (*swe_bench.REQUIRED, *swe_bench.OPTIONAL)]
    return pq.read_table(file, columns=columns).to_pylist()


def read_tasks(file: str) -> object:
    return load_tasks(Tasks.model_validate({"from": {"uri": file, "format": "SWEBench"}}), Path(), os.environ)


READERS: dict[str, Callable[[str], object]] = {"values": read_values, "table": pq.read_table, "tasks": read_tasks}


async def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Return the wall seconds, and the peak of resident bytes minus those at the start. The question is {reader, file}."""
    meter = Meter()
    held = READERS[question["reader"]](question["file"])
    cost = meter.read()
    del held
    return {"seconds": cost.wall_seconds, "bytes": cost.peak_bytes - cost.start_bytes}


if __name__ == "__main__":
    asyncio.run(answer_questions(measure))
