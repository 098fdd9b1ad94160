"""Jobs with random combinations of features are killed at random moments. Each is resumed, and its records equal those of an
undisturbed run."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.export.formats import Format, export
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.support.fingerprint import fingerprint
from tests.support.full import FULL, first_seed
from tests.support.resumed import kill_in_the_midst, resumed_rollouts

JOBS = 40 if FULL else 1
KILLS = 2
CHECKED_SEED = 13
"""An own agent with checkpoints and snapshots, in `Overlay`, graded in `Separate`; a plugin changes its tool calls. The full
lane uses new seeds instead.
"""
NAME = "random"
ROLLOUTCTL = [sys.executable, "-m", "rolloutctl.main", "run", "job.yaml", "-o", "json"]

OWN = '''
import json

from agent_rollouts.agents import SubTask
from agent_rollouts.models import ToolCall
from agent_rollouts.plugins import Refuse


async def one_turn(context, messages):
    """Return whether the model called tools."""
    reply = await context.call_model(list(messages))
    messages.append(reply.message)
    for observation in await context.call_tools(reply.tool_calls) if reply.tool_calls else []:
        messages.append({"role": "tool", "tool_call_id": observation.call_id, "content": observation.content})
    return bool(reply.tool_calls)


class Explorer:
    """Goes back to a checkpoint after each second turn, up to three times."""

    async def run(self, context):
        messages = [{"role": "user", "content": context.task.prompt}]
        start = await context.checkpoint()
        for turn in range(20):
            if not await one_turn(context, messages):
                return "no calls"
            if turn % 2 and turn < 6:
                await context.go_back(start)
                start = await context.checkpoint()
        return "done"


class Delegates:
    """Lets a sub-agent make the first two turns, and then makes its own."""

    async def run(self, context):
        await context.delegate(Loop(), SubTask(prompt="First part.", max_turns=2))
        return await Loop().run(context)


class Loop:
    async def run(self, context):
        messages = [{"role": "user", "content": context.task.prompt}]
        while await one_turn(context, messages):
            pass
        return "no calls"


class Edits:
    """Changes commands before they run, and refuses one."""

    def filter_tool_call(self, rollout, call):
        if "refused" in call.arguments:
            return Refuse("not this one")
        if "edit" not in call.arguments or call.name != "bash":
            return None
        command = json.loads(call.arguments)["command"] + " # edited"
        return ToolCall(call.id, call.name, json.dumps({"command": command}))


class Changes:
    """Changes the task."""

    def modify_task(self, rollout, task):
        return task.model_copy(update={"setup": [*task.setup, "echo changed > changed.txt"]})


class Scores:
    def evaluate_rollout(self, finished):
        return {"calls": len(finished.tool_uses)}

    def after_rollout(self, result):
        if result.member == 1:
            raise ValueError("of a plugin")
'''


def bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}


def turn(rng: random.Random, number: int) -> dict[str, Any]:
    """Return one turn of the scripted model. A repeated or lost call changes what a later turn sees."""
    count = f"echo {number} >> log.txt; wc -l < log.txt; tail -n 1 log.txt"
    calls = rng.choice(
        [
            [bash(count)],
            [bash(count), bash("cat log.txt | wc -c")],
            [bash(f"{count}; exit 3")],
            [bash(count), {"name": "editor", "arguments": {"command": "view", "path": "seed.txt"}}],
            [
                {"name": "editor", "arguments": {"command": "create", "path": f"f{number}.txt", "file_text": "a\nb\n"}},
                bash(f"cat f{number}.txt; {count}"),
            ],
            [bash(f"{count}; head -c 200000 /dev/zero | tr '\\0' x > big; wc -c < big")],
            [bash(f"{count}; ln -sf seed.txt link; chmod 600 seed.txt; ls -l seed.txt | cut -c1-10")],
            [bash(f"{count}; (sleep 60 >/dev/null 2>&1 &) ; echo left")],
            [bash(f"{count}; sleep 0.3")],
            [{"name": "absent", "arguments": {}}, bash(count)],
            [{"name": "bash", "arguments": {"wrong": 1}}],
            [bash(f"echo refused; {count}")],
            [bash(f"echo edit; {count}")],
            [bash("rm -rf /")],
        ]
    )
    return {"content": f"turn {number}", "toolCalls": calls, "delaySeconds": rng.choice([0, 0.02, 0.1])}


FINISH = {"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]}


def task(rng: random.Random, number: int, mode: str, *, stepwise: bool) -> dict[str, Any]:
    commands = ["test -s log.txt", "grep -q 1 log.txt", 'test "$(wc -l < log.txt)" -gt 3', "test -e seed.txt"]
    verifier = {"commands": rng.sample(commands, 2), "files": [{"path": "expected.txt", "content": "x\n"}]}
    made: dict[str, Any] = {
        "name": f"task-{number}",
        "files": [{"path": "seed.txt", "content": f"{number}\n"}],
        "setup": rng.choice([[], ["echo prepared >> setup.txt"], ["mkdir -p d; echo 0 > log.txt"]]),
    }
    if not stepwise:
        return made | {"prompt": "Count.", "verifier": verifier | {"mode": mode}}
    names = ("first", "second")
    steps = [{"name": name, "prompt": f"Count, {name}.", "verifier": {"commands": commands[:2]}} for name in names]
    return made | {"prompt": "Count in steps.", "steps": steps}


def job(rng: random.Random) -> dict[str, Any]:
    agents: list[dict[str, Any]] = [
        {"tools": ["bash", "editor", "finish"], "maxTurns": rng.choice([4, 50])},
        {"type": "ReAct", "tools": ["bash", "editor", "finish"]},
        {"type": "own:Explorer", "tools": ["bash", "editor", "finish"]},
        {"type": "own:Delegates", "tools": ["bash", "editor", "finish"]},
    ]
    agent = rng.choice(agents)
    stepwise = agent.get("type") in (None, "ReAct") and rng.random() < 0.3
    workspaces: dict[str, Any] = {"mode": rng.choice(["Plain", "Overlay", "Overlay"])}
    if rng.random() < 0.3:
        workspaces["perSandbox"] = rng.choice([1, 2])
    mode = "Shared" if workspaces["mode"] == "Plain" or rng.random() < 0.3 else "Separate"
    tasks = [task(rng, number, mode, stepwise=stepwise) for number in range(rng.choice([1, 2, 3]))]
    scripts = []
    for one in tasks:
        turns = [turn(rng, number) for number in range(rng.choice([2, 4, 7]))]
        more = [turn(rng, number + 10) for number in range(2)] if stepwise else []
        scripts.append(
            {"task": one["name"], "members": [{"turns": [*turns, FINISH, *more, *([FINISH] if more else [])]}]}
        )
    plugins = [
        [],
        [{"name": "SafetyFilter"}],
        [{"name": "own:Edits"}],
        [{"name": "own:Changes"}],
        [{"name": "own:Scores"}],
    ]
    sandbox: dict[str, Any] = {"workspaces": workspaces}
    if rng.random() < 0.3:
        sandbox["snapshotEveryTurns"] = rng.choice([1, 2])
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": NAME},
        "spec": {
            "mode": "Eval",
            "groupSize": rng.choice([1, 2, 3]),
            "tasks": {"inline": tasks},
            "model": {"scripted": {"tasks": scripts}},
            "agent": agent,
            "sandbox": sandbox,
            "plugins": [use for chosen in rng.sample(plugins, 2) for use in chosen],
            "runners": {"concurrency": rng.choice([1, 2, 6])},
            "output": {"uri": "./out"},
        },
    }


def start(folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    log = (folder / "stderr.log").open("ab")
    return subprocess.Popen(ROLLOUTCTL, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=log)


def run(folder: Path, made: dict[str, Any], environ: dict[str, str], rng: random.Random | None) -> Store:
    """Run a job to its end in a new folder, with kills if there is an `rng`."""
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(made))
    (folder / "own.py").write_text(OWN)
    (folder / "out").mkdir()
    store, kills = Store.open(str(folder / "out"), {}), 0
    while True:
        process = start(folder, environ)
        if rng is not None and kills < KILLS and kill_in_the_midst(process, store, rng, after=range(12)):
            kills += 1
            continue
        process.communicate(timeout=300)
        assert process.returncode == 0, (folder / "stderr.log").read_text()[-3000:]
        return store


@pytest.mark.timeout(3600)
def test_random_job_gives_the_same_when_it_is_killed(tmp_path: Path, environ: dict[str, str]) -> None:
    first = first_seed(CHECKED_SEED)
    for seed in range(first, first + JOBS):
        rng = random.Random(seed)
        made = job(rng)
        calm = run(tmp_path / f"calm-{seed}", made, environ, None)
        killed = run(tmp_path / f"killed-{seed}", made, environ, rng)
        shown = f"ROLLOUT_SEED={seed}\n{yaml.safe_dump(made['spec'])}"
        asyncio.run(compare(calm, killed, shown))
        if is_separate(made):  # a kill during grading in the agent's own workspace costs the attempt
            resumed_rollouts(killed, NAME)


def is_separate(made: dict[str, Any]) -> bool:
    return all(one.get("verifier", {}).get("mode") == "Separate" for one in made["spec"]["tasks"]["inline"])


async def compare(calm: Store, killed: Store, shown: str) -> None:
    expected, found = await fingerprint(calm, NAME), await fingerprint(killed, NAME)
    assert found.keys() == expected.keys(), shown
    for index, wanted in expected.items():
        assert found[index] == wanted, f"rollout {index} differs\n{shown}"
    run = await open_run(killed, NAME)
    for form in (Format.RESULTS, Format.ATIF, Format.OPENAI):
        assert len([line async for line in export(run, form)]) >= len(expected), f"{form}\n{shown}"
