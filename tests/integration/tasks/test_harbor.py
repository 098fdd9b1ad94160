"""Harbor's task folders, run unchanged on this machine."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from agent_runtime.engine.check import check_job
from agent_runtime.engine.events import Event, RolloutSealed, TurnEnded
from agent_runtime.engine.run import run_job
from agent_runtime.tasks import load_tasks
from rollout_api.manifest import validate
from rollout_api.records import Outcome, Result
from rollout_api.rollout_job import RolloutJob
from tests.support.harbor_tasks import hello_world, in_two_steps, terminal_bench
from tests.support.s3 import BUCKET, serve_s3

Turn = dict[str, Any]


def call(command: str) -> Turn:
    return {"toolCalls": [{"name": "bash", "arguments": {"command": command}}]}


async def run(
    folder: Path,
    agent: str | Sequence[Turn],
    *,
    environ: dict[str, str] | None = None,
    uri: str | None = None,
    form: str = "Harbor",
    max_turns: int = 9,
    new: bool = True,
    stop_at_turn: int | None = None,
    **spec: Any,
) -> list[Result]:
    """Run all tasks below a folder, by an agent without a model, or by a model that takes these turns."""
    results: list[Result] = []
    scripted = {"tasks": [{"task": p.name, "members": [{"turns": list(agent)}]} for p in sorted(folder.iterdir())]}
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "harbor"},
        "spec": {
            "mode": "Eval",
            "tasks": {"from": {"uri": uri or str(folder), "format": form}},
            "agent": {"type": agent}
            if isinstance(agent, str)
            else {"tools": ["bash", "finish"], "maxTurns": max_turns},
            "model": None if isinstance(agent, str) else {"scripted": scripted},
            "output": {"uri": str(folder.parent / "out")},
            **spec,
        },
    }

    def observe(event: Event) -> None:
        if isinstance(event, RolloutSealed):
            results.append(event.result)
        if isinstance(event, TurnEnded) and event.turn == stop_at_turn:
            stop.set()

    variables, stop = environ or dict(os.environ), asyncio.Event()
    await run_job(validate(RolloutJob, job), base_dir=folder, environ=variables, new=new, observer=observe, stop=stop)
    return sorted(results, key=lambda result: result.index)


async def rewards(folder: Path, agent: str | Sequence[Turn], **spec: Any) -> list[float | None]:
    results = await run(folder, agent, **spec)
    assert {result.outcome for result in results} == {Outcome.COMPLETED}, results
    return [result.reward for result in results]


USERS = '\n[agent]\nuser = "1000"\n\n[verifier]\nuser = "1001"\n'
SEPARATE_USERS = (
    'artifacts = ["/app/hello.txt"]\n[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
    '[agent]\nuser = "1000"\n[verifier]\nenvironment_mode = "separate"\n'
)


async def test_agents_and_verifiers_of_other_users_than_root_start_and_are_graded(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "shared", USERS)
    hello_world(tmp_path / "tasks" / "separate", **{"task.toml": SEPARATE_USERS})
    steps = in_two_steps(tmp_path / "tasks" / "steps")
    (steps / "task.toml").write_text((steps / "task.toml").read_text() + USERS)
    assert await rewards(tmp_path / "tasks", "Oracle") == [1, 1, 0.75]
    assert await rewards(tmp_path / "tasks", [call("id -u > hello.txt")]) == [0, 0, 0.25]


async def test_solution_is_rewarded_and_doing_nothing_is_not(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello-world")
    (solved,) = await run(tmp_path / "tasks", "Oracle")
    assert (solved.reward, solved.forgeable, solved.tags) == (1, True, ["trivial", "easy"]), solved.message
    assert await rewards(tmp_path / "tasks", "Nop") == [0]


async def test_a_reward_that_the_agent_planted_does_not_count(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello-world")
    planted = call(
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; mkdir -p /tests; echo > /tests/test.sh"
    )
    for mode in ({}, {"mode": "Separate"}):
        assert await rewards(tmp_path / "tasks", [planted, {"content": "done"}], verifier=mode) == [0]


async def test_a_separate_verifier_gets_the_declared_artifacts_and_nothing_else(tmp_path: Path) -> None:
    separate = '\n[verifier]\nenvironment_mode = "separate"\nenv = { WANTED = "${WANTED:-both}" }\n'
    test = (
        "#!/bin/sh\nif [ -e hello.txt ]; then echo 0\n"
        "elif [ -s /logs/artifacts/a ] && [ -s /data/b ] && [ $WANTED = both ]\n"
        "then echo 1; else echo 0.5; fi > /logs/verifier/reward.txt\n"
    )
    files: dict[str, str | bytes] = {"tests/test.sh": test}
    folder = hello_world(tmp_path / "tasks" / "t", separate, **files)
    config = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(f'artifacts = ["/data/b"]\n{config}')
    work = call("echo 1 > /logs/artifacts/a; mkdir -p /data; echo 2 > /data/b; echo 3 > hello.txt")
    assert await rewards(tmp_path / "tasks", [work, {"content": "done"}]) == [1]
    assert await rewards(tmp_path / "tasks", "Nop") == [0.5]


async def test_an_artifact_that_links_to_the_tests_does_not_bring_them(tmp_path: Path) -> None:
    separate = '\n[verifier]\nenvironment_mode = "separate"\n'
    test = "cmp /tests/answer /logs/artifacts/a && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    files: dict[str, str | bytes] = {"tests/test.sh": test, "tests/answer": b"\x00\xff42"}
    hello_world(tmp_path / "tasks" / "t", separate, **files)
    assert await rewards(tmp_path / "tasks", [call("ln -s /tests/answer /logs/artifacts/a"), {"content": "x"}]) == [0]
    told = call(r"printf '\000\37742' > /logs/artifacts/a")
    assert await rewards(tmp_path / "tasks", [told, {"content": "x"}]) == [1]


FORGES = "import os\nopen('/logs/verifier/reward.json', 'w').write('1')\nos._exit(0)\n"
PLANTED_IN_ARTIFACTS = {
    "a module of the standard library": f"cat > json.py <<'EOF'\n{FORGES}EOF",
    "another interpreter in the prepared environment": "rm env/bin/python\nprintf '#!/bin/sh\\nexit 0\\n' > env/bin/python"
    "\nchmod +x env/bin/python",
    "a module in the prepared environment": f"cat > env/lib/python3/site-packages/used.py <<'EOF'\n{FORGES}EOF",
}


@pytest.mark.parametrize("planted", PLANTED_IN_ARTIFACTS)
async def test_a_separate_verifier_is_not_forged_by_what_python_loads_from_artifacts(
    tmp_path: Path, planted: str
) -> None:
    separate = '\n[verifier]\nenvironment_mode = "separate"\n'
    # The environment is made where an image would have it: before the agent.
    healthcheck = (
        '\n[environment.healthcheck]\ncommand = """mkdir -p /app/env/bin /app/env/lib/python3/site-packages && '
        "cd /app/env && touch pyvenv.cfg lib/python3/site-packages/used.py && "
        "printf '#!/bin/sh\\nPYTHONPATH=/app/env/lib/python3/site-packages exec python3 \"$@\"\\n' > bin/python && "
        'chmod +x bin/python"""\n'
    )
    test = (
        "#!/bin/sh\ncd /app\n"
        'if env/bin/python -c \'import json, used; assert open("ok").read() == "42\\n"\'; then echo 1; else echo 0; fi'
        " > /logs/verifier/reward.txt\n"
    )
    folder = hello_world(tmp_path / "tasks" / "t", separate + healthcheck, **{"tests/test.sh": test})
    config = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(f'artifacts = ["/app"]\n{config}')
    done = {"content": "done"}
    assert await rewards(tmp_path / "tasks", [call(f"cd /app\n{PLANTED_IN_ARTIFACTS[planted]}"), done]) == [0]
    assert await rewards(tmp_path / "tasks", [call("echo 42 > /app/ok"), done]) == [1]


