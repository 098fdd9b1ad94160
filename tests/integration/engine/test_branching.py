"""Branches begin in the state that their source had: restored or run again, in both modes, through kills."""

import asyncio
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.engine.run import run_job
from agent_runtime.recording.reader import NoSuchRun, RunReader, open_run
from agent_runtime.recording.store import Store
from agent_runtime.tasks import TaskSourceError
from rollout_api.records import BranchRecord, Outcome, SnapshotRecord
from rollout_api.rollout_job import RolloutJob
from tests.integration.engine.branching import bash, branching, counting, job
from tests.support.fingerprint import fingerprint

ROLLOUTCTL = [str(Path(sys.executable).parent / "rolloutctl"), "run", "job.yaml", "-o", "json"]


async def done(folder: Path, manifest: Mapping[str, Any]) -> RunReader:
    """The finished run of a job."""
    parsed = RolloutJob.model_validate(manifest)
    summary = await run_job(parsed, base_dir=folder, environ=os.environ)
    assert summary.completed
    return await open_run(Store.open(str(folder / "out"), {}), parsed.metadata.name)


def run_of(reader: RunReader) -> str:
    return f"out/{reader.folder}"


async def observed(reader: RunReader, index: int) -> list[str]:
    """What each tool call of a rollout showed."""
    steps = (await reader.trajectory(index) or {})["steps"]
    return [result["content"] for step in steps for result in step.get("observation", {}).get("results", [])]


MODES = [{"mode": "Overlay"}, {"mode": "Plain"}]


@pytest.mark.parametrize("workspaces", MODES, ids=["overlay", "plain"])
async def test_branches_go_on_from_the_state_and_the_messages_of_a_turn(
    tmp_path: Path, workspaces: dict[str, str]
) -> None:
    sandbox = {"snapshotEveryTurns": 2, "workspaces": workspaces}
    source = await done(tmp_path, counting(sandbox=sandbox))
    when = (await observed(await done(tmp_path, branching(run_of(source), 3, sandbox={"workspaces": workspaces})), 0))[
        4
    ]
    branched = await done(tmp_path, branching(run_of(source), 3, 2, name="more", sandbox={"workspaces": workspaces}))
    results = branched.results()
    assert [result.outcome for result in results] == [Outcome.COMPLETED] * 4
    assert [result.reward for result in results] == [1.0] * 4
    assert [(result.turns, result.tool_calls) for result in results] == [(2, 2)] * 4
    assert {(r.group, r.branched_from.turn, r.branched_from.snapshot_turn) for r in results if r.branched_from} == {
        (0, 3, 3),
        (1, 2, 1),
    }
    for index in range(4):
        lines = "0\n1\n2\n3\nb\n" if index < 2 else "0\n1\n2\nb\n"
        shown = (await observed(branched, index))[-2]
        # The setup's own time: it was restored, and not run again.
        assert shown.startswith(lines)
        assert shown.removeprefix(lines) == when.removeprefix("0\n1\n2\n3\nb\n")
        steps = (await branched.trajectory(index) or {})["steps"]
        copied = [bool(step.get("is_copied_context")) for step in steps]
        assert copied == sorted(copied, reverse=True)
        assert copied.count(True) == 2 + (4 if index < 2 else 3)


async def test_without_a_snapshot_all_calls_run_again_and_what_differs_is_told(tmp_path: Path) -> None:
    commands = ["echo 0 >> log.txt", "date +%s.%N", "echo 2 >> log.txt; cat log.txt"]
    source = await done(tmp_path, counting(commands=commands))
    branched = await done(tmp_path, branching(run_of(source), 2, count=3))
    for result in branched.results():
        origin = result.branched_from
        assert isinstance(origin, BranchRecord)
        assert origin.snapshot_turn is None
        assert len(origin.differences) == 1
        assert origin.differences[0].startswith("turn 1, bash (call-1-0): recorded '17")
    assert (await observed(branched, 0))[2] == "0\n2\n[exit code 0]"  # what the model is told is what was recorded
    assert (await observed(branched, 0))[3].startswith("0\n2\nb\n")


async def test_a_strict_branch_refuses_to_begin_where_a_call_gives_something_else(tmp_path: Path) -> None:
    source = await done(tmp_path, counting(commands=["date +%s.%N", "echo 1"]))
    strict = branching(run_of(source), 1, strict=True, attempts={"limit": 2, "backoffSeconds": 0})
    for result in (await done(tmp_path, strict)).results():
        assert result.outcome is Outcome.INFRA_FAILED
        assert result.reason == "BranchDiffers"
        assert "1 tool calls that were run again differ from the record" in result.message
        assert result.reward is None


async def test_a_branch_can_be_branched_and_needs_its_source_no_more(tmp_path: Path) -> None:
    source = await done(tmp_path, counting(sandbox={"snapshotEveryTurns": 1}))
    first = await done(tmp_path, branching(run_of(source), 1, sandbox={"snapshotEveryTurns": 1}))
    shutil.rmtree(tmp_path / run_of(source))
    again = branching(run_of(first), 2, name="again", then="echo c >> log.txt; cat log.txt")
    script = again["spec"]["model"]["scripted"]["tasks"][0]
    script["task"] = "count@0.1@0.2"
    second = await done(tmp_path, again)
    assert (await observed(second, 1))[-2] == "0\n1\nb\nc\n[exit code 0]"


async def test_folders_that_plain_is_told_to_keep_are_there_in_a_branch(tmp_path: Path) -> None:
    plain = {"workspaces": {"mode": "Plain"}}
    sandbox = {"snapshotEveryTurns": 1, "snapshotPaths": ["/data"], **plain}
    command = "mkdir -p ../data/sub && echo kept > ../data/sub/file; ln -s file ../data/sub/link"
    source = await done(tmp_path, counting(sandbox=sandbox, commands=[command]))
    branched = await done(
        tmp_path, branching(run_of(source), 0, then="cat ../data/sub/link; echo b > log.txt", sandbox=plain)
    )
    assert (await observed(branched, 0))[-2].startswith("kept\n")


