"""The real verifiers reads an export."""

import json
import subprocess
from pathlib import Path

import pytest

from agent_runtime.export.formats import Format, export
from benchmarks.peers import VERIFIERS, VERIFIERS_PROGRAMS, Peer, install
from tests.support.recorded_run import record_run

pytestmark = pytest.mark.full

HERE = Path(__file__).parent


async def test_verifiers_reads_rewards_errors_metrics_and_times_of_a_run(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out")
    (tmp_path / "results.jsonl").write_bytes(b"".join([line async for line in export(run, Format.VERIFIERS)]))

    found = json.loads(told_by(VERIFIERS, "read_with_verifiers.py", tmp_path))

    assert found["rewards"] == [0.0, 1.0, None, None]
    assert (found["mean"], found["errors"], found["input_tokens"]) == (0.5, 0.5, 30.0)
    assert found["metrics"] == {"style": 0.5, "num_turns": 2.0, "num_tool_calls": 0.0}
    assert found["total"] == [9.0, 9.0, 0.0, 0.0]


async def test_current_verifiers_reads_conversations_branches_rewards_and_errors_of_a_run(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out")
    lines = [line async for line in export(run, Format.VERIFIERS_TRACES)]
    (tmp_path / "traces.jsonl").write_bytes(b"".join(lines))

    failed, passed, lost, never = json.loads(told_by(VERIFIERS_PROGRAMS, "read_with_verifiers_0_4.py", tmp_path))

    assert [found["rewards"] for found in (failed, passed, lost, never)] == [[0.0], [1.0], [None], [None]]
    assert [found["ok"] for found in (failed, passed, lost, never)] == [True, True, False, False]
    assert [found["group"] for found in (failed, passed, lost, never)] == [failed["group"]] * 2 + [lost["group"]] * 2
    assert failed["group"] != lost["group"]
    assert (failed["run"], passed["run"]) == ("eval", None)
    conversation = ["system", "user", "assistant", "tool", "assistant"]
    assert (failed["branches"], failed["sampled"]) == ([conversation], [2, 4])
    # The agent dropped its conversation and began another one.
    assert (passed["branches"], passed["sampled"]) == ([conversation, ["user", "assistant"]], [2, 4, 6])
    assert lost["branches"] == [conversation[:3]]
    assert (never["branches"], never["turns"]) == ([], 0)
    assert passed["tool_calls"] == [["bash", '{"command": "ls"}']]
    assert passed["tools"] == ["bash", "read"]
    assert passed["last_reply"] == "There is a.txt."
    assert passed["metrics"] == {"style": 0.5, "num_tool_calls": 0.0}
    assert (passed["turns"], passed["truncated"], passed["stop"]) == (3, False, "agent_completed")
    assert [error["type"] for error in passed["errors"]] == ["SandboxLost"]
    assert lost["errors"] == [{"type": "SandboxLost", "message": "its node is gone"}]
    assert (failed["seconds"], failed["scoring"]) == (2.0, 2.0)


def told_by(peer: Peer, script: str, folder: Path) -> str:
    """Return the last line that a script prints."""
    done = subprocess.run([install(peer), HERE / script, folder], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]
