"""Jobs with `sandbox.storeSetup`, run by rolloutctl: the verdicts of a grading, kills, damage, and the listed layers."""

import asyncio
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

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import Verdict

ROLLOUTCTL = [sys.executable, "-m", "rolloutctl.main"]


def write_job(folder: Path, *tasks: Mapping[str, Any], name: str = "stored", **spec: Any) -> None:
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "mode": "Eval",
            "tasks": {"inline": list(tasks)},
            "groupSize": 2,
            "agent": {"type": "Oracle"},
            "sandbox": {"storeSetup": True},
            "output": {"uri": "out"},
            **spec,
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def task(name: str, *setup: str, **fields: Any) -> dict[str, Any]:
    verifier = {"commands": ["test -s made"]}
    return {"name": name, "prompt": "p", "setup": list(setup), "solution": ["true"], "verifier": verifier, **fields}


def run(folder: Path, environ: Mapping[str, str], *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [*ROLLOUTCTL, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(folder: Path, name: str = "stored", output: str = "out") -> list[list[dict[str, Any]]]:
    """Return the results of each run of a job, the oldest first."""
    found = sorted(folder.glob(f"{output}/{name}-*/results.jsonl"), key=lambda path: path.stat().st_mtime)
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in found]


def verdict(folder: Path, name: str) -> Verdict:
    async def read() -> Verdict:
        opened = await open_run(Store.open(str(folder / "out"), {}), name)
        seal = opened.seals.get(0)
        assert seal is not None
        assert seal.verdict is not None
        return seal.verdict

    found = asyncio.run(read())
    commands = [command.model_copy(update={"seconds": 0}) for command in found.commands]
    return found.model_copy(update={"commands": commands})


SOLVE = "printf 'def add(a, b):\\n    return a + b\\n' > calc.py"
PLANT = [
    "echo 'raise SystemExit(0)' > conftest.py",
    "echo 'def test_planted(): pass' > tests/test_calc.py",
    "rm pytest.ini",
    "echo planted > tests/__init__.py",
    "mkdir -p notes && echo mine > notes/own",
    "rm stale",
]
# The time that pytest prints, and the sizes of compiled files, differ from run to run.
VERIFY = "python3 -B -m pytest -q -p no:cacheprovider tests > /dev/null; ls -lR --time-style=+ ."


@pytest.mark.parametrize(("solution", "reward"), [([SOLVE], 1.0), (PLANT, 0.0), ([*PLANT, SOLVE], 1.0)])
def test_verdicts_are_equal_with_and_without_a_stored_setup(
    tmp_path: Path, environ: dict[str, str], solution: list[str], reward: float
) -> None:
    graded = task(
        "calc",
        "mkdir tests && echo 'from calc import add' > tests/test_calc.py",
        "printf '\\n\\ndef test_add():\\n    assert add(2, 3) == 5\\n' >> tests/test_calc.py",
        "echo '[pytest]' > pytest.ini && echo '# given' > conftest.py && touch stale && echo 'add = None' > calc.py",
        files=[{"path": "hidden/readme", "content": "r", "mode": "600"}],
        solution=solution,
        verifier={"kind": "pytest", "commands": [VERIFY]},
    )
    found = []
    for name, stored in (("without", False), ("first", True), ("second", True)):
        write_job(tmp_path, graded, name=name, groupSize=1, sandbox={"storeSetup": stored})
        run(tmp_path, environ, "run", "job.yaml")
        found.append(verdict(tmp_path, name))
    assert found[0].reward == reward
    assert [one.model_dump_json() for one in found] == [found[0].model_dump_json()] * 3
    assert bool(found[0].dropped) == (solution[0] == PLANT[0])
    assert len(list((tmp_path / "out/builds").iterdir())) == 1


def test_run_that_is_killed_in_the_setup_continues_it(tmp_path: Path, environ: dict[str, str]) -> None:
    write_job(tmp_path, task("killed", "touch started", "sleep 2", "echo run >> made", verifier={"commands": ["true"]}))
    log = (tmp_path / "log").open("w")
    running = subprocess.Popen([*ROLLOUTCTL, "run", "job.yaml"], cwd=tmp_path, env=environ, stderr=log)
    until = time.monotonic() + 60
    while not list((tmp_path / "out").glob("*/job.json")):
        assert time.monotonic() < until, (tmp_path / "log").read_text()
        time.sleep(0.05)
    time.sleep(1.5)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    log.close()
    assert not list((tmp_path / "out").glob("builds/*.json"))
    run(tmp_path, environ, "run", "job.yaml")
    assert [result["reward"] for (found,) in [results(tmp_path)] for result in found] == [1.0, 1.0]
    (step,) = json.loads(run(tmp_path, environ, "layers", "ls", "out", "-o", "json"))
    assert step["step"] == "setup: touch started; sleep 2; echo run >> made"


def test_builder_that_is_killed_disturbs_no_other_builder_of_the_same_layer(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    pause = f"sleep 4.{time.time_ns() % 10**9}"
    setup = ["cat /proc/sys/kernel/random/uuid > made", pause, "cp made twice"]
    runs = []
    for name in ("killed", "other"):
        (tmp_path / name).mkdir()
        made = task("same", *setup, verifier={"commands": ["test -s made && cmp made twice"]})
        write_job(tmp_path / name, made, name=name, output={"uri": str(tmp_path / "out")})
        runs.append(subprocess.Popen([*ROLLOUTCTL, "run", "job.yaml"], cwd=tmp_path / name, env=environ))
    until = time.monotonic() + 120
    while len(subprocess.run(["pgrep", "-xf", pause], capture_output=True, check=False).stdout.split()) < 2:
        assert time.monotonic() < until, "both make the layer at the same time"
        time.sleep(0.05)
    runs[0].kill()
    assert [one.wait() for one in runs] == [-signal.SIGKILL, 0]
    run(tmp_path / "killed", environ, "run", "job.yaml")
    for name in ("killed", "other"):
        assert [[one["reward"] for one in found] for found in results(tmp_path, name)] == [[1.0, 1.0]]
    assert "1 step, 0 other layers, 0 damaged" in run(tmp_path, environ, "layers", "verify", "out")


def test_damaged_layer_of_a_setup_is_made_again_within_one_attempt(tmp_path: Path, environ: dict[str, str]) -> None:
    write_job(tmp_path, task("mended", "echo x > made"), attempts={"limit": 1})
    run(tmp_path, environ, "run", "job.yaml")
    (layer,) = (tmp_path / "out/layers").glob("*.zst")
    layer.write_bytes(layer.read_bytes()[:-5])
    assert "setup: echo x > made: " in run(tmp_path, environ, "layers", "verify", "out", code=1)
    run(tmp_path, environ, "run", "job.yaml", "--new")
    assert [(result["reward"], result["attempt"]) for found in results(tmp_path) for result in found] == [(1.0, 0)] * 4
    assert "1 step, 0 other layers, 0 damaged" in run(tmp_path, environ, "layers", "verify", "out")
    (tmp_path / f"out/layers/{'0' * 64}.tar.zst").write_bytes(b"a damaged layer of a snapshot")
    assert "1 step, 1 other layer, 1 damaged" in run(tmp_path, environ, "layers", "verify", "out", code=1)
    assert "setup: echo x > made" in run(tmp_path, environ, "layers", "ls", "out")
    told = run(tmp_path, environ, "layers", "gc", "out", "--most-gb", "0", "--delete")
    assert "1 steps and 0 layers deleted" in told


def test_failing_setup_masks_its_own_task_and_no_other(tmp_path: Path, environ: dict[str, str]) -> None:
    bad = task("bad", "echo why >&2; exit 7")
    write_job(tmp_path, task("good", "echo x > made"), bad, attempts={"limit": 2})
    told = run(tmp_path, environ, "run", "job.yaml", code=1)
    assert "setup command 1 of 1 ended with exit code 7, expected 0: 'echo why >&2; exit 7'" in told
    (found,) = results(tmp_path)
    assert [(one["task"], one.get("reward"), one.get("reason")) for one in found if one["task"] == "bad"] == [
        ("bad", None, "SetupFailed")
    ] * 2
    assert [one["reward"] for one in found if one["task"] == "good"] == [1.0, 1.0]


@pytest.mark.parametrize("mode", ["Shared", "Separate"])
@pytest.mark.parametrize("stored", [True, False])
def test_setup_of_a_task_with_services_is_the_same_if_it_is_stored(
    tmp_path: Path, environ: dict[str, str], mode: str, stored: bool
) -> None:
    service = {
        "name": "db",
        "aliases": ["postgres"],
        # Its volume has what the setup wrote there. Its own files are there too.
        "command": ["cp /data/seed /data/read; cat /own >> /data/read; sleep 1000"],
        "files": [{"path": "/own", "content": "own"}],
        "volumes": {"data": "/data"},
        "health": {"command": "test -s /data/read"},
    }
    setup = [
        "cat /proc/sys/kernel/random/uuid > made && cp made /kept",
        "echo 127.0.0.1 extra.example >> /etc/hosts",
        "mkdir -p /srv/data && cp made /srv/data/seed && chmod 750 /srv/data",
        'test -z "$http_proxy" || test -n "$NO_PROXY"',
    ]
    checks = [
        "cmp made /kept",
        "grep -q ' db postgres' /etc/hosts && tail -n 1 /etc/hosts | grep -q extra.example",
        "test $(stat -c %U:%a /etc/hosts) = root:644",
        "test $(stat -c %a /srv/data) = 750 && cmp made /srv/data/seed",
        'test "$(cat made; printf own)" = "$(cat /srv/data/read)"',
        "test \"$(ls -A /srv/data | xargs)\" = 'read seed'",
    ]
    write_job(
        tmp_path,
        task(
            "served",
            *setup,
            services=[service],
            volumes={"data": "/srv/data"},
            solution=checks,
            verifier={"commands": checks, "mode": mode},
        ),
        sandbox={"storeSetup": stored},
    )
    assert "storeSetup" not in run(tmp_path, environ, "run", "job.yaml")
    run(tmp_path, environ, "run", "job.yaml", "--new")
    assert [[one["reward"] for one in found] for found in results(tmp_path)] == [[1.0, 1.0]] * 2
    assert len(list((tmp_path / "out").glob("builds/*"))) == int(stored), "the second run makes no other layer"


def test_validate_refuses_to_store_a_setup_in_plain(tmp_path: Path, environ: dict[str, str]) -> None:
    write_job(tmp_path, task("plain", "true"), sandbox={"storeSetup": True, "workspaces": {"mode": "Plain"}})
    told = run(tmp_path, environ, "validate", "job.yaml", "--offline", code=2)
    assert "spec.sandbox: storeSetup keeps a layer, which needs workspaces in Overlay" in told
    assert "leave storeSetup out" in told


@pytest.mark.parametrize("output", ["out", "other"])
def test_branches_of_a_rollout_with_a_stored_setup_start_from_its_snapshot_and_are_graded_over_its_setup(
    tmp_path: Path, environ: dict[str, str], output: str
) -> None:
    def bash(command: str) -> dict[str, Any]:
        return {"toolCalls": [{"name": "bash", "arguments": {"command": command}}]}

    finish = {"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]}

    def scripted(name: str, *turns: Mapping[str, Any]) -> dict[str, Any]:
        agent = {"tools": ["bash", "finish"]}
        return {"agent": agent, "model": {"scripted": {"tasks": [{"task": name, "members": [{"turns": list(turns)}]}]}}}

    sandbox = {"storeSetup": True, "snapshotEveryTurns": 1}
    # What the setup makes outside of the working directory is not carried into the grading.
    verifier = {"commands": ["cmp made copy", "cmp made /kept", "test -e branched"]}
    made = task("source", "cat /proc/sys/kernel/random/uuid > made", "cp made /kept", verifier=verifier)
    model = scripted("source", bash("cp made copy"), bash("true"), finish)
    write_job(tmp_path, made, name="source", groupSize=1, sandbox=sandbox, **model)
    run(tmp_path, environ, "run", "job.yaml")
    (folder,) = (tmp_path / "out").glob("source-*")
    (entry,) = (tmp_path / "out/builds").iterdir()
    entry.unlink()
    branch = {"branch": [{"job": f"out/{folder.name}", "index": 0, "turn": 0, "count": 2}]}
    copied = {"content": "copied"}
    model = scripted("source@0.0", copied, bash("touch branched"), finish)
    write_job(tmp_path, name="branch", sandbox=sandbox, tasks=branch, output={"uri": output}, **model)
    run(tmp_path, environ, "run", "job.yaml")
    (found,) = results(tmp_path, "branch", output)
    assert [one["reward"] for one in found] == [1.0, 1.0]
