"""An export in the hands of those that it is for: the real verifiers."""

import json
import subprocess
from pathlib import Path

from agent_runtime.recording.export import Format, export
from benchmarks.peers import VERIFIERS, installed
from tests.support.recorded_run import record_run

SCRIPT = Path(__file__).with_name("read_with_verifiers.py")


async def test_verifiers_reads_rewards_errors_metrics_and_times_of_a_run(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out")
    (tmp_path / "results.jsonl").write_bytes(b"".join([line async for line in export(run, Format.VERIFIERS)]))

    found = json.loads(told_by_verifiers(tmp_path))

    assert found["rewards"] == [0.0, 1.0, None, None]
    assert (found["mean"], found["errors"], found["input_tokens"]) == (0.5, 0.5, 30.0)
    assert found["metrics"] == {"style": 0.5, "num_turns": 2.0, "num_tool_calls": 0.0}
    assert found["total"] == [9.0, 9.0, 0.0, 0.0]


def told_by_verifiers(folder: Path) -> str:
    """The last line that the script prints."""
    done = subprocess.run([installed(VERIFIERS), SCRIPT, folder], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]