REWARD = "/logs/verifier/reward.txt"
SEARCHED_IN_ARTIFACTS = {
    "a program": (
        'PATH = "/app/bin:/usr/bin:/bin"',
        "#!/bin/bash\ncat /tests/answer > $REWARD\n",
        "mkdir -p bin; printf '#!/bin/sh\\necho 1\\n' > bin/cat; chmod +x bin/cat",
    ),
    "a module": (
        'PYTHONPATH = "/app/lib"',
        "#!/bin/bash\npython3 -c 'import json; print(getattr(json, \"forged\", 0))' > $REWARD\n",
        "mkdir -p lib; echo 'forged = 1' > lib/json.py",
    ),
    "a module in a folder that the script enters": (
        'NAME = "value"',
        "#!/bin/bash\ncd /app/lib\npython3 -c 'import json; print(getattr(json, \"forged\", 0))' > $REWARD\n",
        "mkdir -p lib; echo 'forged = 1' > lib/json.py",
    ),
}


@pytest.mark.parametrize("planted", SEARCHED_IN_ARTIFACTS)
async def test_a_separate_verifier_finds_nothing_planted_where_it_looks_in_artifacts(
    tmp_path: Path, planted: str
) -> None:
    variable, test, command = SEARCHED_IN_ARTIFACTS[planted]
    config = SEPARATE_USERS.replace("/app/hello.txt", "/app").replace('[agent]\nuser = "1000"\n', "")
    files: dict[str, str | bytes] = {"tests/test.sh": test.replace("$REWARD", REWARD), "tests/answer": "0\n"}
    hello_world(tmp_path / "tasks" / "t", **{"task.toml": f"{config}[verifier.env]\n{variable}\n"}, **files)
    assert await rewards(tmp_path / "tasks", [call(command)]) == [0]


