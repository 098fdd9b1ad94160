"""SIGKILL in the middle of rollouts with plugins: their changes remain, and each call is counted once."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.store import Store
from tests.support.resumed import resumed_rollouts

ROLLOUTCTL = [sys.executable, "-m", "rolloutctl.main", "run", "job.yaml", "-o", "json"]
TURNS, MEMBERS, TASKS = 4, 3, 2
KILL_AT_LINES = (10, 40)
"""Numbers of lines of the log at which a run is killed. An undisturbed run writes about 70."""

MODULE = """
import os, secrets

class Marks:
    '''Gives each rollout a mark of its own that nobody could guess again, and logs what it is asked.'''

    def log(self, hook, key):
        with open("log.txt", "a") as log:
            log.write(f"{hook} {key}\\n")

    def modify_task(self, task, key):
        self.log("modify", key)
        mark = secrets.token_hex(8)
        return task.model_copy(update={"prompt": mark, "setup": [f"echo {mark} > mark.txt"]})

    def before_tool_call(self, key):
        self.log("before", key)

    def after_tool_call(self, rollout, result, key):
        self.log("after", key)
        if "mark" in result.content and rollout.task.prompt not in result.content:
            raise ValueError("another task's sandbox")

    def evaluate_rollout(self, finished):
        return {"calls": len(finished.tool_uses)}
"""


def job() -> dict[str, Any]:
    commands = [
        "cat mark.txt | sed s/^/mark/",
        *(f"echo {n} >> steps; sleep 0.1" for n in range(TURNS - 2)),
        "rm -rf /",
    ]
    turns: list[dict[str, Any]] = [
        {"toolCalls": [{"name": "bash", "arguments": {"command": command}}], "delaySeconds": 0.1}
        for command in commands
    ]
    turns.append({"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]})
    steps = " ".join(str(n) for n in range(TURNS - 2))
    commands = [f'test "$(cat steps | xargs)" = "{steps}"', "test -s mark.txt"]
    tasks = [{"name": f"task-{n}", "prompt": "p", "verifier": {"commands": commands}} for n in range(TASKS)]
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "marked"},
        "spec": {
            "mode": "Eval",
            "groupSize": MEMBERS,
            "tasks": {"inline": tasks},
            "model": {"scripted": {"tasks": [{"task": task["name"], "members": [{"turns": turns}]} for task in tasks]}},
            "agent": {"tools": ["bash", "finish"]},
            "plugins": [{"name": "marking_kit:Marks"}, {"name": "SafetyFilter"}],
            "runners": {"concurrency": 2},
            "output": {"uri": "./out"},
        },
    }


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables with a separate temporary folder, because the test's path may be too long for a socket."""
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        yield dict(os.environ, TMPDIR=temporary, PYTHONPATH=path)


def log_lines(folder: Path) -> list[str]:
    log = folder / "log.txt"
    # The attempt's number may differ: an interrupted boot begins another one.
    return [re.sub(r"(rollout-\d+)-\d+", r"\1", line.split("/")[0].split()[0] + " " + line.split("/")[1])
            for line in log.read_text().splitlines()] if log.exists() else []  # fmt: skip


def finish(folder: Path, environ: dict[str, str], kill_at: tuple[int, ...]) -> dict[int, Any]:
    """Run to the end, with a kill when the log has this many lines. Returns the results by index."""
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(job()))
    for lines in (*kill_at, None):
        process = subprocess.Popen(ROLLOUTCTL, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while lines is not None and process.poll() is None and len(log_lines(folder)) < lines:
            time.sleep(0.01)
        if lines is not None:
            assert process.poll() is None, "there was nothing left to be killed"
            process.kill()
        _, errors = process.communicate(timeout=300)
        assert lines is not None or process.returncode == 0, errors.decode()[-3000:]
    (found,) = folder.glob("out/*/results.jsonl")
    return {result["index"]: result for result in map(json.loads, found.read_text().splitlines())}


def test_killed_run_keeps_changed_tasks_and_counts_each_hook_once(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "marking_kit.py").write_text(MODULE)
    calm = finish(tmp_path / "calm", environ, ())
    killed = finish(tmp_path / "killed", environ, KILL_AT_LINES)
    assert {index: result["reward"] for index, result in killed.items()} == dict.fromkeys(range(TASKS * MEMBERS), 1.0)
    counted = ("calls", "refused", "changed", "failed", "scores")
    for index, result in calm.items():
        for name, report in result["plugins"].items():
            found = killed[index]["plugins"][name]
            assert {key: found[key] for key in counted} == {key: report[key] for key in counted}, (index, name)
            assert found["failed"] == 0
    once, repeated = Counter(log_lines(tmp_path / "calm")), Counter(log_lines(tmp_path / "killed"))
    assert max(once.values()) == 1
    assert set(repeated) == set(once), "a hook is repeated with the key that it had"
    assert resumed_rollouts(Store.open(str(tmp_path / "killed" / "out"), {}), "marked")
