"""Common mistakes give one clear message each and lose nothing. A hostile or clumsy tool call harms no other rollout."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.preloaded import run_rolloutctl
from tests.support.s3 import careless_s3


def job(*members: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    """One task; each member is a list of tool calls, followed by finish."""
    task = {"name": "task", "prompt": "Do it.", "verifier": {"commands": ["test -f done"]}}
    turns = [
        {
            "turns": [
                *({"toolCalls": [call]} for call in calls),
                {"toolCalls": [{"name": "finish", "arguments": {"message": "ok"}}]},
            ]
        }
        for calls in members
    ]
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "bad-input"},
        "spec": {
            "mode": "Eval",
            "groupSize": len(members),
            "tasks": {"inline": [task]},
            "model": {"scripted": {"tasks": [{"task": "task", "members": turns}]}},
            "agent": {"tools": ["bash", "finish"]},
            "output": {"uri": "out"},
            **spec,
        },
    }


def bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}


def run(folder: Path, manifest: dict[str, Any], *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest))
    return run_rolloutctl("run", "job.yaml", *options, folder=folder, environ=environ, timeout=300)


def results(folder: Path) -> list[dict[str, Any]]:
    (found,) = folder.glob("out/*/results.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


def test_300_mb_of_tool_output_cost_neither_memory_nor_the_rollout(tmp_path: Path) -> None:
    done = run(tmp_path, job([bash("head -c 300000000 /dev/zero | tr '\\0' x"), bash("touch done")]))
    assert done.returncode == 0, done.stderr
    assert results(tmp_path)[0]["reward"] == 1
    largest = max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert largest < 1_000_000, "the middle of the output is not recorded"


def test_fork_bomb_in_a_tool_call_affects_only_its_own_rollout(tmp_path: Path) -> None:
    bomb = bash("bomb() { bomb | bomb & }; bomb; sleep 1")
    good = [bash("sleep 0.5"), bash("touch done")]
    manifest = job([bomb, bash("touch done")], good, sandbox={"resources": {"processes": 64}})
    done = run(tmp_path, manifest)
    assert done.returncode == 0, done.stderr
    assert {line["outcome"] for line in results(tmp_path)} == {"Completed"}
    assert results(tmp_path)[1]["reward"] == 1


def test_tool_that_raises_is_reported_to_the_model_and_the_rollout_continues(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agent_runtime.tools.registry import tool\n\n\n@tool\nasync def boom(x: int) -> str:\n"
        '    """Never works."""\n    raise RuntimeError("kaput")\n'
    )
    manifest = job([{"name": "boom", "arguments": {"x": 1}}, bash("touch done")])
    manifest["spec"]["agent"]["tools"] = ["mine:boom", "bash", "finish"]
    done = run(tmp_path, manifest, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert results(tmp_path)[0]["reward"] == 1
    shown = run_rolloutctl("show", "bad-input", "0", folder=tmp_path)
    assert "kaput" in shown.stdout


def test_memory_used_up_by_many_processes_counts_against_the_policy(tmp_path: Path) -> None:
    hog = bash("for i in 1 2 3 4; do python3 -c 'import time; x = bytearray(120_000_000); time.sleep(30)' & done; wait")
    manifest = job([hog], [bash("touch done")], sandbox={"resources": {"memory": "256Mi"}})
    done = run(tmp_path, manifest)
    assert done.returncode == 0, done.stderr
    first, second = results(tmp_path)
    assert (first["outcome"], first["stopReason"], first["reward"]) == ("Completed", "ResourceLimit", 0)
    assert (second["stopReason"], second["reward"]) == ("Finished", 1)


def test_agent_that_deletes_its_own_folder_is_graded(tmp_path: Path) -> None:
    done = run(tmp_path, job([bash("cd / && rm -rf /workspace")], [bash("touch done")]))
    assert done.returncode == 0, done.stderr
    assert [(line["outcome"], line["reward"]) for line in results(tmp_path)] == [("Completed", 0), ("Completed", 1)]


def test_commands_of_another_user_can_write_their_folder(tmp_path: Path) -> None:
    manifest = job([bash("id -u > done; cat done")], sandbox={"user": "1000", "workingDir": "/srv/here"})
    manifest["spec"]["tasks"]["inline"][0]["files"] = [{"path": "given.txt", "content": "x"}]
    done = run(tmp_path, manifest)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path)[0]["reward"] == 1


@contextlib.contextmanager
def disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a separate file system with options of mount(8) at a new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "out", "size=256k") as folder:
        yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_is_reported_and_the_run_resumes_later(tmp_path: Path, small_disk: Path) -> None:
    noise = [bash("head -c 30000 /dev/urandom | base64"), bash("touch done")]
    manifest = job(*([noise] * 12))
    full = run(tmp_path, manifest)
    assert full.returncode == 4, full.stderr
    assert "the disk is full" in full.stderr
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = run(tmp_path, manifest)
    assert done.returncode == 0, done.stderr
    assert [line["reward"] for line in results(tmp_path)] == [1] * 12


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "out", "ro") as folder:
        yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_unwritable_storage_is_reported_before_anything_runs(tmp_path: Path, read_only_disk: Path) -> None:
    refused = run(tmp_path, job([bash("touch done")]))
    assert refused.returncode == 4, refused.stderr
    assert "out is not writable; change its permissions or the URI" in refused.stderr
    assert not list(read_only_disk.iterdir())


async def test_storage_without_create_only_writes_is_refused_before_anything_runs(tmp_path: Path) -> None:
    async with careless_s3() as careless:
        manifest = job([bash("touch done")], output={"uri": careless.uri("runs")})
        refused = await asyncio.to_thread(run, tmp_path, manifest, **careless.environ())
    assert refused.returncode == 4, refused.stderr
    assert "If-None-Match" in refused.stderr
    assert "use storage that supports the condition" in refused.stderr
    assert "Recording to" not in refused.stderr, "nothing was begun"


def test_different_job_of_the_same_name_is_refused_with_the_differences(tmp_path: Path) -> None:
    assert run(tmp_path, job([bash("touch done")])).returncode == 0
    changed = run(tmp_path, job([bash("touch done")], seed=99))
    assert changed.returncode == 2
    assert "spec.seed: 0 → 99" in changed.stderr
    assert run(tmp_path, job([bash("touch done")], seed=99), "--new").returncode == 0


def test_a_failed_setup_is_never_reward_0(tmp_path: Path) -> None:
    manifest = job([bash("touch done")], attempts={"limit": 2, "backoffSeconds": 0})
    manifest["spec"]["tasks"]["inline"][0]["setup"] = ["echo the reason; exit 3"]
    done = run(tmp_path, manifest)
    assert done.returncode == 1
    assert "the reason" in done.stderr
    (line,) = results(tmp_path)
    assert (line["outcome"], line["reason"], line.get("reward")) == ("InfraFailed", "SetupFailed", None)


def test_a_verifier_that_cannot_start_is_found_before_the_first_rollout(tmp_path: Path) -> None:
    manifest = job([bash("touch done")])
    manifest["spec"]["tasks"]["inline"][0]["verifier"]["commands"] = ["nosuchprogram --all"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    for command in ("validate", "check"):
        found = run_rolloutctl(command, "job.yaml", folder=tmp_path)
        assert found.returncode != 0
        assert "nosuchprogram" in found.stdout + found.stderr