async def test_separate_verifier_gets_artifacts_outside_the_working_directory(tmp_path: Path) -> None:
    config = SEPARATE_USERS.replace('"/app/hello.txt"', '"/tmp/data/kept", "/tmp/data/gone"').replace(
        '"/app"', '"/srv"'
    )
    healthcheck = '[environment.healthcheck]\ncommand = "mkdir /tmp/data && touch /tmp/data/kept /tmp/data/gone"\n'
    test = "#!/bin/sh\necho 0 > $REWARD\ngrep new /tmp/data/kept && test ! -e /tmp/data/gone && echo 1 > $REWARD\n"
    config = config.replace("[agent]", f"{healthcheck}[agent]")
    hello_world(tmp_path / "tasks" / "t", **{"task.toml": config, "tests/test.sh": test.replace("$REWARD", REWARD)})
    assert await rewards(tmp_path / "tasks", [call("echo new > /tmp/data/kept; rm /tmp/data/gone")]) == [1]


async def test_each_step_is_rewarded_in_the_same_workspace(tmp_path: Path) -> None:
    in_two_steps(tmp_path / "tasks" / "t")
    (solved,) = await run(tmp_path / "tasks", "Oracle")
    assert (solved.reward, solved.rewards, solved.forgeable) == (0.75, {"style": 0.5}, True), solved.message
    in_two_steps(tmp_path / "tasks" / "t", strategy="final")
    assert await rewards(tmp_path / "tasks", "Oracle") == [0.5]


async def test_a_step_below_its_least_reward_is_the_last(tmp_path: Path) -> None:
    in_two_steps(tmp_path / "tasks" / "t")
    (stopped,) = await run(tmp_path / "tasks", "Nop")
    assert (stopped.reward, stopped.passed) == (0.25, False)
    assert "step write: reward is 0.25, below minRewards 0.5" in stopped.message


async def test_a_model_begins_each_step_anew_and_cannot_gain_by_ending_early(tmp_path: Path) -> None:
    in_two_steps(tmp_path / "tasks" / "t")
    first, done = call("echo line > a.txt"), {"toolCalls": [{"name": "finish", "arguments": {"message": "Done."}}]}
    second = call("cat a.txt a.txt > b.txt")
    (solved,) = await run(tmp_path / "tasks", [first, done, second, done])
    assert (solved.reward, solved.turns, solved.branches) == (0.75, 4, 2)
    (cut,) = await run(tmp_path / "tasks", [first, done, second, done], max_turns=2)
    assert (cut.reward, cut.stop_reason) == (0.5, "MaxTurns")


