"""The real verl reads recorded runs: its datasets accept the output of `rolloutctl export`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.export.verl import write_conversations, write_tokens
from tests.support.recorded_run import ASK, OTHER, SYSTEM, record_run

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).with_name("read_exports.py")
ROOT = Path(__file__).parents[3]
Found = dict[str, Any]


@pytest.fixture
async def found(tmp_path: Path) -> Found:
    run = await record_run(tmp_path / "out")
    await write_conversations(run, tmp_path / "verl.parquet")
    await write_tokens(run, tmp_path / "tokens.parquet")
    answer: Found = json.loads(told_by_verl(tmp_path))
    return answer


def told_by_verl(folder: Path) -> str:
    """Return the last line that the script prints."""
    made = subprocess.run([ROOT / "hack/verl-environment"], check=True, stdout=subprocess.PIPE, text=True)
    search = os.pathsep.join(map(str, (ROOT, ROOT / "operator")))
    done = subprocess.run(
        [made.stdout.strip(), SCRIPT, folder],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def test_verl_trains_on_recorded_prompts_conversations_and_tokens(found: Found) -> None:
    assert found["prompts"] == [[SYSTEM, ASK], [SYSTEM, ASK], [OTHER], [SYSTEM, ASK]]
    assert found["rewards"] == [0.0, 1.0, 1.0, None]
    assert found["responses"] == [[3, 4, 5, 6], [3, 4, 5, 6], [6, 7], [3, 4]]
    assert found["masks"] == [[1, 1, 0, 1], [1, 1, 0, 1], [1, 1], [1, 1]]

    calling, done = '"arguments": {"command": "ls"}', "There is a.txt."
    assert [(calling in text, done in text) for text in found["trained"]] == [
        (True, True),
        (True, True),
        (False, True),
        (True, False),
    ]
    assert not any("<tool_response>" in text for text in found["trained"])
    # Each tool with its own parameters, and none of the other's.
    assert '"properties": {"command": {"type": "string"}}' in found["whole"]
    assert '"properties": {"path": {"type": "string"}}' in found["whole"]
