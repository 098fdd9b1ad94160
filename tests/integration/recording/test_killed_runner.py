"""SIGKILL at any moment: what a runner knows to be durable is complete for the next one."""

import asyncio
import sys
from pathlib import Path

import pytest

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.store import Store
from rollout_api.records import StopRecord
from rollout_api.rollout_job import RolloutJob

MANIFEST = """{"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "fix"}, "spec":
    {"tasks": {"inline": [{"name": "a", "prompt": "x"}]}, "agent": {"type": "Nop"}, "output": {"uri": "out"}}}"""

RUNNER = f"""
import asyncio, itertools, sys
from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.store import Store
from rollout_api.records import StopReason, StopRecord
from rollout_api.rollout_job import RolloutJob

async def main():
    job = RolloutJob.model_validate_json({MANIFEST!r})
    record = await JobRecord.open(Store.open(sys.argv[1], {{}}), job, job.spec.tasks.inline)
    journal = await Journal.claim(record, 0, 0)
    await journal.begin()
    for number in itertools.count():
        await journal.append([StopRecord(time=0, stop_reason=StopReason.FINISHED, message=str(number) + "x" * 5000)])
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, 7, 150])
async def test_killed_runner_leaves_all_acknowledged_records_and_no_partial_one(tmp_path: Path, lines: int) -> None:
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUNNER, tmp_path, stdout=asyncio.subprocess.PIPE
    )
    assert runner.stdout is not None
    for _ in range(lines):
        await runner.stdout.readline()
    runner.kill()
    acknowledged = lines + len((await runner.stdout.read()).splitlines())
    await runner.wait()

    job = RolloutJob.model_validate_json(MANIFEST)
    record = await JobRecord.open(Store.open(str(tmp_path), {}), job, job.spec.tasks.inline or [])
    successor = await Journal.claim(record, 0, 0)
    found = [entry.message.rstrip("x") for entry in await successor.begin() if isinstance(entry, StopRecord)]
    assert record.resumed
    assert found[:acknowledged] == [str(number) for number in range(acknowledged)]
    assert len(found) - acknowledged in (0, 1), "only the append that was under way may be there unacknowledged"