async def test_step_is_graded_when_time_runs_out_and_later_ones_count_as_zero(tmp_path: Path) -> None:
    folder = in_two_steps(tmp_path / "tasks" / "t")
    config = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(config.replace("[environment]", "[agent]\ntimeout_sec = 2\n\n[environment]"))
    (cut,) = await run(tmp_path / "tasks", [call("echo line > a.txt"), call("sleep 60")])
    assert (cut.reward, cut.stop_reason) == (0.5, "AgentTimeout"), cut.message


async def test_run_stopped_in_the_second_step_repeats_no_setup_or_grading(tmp_path: Path) -> None:
    folder = in_two_steps(tmp_path / "tasks" / "t")
    counted = "#!/bin/bash\necho graded >> /app/graded\n"
    for step in ("write", "double"):
        script = folder / "steps" / step / "tests" / "test.sh"
        script.write_text(counted + script.read_text().removeprefix("#!/bin/bash\n"))
    setup = folder / "steps/double/workdir/setup.sh"
    setup.write_text(
        setup.read_text() + "echo prepared >> prepared.txt; [ $(grep -c prepared prepared.txt) = 1 ] || exit 1\n"
    )
    last = folder / "steps/double/tests/test.sh"
    last.write_text(last.read_text() + "[ $(wc -l < /app/graded) = 2 ] || echo 0 > /logs/verifier/reward.json\n")
    done = {"toolCalls": [{"name": "finish", "arguments": {"message": "Done."}}]}
    turns = [call("echo line > a.txt"), done, call("sleep 1; cat a.txt a.txt > b.txt"), done]
    assert not await run(tmp_path / "tasks", turns, stop_at_turn=2)
    (result,) = await run(tmp_path / "tasks", turns, new=False)
    assert (result.reward, result.turns, result.attempt, result.branches) == (0.75, 4, 0, 2), result.message


async def test_folders_in_object_storage_are_tasks_too(tmp_path: Path) -> None:
    folder = hello_world(tmp_path / "tasks" / "hello-world")
    with serve_s3() as s3:
        store = S3Store.from_url(f"s3://{BUCKET}", config=_config(s3.environ()), client_options={"allow_http": True})
        for path in folder.rglob("*"):
            if path.is_file():
                obstore.put(store, f"sets/a/hello-world/{path.relative_to(folder).as_posix()}", path.read_bytes())
        results = await run(tmp_path / "tasks", "Oracle", uri=s3.uri("sets/a"), environ={**os.environ, **s3.environ()})
    assert [(result.task, result.reward) for result in results] == [("hello-world", 1)]


def _config(environ: dict[str, str]) -> Any:
    return {key.lower(): value for key, value in environ.items()}


async def test_a_terminal_bench_task_is_judged_by_its_own_tests(tmp_path: Path) -> None:
    terminal_bench(tmp_path / "tasks" / "hello")
    assert await rewards(tmp_path / "tasks", "Oracle", form="TerminalBench") == [1]
    assert await rewards(tmp_path / "tasks", "Nop", form="TerminalBench") == [0]


async def test_check_finds_the_tasks_that_only_shared_can_grade(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "inside")
    outside: dict[str, str | bytes] = {
        "solution/solve.sh": "echo x > /outside\n",
        "tests/test.sh": "[ -e /outside ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
    }
    hello_world(tmp_path / "tasks" / "outside", **outside)
    in_two_steps(tmp_path / "tasks" / "steps", strategy="mean")
    source = {"from": {"uri": "tasks", "format": "Harbor"}}
    job = validate(
        RolloutJob,
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "check"},
            "spec": {"tasks": source, "agent": {"type": "Oracle"}, "output": {"uri": "out"}},
        },
    )
    tasks = load_tasks(job.spec.tasks, tmp_path, os.environ).tasks
    rows = await check_job(job, tasks, base_dir=tmp_path, environ=os.environ)
    assert {(row.task, row.agent): (row.ok, row.only_shared) for row in rows} == {
        ("inside", "Oracle"): (True, False),
        ("inside", "Nop"): (True, False),
        ("outside", "Oracle"): (True, True),
        ("outside", "Nop"): (True, False),
        ("steps", "Oracle"): (False, False),  # its steps are worth 1 and 0.5
        ("steps", "Nop"): (True, False),
    }
