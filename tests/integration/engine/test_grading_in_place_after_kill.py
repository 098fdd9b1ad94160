"""SIGKILL while a rollout is graded in the agent's own workspace: the changed workspace is not graded a second time."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

KILLER = """
import os, pathlib, signal

class KillOnce:
    def after_verifier_command(self, key):
        marker = pathlib.Path("killed")
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
ROLLOUTCTL = [sys.executable, "-m", "rolloutctl.main", "run", "job.yaml", "-o", "json"]
VERIFIER = {"commands": ["test ! -e graded && touch graded", "test -e work"]}
"""Passes only once, because it changes what it grades."""


@pytest.mark.parametrize("form", ["Shared", "steps"])
def test_a_grading_that_changes_the_workspace_is_not_repeated_in_it(tmp_path: Path, form: str) -> None:
    task: dict[str, Any] = {"name": "t", "prompt": "p"}
    task |= {"steps": [task | {"verifier": VERIFIER}]} if form == "steps" else {"verifier": VERIFIER | {"mode": form}}
    call = {"name": "bash", "arguments": {"command": "touch work"}}
    turns = [{"toolCalls": [call]}, {"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]}]
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "killed"},
        "spec": {
            "mode": "Eval",
            "tasks": {"inline": [task]},
            "model": {"scripted": {"tasks": [{"task": "t", "members": [{"turns": turns}]}]}},
            "agent": {"tools": ["bash", "finish"]},
            "plugins": [{"name": "kill_kit:KillOnce"}],
            "output": {"uri": "./out"},
        },
    }
    (tmp_path / "kill_kit.py").write_text(KILLER)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        environ = dict(os.environ, TMPDIR=temporary, PYTHONPATH=str(tmp_path))
        codes = [
            subprocess.run(ROLLOUTCTL, cwd=tmp_path, env=environ, capture_output=True, timeout=300, check=False)
            for _ in range(2)
        ]
    assert [code.returncode for code in codes] == [-9, 0], codes[-1].stderr.decode()[-3000:]
    (found,) = tmp_path.glob("out/*/results.jsonl")
    result = json.loads(found.read_text())
    assert (result["reward"], [failed["reason"] for failed in result["failedAttempts"]]) == (1.0, ["Interrupted"])