async def snapshot_of_turn(store: Store, turn: int) -> str | None:
    """The run whose rollout 0 has a snapshot of that turn; None before there is one."""
    with contextlib.suppress(NoSuchRun):
        reader = await open_run(store, "source")
        if any(isinstance(record, SnapshotRecord) and record.turn == turn for record in await reader.records(0)):
            return reader.folder
    return None


async def test_a_rollout_that_still_runs_is_branched_from_what_is_recorded(tmp_path: Path) -> None:
    commands = [f"echo {turn} >> log.txt; cat log.txt" for turn in range(3)]
    manifest = counting(sandbox={"snapshotEveryTurns": 1})
    turns = [*map(bash, commands), bash("echo late", 60)]
    manifest["spec"]["model"]["scripted"]["tasks"][0]["members"][0]["turns"] = turns
    running = asyncio.create_task(done(tmp_path, manifest))
    store = Store.open(str(tmp_path / "out"), {})
    while not running.done() and not (folder := await snapshot_of_turn(store, 2)):  # noqa: ASYNC110 another process would look so
        await asyncio.sleep(0.05)
    branched = await done(tmp_path, branching(f"out/{folder}", 2))
    assert [result.reward for result in branched.results()] == [1.0, 1.0]
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn": 9}, "turn 9 is not recorded: it has turns 0 to 4 to branch from"),
        ({"index": 7}, "it has 1 rollouts; lower index"),
        ({"job": "out/missing-00000000"}, "has no run of 'missing-00000000'"),
    ],
)
async def test_what_cannot_be_branched_is_told_before_the_first_rollout(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = await done(tmp_path, counting())
    manifest = branching(run_of(source), 1)
    manifest["spec"]["tasks"]["branch"][0] |= change
    with pytest.raises(TaskSourceError, match=message):
        await done(tmp_path, manifest)


async def test_another_agent_than_the_sources_is_refused(tmp_path: Path) -> None:
    source = await done(tmp_path, counting())
    manifest = branching(run_of(source), 1, agent={"tools": ["bash", "finish"], "systemPrompt": "Be brief."})
    with pytest.raises(TaskSourceError, match=r"spec\.agent\.systemPrompt is 'Be brief\.' here and was None there"):
        await done(tmp_path, manifest)


@pytest.mark.parametrize("workspaces", MODES, ids=["overlay", "plain"])
async def test_an_agent_goes_back_to_its_checkpoints(tmp_path: Path, workspaces: dict[str, str]) -> None:
    reader = await done(tmp_path, searching({"workspaces": workspaces, "snapshotPaths": ["/else"]}))
    result = reader.results()[0]
    assert (result.outcome, result.reward) == (Outcome.COMPLETED, 1.0)
    shown = result.message.split(" | ")
    assert shown[1:4] == [f"start\n{way}\nstart\n{way}\n[exit code 0]" for way in ("one", "two", "three")]
    assert shown[4] == "start\ntwo\n[exit code 0]"
    assert result.branches == 5
    (snapshot,) = [record for record in await reader.records(0) if isinstance(record, SnapshotRecord)]
    assert (snapshot.turn, bool(snapshot.layers)) == (0, True)


def searching(sandbox: Mapping[str, Any]) -> dict[str, Any]:
    task = {
        "name": "search",
        "prompt": "Search.",
        "verifier": {"commands": ['test "$(cat log.txt | xargs)" = "start two"']},
    }
    turns = [{"content": "go", "delaySeconds": 0.05}] * 5
    agent = {"type": "tests.integration.engine.branching:Searcher", "tools": ["bash"]}
    return job("search", {"inline": [task]}, {"search": turns}, agent=agent, sandbox=dict(sandbox))


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """With a temporary folder of its own; not the test's, whose path may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        yield dict(os.environ, TMPDIR=temporary)


def killed_until_done(folder: Path, environ: dict[str, str], manifest: Mapping[str, Any], kills: int) -> int:
    """Run a job to its end, with SIGKILLs on the way; how many there were."""
    seed = int(os.environ.get("ROLLOUT_SEED", time.time()))
    print(f"ROLLOUT_SEED={seed}")
    rng = random.Random(seed)
    (folder / "job.yaml").write_text(yaml.safe_dump(dict(manifest)))
    done_kills = 0
    while True:
        log = (folder / "stderr.log").open("ab")
        process = subprocess.Popen(ROLLOUTCTL, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=log)
        log.close()
        try:
            process.communicate(timeout=rng.uniform(0.7, 1.6) if done_kills < kills else 120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            done_kills += 1
            continue
        assert process.returncode == 0, (folder / "stderr.log").read_text()[-3000:]
        return done_kills


def prints(folder: Path, name: str) -> dict[int, Any]:
    return asyncio.run(fingerprint(Store.open(str(folder / "out"), {}), name))


def test_a_branching_run_that_is_killed_loses_and_doubles_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
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
    assert killed_until_done(disturbed, environ, manifest, kills=4) > 0
    assert prints(disturbed, "branch") == prints(calm, "branch")


def test_an_agent_that_is_killed_among_its_checkpoints_ends_as_it_would_have(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    manifest = searching({})
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    for folder in (calm, disturbed):
        folder.mkdir()
    asyncio.run(done(calm, copy.deepcopy(manifest)))
    environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    killed_until_done(disturbed, environ, manifest, kills=4)
    expected, found = prints(calm, "search"), prints(disturbed, "search")
    assert json.dumps(found) == json.dumps(expected)
