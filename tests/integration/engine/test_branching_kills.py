"""SIGKILL while a run branches: the same command continues, and the results are those of an undisturbed run."""

import asyncio
import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agent_runtime.recording.store import Store
from tests.integration.engine.branching import bash, branching, counting, done, run_of, searching
from tests.support.fingerprint import fingerprint
from tests.support.full import FULL, first_seed
from tests.support.resumed import kill_in_the_midst, resumed_rollouts

ROLLOUTCTL = [str(Path(sys.executable).parent / "rolloutctl"), "run", "job.yaml", "-o", "json"]
KILLS = 20 if FULL else 2
SEGMENTS = range(2, 8)
"""Numbers of segments of the journal, counted from a start, after which a kill comes."""


def killed_until_done(folder: Path, environ: dict[str, str], manifest: Mapping[str, Any], kills: int) -> int:
    """Run a job to its end, with SIGKILLs in between. Returns their number."""
    rng = random.Random(first_seed())
    (folder / "job.yaml").write_text(yaml.safe_dump(dict(manifest)))
    store = Store.open(str(folder / "out"), {})
    done_kills = 0
    while True:
        log = (folder / "stderr.log").open("ab")
        process = subprocess.Popen(ROLLOUTCTL, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=log)
        log.close()
        if done_kills < kills and kill_in_the_midst(process, store, rng, after=SEGMENTS):
            done_kills += 1
            continue
        process.communicate(timeout=120)
        assert process.returncode == 0, (folder / "stderr.log").read_text()[-3000:]
        return done_kills


def prints(folder: Path, name: str) -> dict[int, Any]:
    return asyncio.run(fingerprint(Store.open(str(folder / "out"), {}), name))


def test_killed_branching_run_has_each_result_exactly_once(tmp_path: Path, environ: dict[str, str]) -> None:
    sandbox = {"snapshotEveryTurns": 2}
    source = asyncio.run(done(tmp_path, counting(sandbox=sandbox)))
    manifest = branching(run_of(source), 2, count=4, sandbox=sandbox)
    turns = manifest["spec"]["model"]["scripted"]["tasks"][0]["members"][0]["turns"]
    turns[3:4] = [bash(f"echo b{number} >> log.txt; sleep 0.05; cat log.txt", 0.1) for number in range(4)]
    manifest["spec"]["tasks"]["branch"][0]["job"] = str(tmp_path / run_of(source))
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    for folder in (calm, disturbed):
        folder.mkdir()
    asyncio.run(done(calm, manifest))
    assert killed_until_done(disturbed, environ, manifest, KILLS) > 0
    assert prints(disturbed, "branch") == prints(calm, "branch")
    assert resumed_rollouts(Store.open(str(disturbed / "out"), {}), "branch")


def test_a_run_killed_between_checkpoints_gives_the_same_records(tmp_path: Path, environ: dict[str, str]) -> None:
    manifest = searching({})
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    for folder in (calm, disturbed):
        folder.mkdir()
    asyncio.run(done(calm, copy.deepcopy(manifest)))
    environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    assert killed_until_done(disturbed, environ, manifest, KILLS) > 0
    expected, found = prints(calm, "search"), prints(disturbed, "search")
    assert json.dumps(found) == json.dumps(expected)
    assert resumed_rollouts(Store.open(str(disturbed / "out"), {}), "search") == {0}
