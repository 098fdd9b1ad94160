"""Jobs whose tasks have Dockerfiles, run by rolloutctl: kills, failures, and the stored steps."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.oci.conftest import Buildah

ROLLOUTCTL = str(Path(sys.executable).parent / "rolloutctl")


@pytest.fixture(scope="module")
def base(buildah: Buildah, debian: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"oci-archive:{buildah.archive(debian, tmp_path_factory.mktemp('base') / 'base.tar')}"


def task(name: str, dockerfile: str, **fields: Any) -> dict[str, Any]:
    """A task whose workspace must have the file /made with its name."""
    return {
        "name": name,
        "prompt": "Do nothing.",
        "dockerfile": {"text": dockerfile},
        "solution": ["true"],
        "verifier": {"commands": [f"grep -qx {name} /made"]},
        **fields,
    }


def write_job(folder: Path, base: str, *tasks: Mapping[str, Any], **spec: Any) -> Path:
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "built"},
        "spec": {
            "mode": "Eval",
            "tasks": {"inline": list(tasks), "dockerfiles": {"bases": {"base": base}}},
            "groupSize": 2,
            "agent": {"type": "Oracle"},
            "output": {"uri": "out"},
            **spec,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run([ROLLOUTCTL, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(folder: Path) -> list[dict[str, Any]]:
    (run_folder,) = (path for path in (folder / "out").iterdir() if path.name.startswith("built-"))
    return [json.loads(line) for line in (run_folder / "results.jsonl").read_text().splitlines()]


def test_run_that_is_killed_in_a_build_goes_on_after_the_last_step(tmp_path: Path, base: str) -> None:
    log = tmp_path / "log"
    text = "FROM base\nRUN echo first >> /first\nRUN test -e /first && sleep 2 && echo killed > /made\nUSER 0\n"
    write_job(tmp_path, base, task("killed", text))
    (tmp_path / "out").mkdir()
    running = subprocess.Popen([ROLLOUTCTL, "run", "job.yaml"], cwd=tmp_path, stderr=log.open("w"))
    until = time.monotonic() + 60
    while not list((tmp_path / "out").glob("builds/*.json")):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    entries = [json.loads(path.read_text()) for path in (tmp_path / "out/builds").iterdir()]
    told = run(tmp_path, "run", "job.yaml")
    assert told.count("Built in") == 1
    assert "Steps of Dockerfiles and setups: 1 found stored, 1 made." in told
    assert [result["reward"] for result in results(tmp_path)] == [1.0, 1.0]
    after = [json.loads(path.read_text()) for path in (tmp_path / "out/builds").iterdir()]
    assert [entry for entry in entries if entry not in after] == [], "a stored step is not made again"
    assert len(after) == 2


def test_failing_build_masks_its_own_task_and_no_other(tmp_path: Path, base: str) -> None:
    write_job(
        tmp_path,
        base,
        task("good", "FROM base\nRUN echo good > /made\n"),
        task("bad", "FROM base\nRUN echo why >&2; exit 7\n"),
        attempts={"limit": 2},
    )
    told = run(tmp_path, "run", "job.yaml", code=1)
    assert "Dockerfile, line 2: RUN echo why >&2; exit 7 ended with exit code 7, expected 0" in told
    found = [
        (result["task"], result["outcome"], result.get("reward"), result.get("reason")) for result in results(tmp_path)
    ]
    assert found == [
        ("good", "Completed", 1.0, found[0][3]),
        ("good", "Completed", 1.0, found[0][3]),
        ("bad", "InfraFailed", None, "SetupFailed"),
        ("bad", "InfraFailed", None, "SetupFailed"),
    ]


def test_grading_in_a_new_workspace_has_the_same_files(tmp_path: Path, base: str) -> None:
    text = "FROM base\nRUN echo fresh > /made && chmod 600 /made\nWORKDIR /work\n"
    write_job(tmp_path, base, task("fresh", text, solution=["echo changed > /made"]), verifier={"mode": "Separate"})
    run(tmp_path, "run", "job.yaml")
    assert [result["reward"] for result in results(tmp_path)] == [1.0, 1.0], "the agent's change is not carried"


def test_validate_names_what_cannot_be_built(tmp_path: Path, base: str) -> None:
    write_job(tmp_path, base, task("odd", "FROM base\nADD https://example/x /x\nBOO\n"))
    told = run(tmp_path, "validate", "job.yaml", "--offline", code=2)
    assert "task odd: dockerfile, line 3: unknown instruction 'BOO'" in told


def test_stored_steps_are_listed_checked_and_deleted(tmp_path: Path, base: str) -> None:
    write_job(tmp_path, base, task("kept", "FROM base\nRUN echo kept > /made\n"))
    run(tmp_path, "run", "job.yaml")
    assert "RUN echo kept > /made" in run(tmp_path, "layers", "ls", "out")
    assert "1 step, 0 other layers, 0 damaged" in run(tmp_path, "layers", "verify", "out")
    (layer,) = (tmp_path / "out/layers").glob("*.zst")
    whole = layer.read_bytes()
    layer.write_bytes(whole[:-5])
    assert "RUN echo kept > /made: " in run(tmp_path, "layers", "verify", "out", code=1)
    assert "1 steps would be deleted" in run(tmp_path, "layers", "gc", "out", "--most-gb", "0")
    (step,) = json.loads(run(tmp_path, "layers", "ls", "out", "-o", "json"))
    assert step["step"] == "RUN echo kept > /made"
    assert "1 steps and 0 layers deleted" in run(tmp_path, "layers", "gc", "out", "--most-gb", "0", "--delete")
    assert json.loads(run(tmp_path, "layers", "ls", "out", "-o", "json")) == []
    layer.write_bytes(whole)
    run(tmp_path, "run", "job.yaml", "--new")
    assert "1 step, 1 other layer, 0 damaged" in run(tmp_path, "layers", "verify", "out")


def test_damaged_layers_are_all_made_again_within_one_attempt(tmp_path: Path, base: str) -> None:
    text = "FROM base\nRUN echo 1 > /a\nRUN echo 2 > /b\nRUN echo 3 > /c\nRUN echo mended > /made\n"
    write_job(tmp_path, base, task("mended", text), attempts={"limit": 1})
    run(tmp_path, "run", "job.yaml")
    for layer in (tmp_path / "out/layers").glob("*.zst"):
        layer.write_bytes(layer.read_bytes()[:-5])
    run(tmp_path, "run", "job.yaml", "--new")
    found = [json.loads(line) for file in (tmp_path / "out").glob("built-*/results.jsonl") for line in file.open()]
    assert [(result["reward"], result["attempt"]) for result in found] == [(1.0, 0)] * 4
