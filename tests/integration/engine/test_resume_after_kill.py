"""SIGKILL at random moments: the same command continues, and the results are those of an undisturbed run."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.store import Store
from tests.support.fingerprint import fingerprint
from tests.support.full import FULL, first_seed
from tests.support.resumed import kill_in_the_midst, resumed_rollouts
from tests.support.s3 import S3

KILLS = 100 if FULL else 3
ROLLOUTCTL = [str(Path(sys.executable).parent / "rolloutctl"), "run", "job.yaml", "-o", "json"]
TURNS = 5
SEGMENTS = range(40)
"""The run is killed after one of these numbers of journal segments since its last start. It writes about 330 in all."""


def job(output: str) -> dict[str, Any]:
    """Return a job in which each turn adds a line and counts all of them, so that a lost or repeated call changes the
    output.
    """
    commands = [f"echo turn-{turn} >> log.txt; sleep 0.05; wc -l < log.txt; tail -n 1 log.txt" for turn in range(TURNS)]
    turns: list[dict[str, Any]] = [
        {"content": f"turn {n}", "toolCalls": [{"name": "bash", "arguments": {"command": c}}], "delaySeconds": 0.05}
        for n, c in enumerate(commands)
    ]
    turns.append({"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]})
    expected = "".join(f"turn-{turn}\n" for turn in range(TURNS))
    tasks = [
        {
            "name": f"count-{number}",
            "prompt": "Count to five.",
            "files": [{"path": "seed.txt", "content": f"{number}\n"}],
            "setup": ["echo prepared >> setup.txt"],
            "verifier": {
                "files": [{"path": "expected.txt", "content": expected}],
                "commands": ["cmp log.txt expected.txt", 'test "$(wc -l < setup.txt)" -eq 1'],
            },
        }
        for number in range(6)
    ]
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "counting"},
        "spec": {
            "mode": "Eval",
            "groupSize": 4,
            "tasks": {"inline": tasks},
            "model": {"scripted": {"tasks": [{"task": t["name"], "members": [{"turns": turns}]} for t in tasks]}},
            "agent": {"tools": ["bash", "finish"]},
            "runners": {"concurrency": 8},
            "output": {"uri": output},
        },
    }


def start(folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ROLLOUTCTL, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=(folder / "stderr.log").open("ab")
    )


def kill_until_done(
    folder: Path, store: Store, environ: dict[str, str], kills: int, rng: random.Random
) -> tuple[int, dict[str, Any]]:
    """Run to the end, with at most `kills` kills. Returns their number, and the last run's summary."""
    done = 0
    while True:
        process = start(folder, environ)
        if done < kills and kill_in_the_midst(process, store, rng, after=SEGMENTS):
            done += 1
            continue
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, (folder / "stderr.log").read_text()[-3000:]
        return done, json.loads(output)


def undisturbed(folder: Path, environ: dict[str, str]) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(job("./out")))
    finished = subprocess.run(ROLLOUTCTL, cwd=folder, env=environ, capture_output=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr.decode()[-3000:]


def killed_runs(
    tmp_path: Path, environ: dict[str, str], uri_of: Callable[[int], str], reading: Mapping[str, str]
) -> None:
    """Runs of the job with `KILLS` kills in all, each compared with an undisturbed one."""
    calm = tmp_path / "calm"
    calm.mkdir()
    undisturbed(calm, environ)
    rng = random.Random(first_seed())
    kills = number = resumed = 0
    while kills < KILLS:
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        uri = uri_of(number)
        (folder / "job.yaml").write_text(yaml.safe_dump(job(uri)))
        store = Store.open(uri if "://" in uri else str(folder / uri), reading)
        done, summary = kill_until_done(folder, store, environ, KILLS - kills, rng)
        assert summary["completed"]
        compare(Store.open(str(calm / "out"), {}), store)
        resumed += len(resumed_rollouts(store, "counting"))
        kills += done
        number += 1
    print(f"{kills} kills in {number} runs; {resumed} rollouts went on in another process")
    assert resumed >= KILLS // 2, "the kills met rollouts at work"


def compare(expected_store: Store, store: Store) -> None:
    async def both() -> None:
        expected, found = await fingerprint(expected_store, "counting"), await fingerprint(store, "counting")
        assert sorted(found) == list(range(24)), "every index once"
        assert {p["reward"] for p in expected.values()} == {1.0}
        for index, print_ in expected.items():
            assert found[index] == print_, f"rollout {index} differs: {found[index]} instead of {print_}"

    asyncio.run(both())


@pytest.mark.full
def test_randomly_killed_run_has_each_result_exactly_once_in_a_folder(tmp_path: Path, environ: dict[str, str]) -> None:
    killed_runs(tmp_path, environ, lambda number: "out", {})


def test_randomly_killed_run_has_each_result_exactly_once_on_failing_s3(
    tmp_path: Path, environ: dict[str, str], s3: S3, faulty_port: int
) -> None:
    environ |= s3.environ(faulty_port)
    killed_runs(tmp_path, environ, lambda number: s3.uri(f"killed-{number}"), s3.environ())


def test_runner_wrongly_believed_dead_is_fenced_off(tmp_path: Path, environ: dict[str, str]) -> None:
    """The first runner is stopped, another one takes over and finishes the run, and then the first one continues."""
    calm, folder = tmp_path / "calm", tmp_path / "disturbed"
    calm.mkdir()
    folder.mkdir()
    undisturbed(calm, environ)
    (folder / "job.yaml").write_text(yaml.safe_dump(job("./out")))
    frozen = start(folder, environ)
    while not list((folder / "out").glob("*/attempts/*/0/1-1.jsonl.zst")):
        assert frozen.poll() is None, (folder / "stderr.log").read_text()[-3000:]
        time.sleep(0.01)
    frozen.send_signal(signal.SIGSTOP)
    for lock in Path(environ["TMPDIR"]).glob("agent-rollouts-*/*/shard-0.lock"):
        lock.unlink()  # another machine has locks of its own
    second = start(folder, environ)
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, (folder / "stderr.log").read_text()[-3000:]
    assert json.loads(output)["completed"]
    before = asyncio.run(fingerprint(Store.open(str(folder / "out"), {}), "counting"))
    frozen.send_signal(signal.SIGCONT)
    frozen.communicate(timeout=300)
    assert frozen.returncode == 130
    assert "Another process has taken over this run" in (folder / "stderr.log").read_text()
    store = Store.open(str(folder / "out"), {})
    assert asyncio.run(fingerprint(store, "counting")) == before
    compare(Store.open(str(calm / "out"), {}), store)
    assert resumed_rollouts(store, "counting"), "the second went on with what the first had recorded"
