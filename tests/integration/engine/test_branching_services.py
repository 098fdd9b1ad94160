"""Snapshots of tasks with services have the files of all workspaces at one moment, and branches start from them."""

import asyncio
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.layers import Layers
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from agent_runtime.tasks import TaskSourceError
from rollout_api.records import Outcome, SnapshotRecord
from tests.integration.engine.branching import FINISH, bash, branching, done, job, run_of
from tests.integration.engine.test_branching import ROLLOUTCTL, observed

COUNTER = """
import os
def read(path):
    return int(open(path).read()) if os.path.exists(path) else 0
def write(path, number):
    with open(path + '.new', 'w') as file:
        file.write(str(number))
    os.rename(path + '.new', path)
own, shared, private = read('/own'), read('/shared/number'), read('/private/number')
with open('/shared/starts', 'a') as file:
    file.write(f'{own} {shared} {private}\\n')
number = own
while number := number + 1:
    write('/own', number)
    write('/shared/number', number)
    write('/private/number', number)
"""
"""Counts in its own files, in a volume of the agent, and in a volume that the agent does not have."""
UNTIL_COUNTED = "n=$(cat /site/number); until test $(cat /site/number) -gt $((n + 20)); do sleep 0.02; done"


def counter() -> dict[str, Any]:
    return {
        "name": "counter",
        "command": ["python3", "-c", COUNTER],
        "volumes": {"site": "/shared", "private": "/private"},
        "dependsOn": {"seed": "Completed"},
        "health": {"command": "test -s /own"},
    }


def seed() -> dict[str, Any]:
    """A service that must not run again in a branch."""
    return {"name": "seed", "command": ["echo seeded >> /data/seeds"], "volumes": {"site": "/data"}}


def other() -> dict[str, Any]:
    return {"name": "other", "command": ["sleep 1000"], "volumes": {"private": "/seen"}}


def source(commands: Sequence[str], **spec: Any) -> dict[str, Any]:
    task = {
        "name": "count",
        "prompt": "Count.",
        "volumes": {"site": "/site"},
        "services": [counter(), seed(), other()],
        "verifier": {"mode": "Shared", "commands": ["test -s /site/number"]},
    }
    return job("source", {"inline": [task]}, {"count": [*map(bash, commands), FINISH]}, **spec)


# The agent's files are read before the counter's, and many take a while.
WRITES = f"{UNTIL_COUNTED}; echo agent > /site/agent; mkdir many; cd many; seq 5000 | xargs touch"


async def snapshots_of(reader: RunReader) -> list[SnapshotRecord]:
    return [record for record in await reader.records(0) if isinstance(record, SnapshotRecord)]


def branching_in(folder: Path, reader: RunReader, turn: int, then: str) -> dict[str, Any]:
    """Return a job that branches the source in another folder, into which the layers are copied."""
    folder.mkdir()
    manifest = branching(str(folder.parent / run_of(reader)), turn, then=then)
    manifest["spec"]["agent"]["maxTurns"] = 10
    return manifest


async def test_branch_starts_its_services_from_one_moment_of_their_files(tmp_path: Path) -> None:
    first = await done(tmp_path, source([WRITES, "rm -r many /site/agent"], sandbox={"snapshotEveryTurns": 1}))
    taken = await snapshots_of(first)
    assert [(record.turn, record.message, sorted(record.services)) for record in taken] == [
        (turn, "", ["counter", "other", "seed"]) for turn in (0, 1)
    ]
    until_started = "until test $(wc -l < /site/starts) = 2; do sleep 0.02; done"
    show = f"{until_started}; cat /site/starts /site/seeds /site/agent; ls; {UNTIL_COUNTED}; echo counts"
    reader = await done(tmp_path / "other", branching_in(tmp_path / "other", first, 0, show))
    for index, result in enumerate(reader.results()):
        assert (result.outcome, result.reward) == (Outcome.COMPLETED, 1.0)
        assert result.branched_from is not None
        assert (result.branched_from.snapshot_turn, result.branched_from.differences) == (0, [])
        start, restart, *rest = (await observed(reader, index))[-2].splitlines()
        assert (start, rest[:-1]) == ("0 0 0", ["seeded", "agent", "many", "counts"])
        own, shared, private = map(int, restart.split())
        assert own >= shared >= private >= own - 1 > 0, "the files are of several moments"
    stored = Store.open(str(tmp_path / "other/out"), {})
    named = {meta.key.rpartition("/")[2] for meta in await stored.list(f"{reader.folder}/layers")}
    assert {layer.digest for layer in taken[0].all_layers} <= named
    assert sorted(named) == sorted(await Layers(stored, stored).stored())


async def test_turn_without_a_snapshot_is_not_branched_in_a_task_with_services(tmp_path: Path) -> None:
    first = await done(tmp_path, source(["true", "true", "true"], sandbox={"snapshotEveryTurns": 2}))
    assert [record.turn for record in await snapshots_of(first)] == [1]
    with pytest.raises(
        TaskSourceError, match="there is no snapshot of turn 2; a task with services can only be branched"
    ):
        await done(tmp_path, branching(run_of(first), 2))


def state_of(program: str) -> str:
    """Return the letter of its state as in proc(5); empty if it does not run."""
    found = subprocess.run(["pgrep", "-f", program], capture_output=True, text=True, check=False).stdout.split()
    shown = subprocess.run(["ps", "-o", "state=", "-p", ",".join(found)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()


def test_services_continue_when_their_runner_is_killed_during_a_snapshot(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    name = f"counter-of-{tmp_path.parent.name}"
    manifest = source([WRITES, f"{UNTIL_COUNTED}; wc -l < /site/starts"], sandbox={"snapshotEveryTurns": 1})
    manifest["spec"]["tasks"]["inline"][0]["services"][0]["args"] = [name]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    running = subprocess.Popen(ROLLOUTCTL, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)
    while state_of(name) != "T":
        assert running.poll() is None, "no snapshot was taken"
        time.sleep(0.01)
    running.kill()
    running.wait()
    until = time.monotonic() + 120
    while state_of(name) == "T":
        assert time.monotonic() < until, "its pause never ends"
        time.sleep(0.1)
    assert state_of(name), "it lives on"
    subprocess.run(ROLLOUTCTL, cwd=tmp_path, env=environ, check=True, stdout=subprocess.DEVNULL)
    reader = asyncio.run(open_run(Store.open(str(tmp_path / "out"), {}), "source"))
    (result,) = reader.results()
    assert (result.reward, result.attempt) == (1.0, 0)
    assert "1\n[exit code 0]" in asyncio.run(observed(reader, 0)), "the service was started once"
    assert [record.message for record in asyncio.run(snapshots_of(reader))] == ["", ""]
