"""Grading with real commands: what a verdict says, and what a policy cannot make it say."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent_runtime.grading.artifacts import carry_rules
from agent_runtime.grading.grade import VerifierUnavailable, grade, require_preparable, require_startable
from agent_runtime.sandboxes.base import DiskFailed, Evidence, FileError, SandboxFailure, WorkspaceLimit
from agent_runtime.sandboxes.executor_client.values import not_started
from rollout_api.records import Verdict
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import RewardRule, Task, VerifierMode

SEPARATE = Verifier()
SHARED = Verifier(mode=VerifierMode.SHARED)
TESTS = {
    "path": "tests/test_calc.py",
    "content": "from calc import add\ndef test_one(): assert add(1, 1) == 2\ndef test_two(): assert add(2, 3) == 5\n",
}
PYTEST: dict[str, Any] = {"kind": "pytest", "commands": ["python3 -m pytest -q tests"], "files": [TESTS]}
RIGHT = "def add(a, b):\n    return a + b\n"
HALF = "def add(a, b):\n    return 2\n"


def task(seconds: int = 60, **verifier: Any) -> Task:
    form = {"name": "t", "prompt": "p", "verifier": verifier, "timeouts": {"verifierSeconds": seconds}}
    return Task.model_validate(form)


async def verdict(workspace: Any, spec: dict[str, Any], rules: Verifier = SEPARATE, **files: Any) -> Verdict:
    for name, content in files.items():
        await workspace.write(name.replace("__", "/") + ".py", content.encode(), key="0:put")
    return await grade(task(**spec), rules, workspace, key_turn=7)


async def startable(workspace: Any, turn: int, **spec: Any) -> None:
    await require_startable(task(**spec), workspace, key_turn=turn)


async def test_hidden_tests_decide_and_each_is_listed(workspace: Any) -> None:
    graded = await verdict(workspace, PYTEST, calc=HALF)
    assert (graded.reward, graded.passed) == (0.5, False)
    assert {test.name: test.passed for test in graded.tests} == {
        "tests/test_calc.py::test_one": True,
        "tests/test_calc.py::test_two": False,
    }
    assert "assert 2 == 5" in graded.tests[1].message
    assert graded.commands[0].exit_code == 1
    assert "1 failed" in graded.commands[0].output


async def test_half_a_solution_gets_no_reward_with_all_or_nothing(workspace: Any) -> None:
    rules = Verifier(reward=RewardRule.ALL_OR_NOTHING)
    assert (await verdict(workspace, PYTEST, rules, calc=HALF)).reward == 0
    assert (await verdict(workspace, PYTEST, rules, calc=RIGHT)).reward == 1


async def test_named_tests_decide_alone(workspace: Any) -> None:
    named = {**PYTEST, "tests": ["tests/test_calc.py::test_one"]}
    graded = await verdict(workspace, named, calc=HALF)
    assert (graded.reward, graded.passed) == (1, True)


CHEATS = {
    "ends the process with code 0": {"calc": "import os\nos._exit(0)\n"},
    "ends the session early and calls it a success": {
        "calc": "import pytest\ncalls = []\ndef add(a, b):\n    calls.append(1)\n"
        "    if len(calls) > 1:\n        pytest.exit('done', returncode=0)\n    return 2\n"
    },
    "skips the tests": {"calc": "import pytest\ndef add(a, b):\n    pytest.skip('no')\n"},
    "expects them to fail": {"calc": "import pytest\ndef add(a, b):\n    pytest.xfail('no')\n"},
    "kills the process": {"calc": "import os\nos.kill(os.getpid(), 9)\n"},
    "leaves with an exception": {"calc": "raise SystemExit(0)\n"},
    "leaves a report behind": {"calc": "import os\nos._exit(0)\n", ".rollout-verifier/0": "<testsuites/>"},
    "writes its own tests": {"calc": "import os\nos._exit(0)\n", "tests__test_calc": "def test_one(): pass\n"},
}


@pytest.mark.parametrize("files", CHEATS.values(), ids=CHEATS)
async def test_a_cheat_is_not_a_pass(files: dict[str, Any], workspace: Any) -> None:
    graded = await verdict(workspace, PYTEST, **files)
    assert not graded.passed
    assert graded.reward <= 0.5  # test_one may honestly have passed before the cheat


async def carried(agent: Any, grading: Any, spec: dict[str, Any]) -> None:
    folder, rules = carry_rules(task(**spec), SEPARATE, grading.working_dir)
    await grading.carry(folder, rules, agent.tar(folder, parts=["."]), key="0:carry")


PLANTED = {
    "conftest.py": "def pytest_pyfunc_call(pyfuncitem):\n    return True\n",
    "tests/conftest.py": "def pytest_pyfunc_call(pyfuncitem):\n    return True\n",
    "_pytest/__init__.py": "raise SystemExit(0)\n",
    "tests/__init__.py": "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
    "evil.egg-info/entry_points.txt": "[pytest11]\nevil = calc\n",
}
PLUGIN = "def pytest_pyfunc_call(pyfuncitem):\n    return True\ndef add(a, b):\n    return 0\n"


async def test_a_command_that_does_not_run_pytest_needs_no_report(workspace: Any) -> None:
    assert (await verdict(workspace, {**PYTEST, "commands": ["true", *PYTEST["commands"]]}, calc=RIGHT)).reward == 1
    assert not (await verdict(workspace, {**PYTEST, "commands": ["false", *PYTEST["commands"]]}, calc=RIGHT)).passed


async def test_script_whose_tests_were_ended_early_has_failed(workspace: Any) -> None:
    spec = {**PYTEST, "commands": ["python3 -m py${NOTHING}test -q tests"]}
    assert (await verdict(workspace, spec, calc="import os\nos._exit(0)\n")).reward == 0
    assert (await verdict(workspace, spec, calc=RIGHT)).reward == 1


@pytest.mark.parametrize("name", PLANTED)
async def test_planted_files_affect_only_a_workspace_that_contains_them(
    name: str, new_workspace: Callable[[], Any]
) -> None:
    agent, grading = new_workspace(), new_workspace()
    await agent.write("calc.py", PLUGIN.encode() if "egg" in name else HALF.encode(), key="0:put")
    await agent.write(name, PLANTED[name].encode(), key="0:put")
    await carried(agent, grading, PYTEST)
    honest = 0 if "egg" in name else 0.5
    assert (await grade(task(**PYTEST), Verifier(), grading, key_turn=1)).reward == honest
    # In the agent's own workspace the same files do their work: this is what Separate is for.
    forged = await grade(task(**PYTEST), SHARED, agent, key_turn=1)
    assert forged.forgeable
    assert forged.reward == (0 if name.startswith("_pytest") else 1)


async def test_hidden_files_replace_existing_links_and_files(workspace: Any, tmp_path: Any) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (workspace.folder / "tests").symlink_to(outside)
    assert (await verdict(workspace, PYTEST, calc=RIGHT)).passed
    assert list(outside.iterdir()) == []
    await workspace.remove("tests", key="0:remove")
    await workspace.write("tests", b"a file where a folder belongs", key="0:put")
    assert (await verdict(workspace, PYTEST, calc=RIGHT)).passed


async def test_commands_are_graded_by_their_exit_codes(workspace: Any) -> None:
    graded = await verdict(workspace, {"commands": ["true", "exit 3", "kill -9 $$", "true"]})
    assert graded.reward == 0.5
    assert [(command.exit_code, command.cause) for command in graded.commands] == [
        (0, None),
        (3, None),
        (None, "Signal 9"),
        (0, None),
    ]


@pytest.mark.parametrize(
    ("check", "raised"),
    [
        ("import calc\nassert calc.add(1, 1) == total\n", "grading/check.py:2: NameError: name 'total' is not defined"),
        ("import calc\nassert calc.add(1 1) == 2\n", "grading/check.py:2: SyntaxError: "),
        ("import calc\nassert calc.add(1, 1) == 3, 'no'\n", ""),
        ("import calc\ncalc.add(1)\n", ""),
    ],
)
async def test_exception_of_a_hidden_file_is_in_the_verdict_and_a_failed_assertion_is_not(
    workspace: Any, check: str, raised: str
) -> None:
    spec = {"commands": ["python3 grading/check.py"], "files": [{"path": "grading/check.py", "content": check}]}
    spec["env"] = [{"name": "PYTHONPATH", "value": "."}]
    code = RIGHT if "calc.add(1)" not in check else "def add(a):\n    return undefined\n"
    graded = await verdict(workspace, spec, calc=code)
    assert not graded.passed
    assert graded.message.startswith(raised)
    assert bool(graded.message) == bool(raised)


async def test_time_used_up_is_a_failed_verdict_and_later_commands_are_not_run(workspace: Any) -> None:
    graded = await verdict(workspace, {"seconds": 1, "commands": ["true", "sleep 30", "touch ran"]})
    assert [command.cause for command in graded.commands] == [None, "Deadline", "Deadline"]
    assert graded.reward == pytest.approx(1 / 3)
    assert await workspace.stat("ran") is None


async def test_missing_program_gives_no_verdict_but_exit_code_127_does(workspace: Any) -> None:
    """Before the agent's files are copied, the task is at fault. Afterwards a missing program is a failed verdict."""
    with pytest.raises(VerifierUnavailable, match="needs program no-such-program, which the sandbox lacks"):
        await startable(workspace, 1, commands=["no-such-program --check"])
    await startable(workspace, 2, commands=["/t/check.sh"], files=[{"path": "/t/check.sh", "content": ""}])
    for turn, command in enumerate(("exit 127", "./gone.sh", "true && no-such-program"), start=3):
        await startable(workspace, turn, commands=[command])
        assert (await verdict(workspace, {"commands": [command]})).reward == 0
    assert (await verdict(workspace, {"commands": ["no-such-program"]})).reward == 0


async def test_command_that_the_machine_cannot_start_gives_no_verdict(
    workspace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: Any, **__: Any) -> Any:
        return not_started("program the shell: Resource temporarily unavailable")

    monkeypatch.setattr(workspace, "run", run)
    commands: dict[str, Any] = {"kind": "commands", "commands": ["true"]}
    with pytest.raises(SandboxFailure, match="Resource temporarily unavailable") as failure:
        await verdict(workspace, commands)
    assert failure.value.evidence is Evidence.UNEXPLAINED, "done again alone; the second time alone is a failed verdict"
    with pytest.raises(SandboxFailure, match="cannot be closed to other users"):
        await grade(task(**commands, isolated=True), SEPARATE, workspace, key_turn=8, is_apart=True)
    assert (await verdict(workspace, commands, SHARED)).reward == 0, "a policy could mask itself"


@pytest.mark.parametrize(
    ("mode", "uid", "is_apart"),
    [("Overlay", "1000", True), ("Overlay", "0", False), ("Overlay", "''", False), ("Plain", "1000", False)],
)
async def test_user_is_kept_apart_only_if_it_is_not_root_and_in_overlay(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, mode: str, uid: str, is_apart: bool
) -> None:
    """In Plain, root would close folders of the machine."""
    run = workspace.run

    async def run_as(command: str, *, user: str | None = None, **options: Any) -> Any:
        return await run(f"id() {{ echo {'0' if user == 'root' else uid}; }}; {command}", **options)

    monkeypatch.setattr(workspace, "run", run_as)
    monkeypatch.setattr(workspace, "description", {"mode": mode})
    isolated = task(commands=["true"], user="root", isolated=True)
    assert await require_startable(isolated, workspace, key_turn=1) is is_apart


async def test_a_junit_report_of_the_agent_is_wiped_first(workspace: Any) -> None:
    forged = '<testsuite><testcase classname="a" name="b"/></testsuite>'
    await workspace.write("report.xml", forged.encode(), key="0:put")
    spec = {"kind": "junit", "report": "report.xml", "tests": ["a::b"]}
    assert (await verdict(workspace, {**spec, "commands": ["true"]})).reward == 0
    assert (await verdict(workspace, {**spec, "commands": [f"echo '{forged}' > report.xml"]})).reward == 1
    linked = await verdict(workspace, {**spec, "commands": ["ln -sf other.xml report.xml"]})
    assert linked.reward == 0
    assert "is not a file" in linked.message


async def test_a_reward_file_counts_only_when_the_verifier_wrote_it(workspace: Any) -> None:
    await workspace.write("/logs/verifier/reward.json", b"1", key="0:put")
    spec = {"kind": "rewardFile"}
    punishing = SEPARATE.model_copy(update={"failed_reward": -1.0})
    planted = await verdict(workspace, {**spec, "commands": ["true"]}, punishing)
    assert (planted.reward, planted.passed) == (-1, False)
    assert "neither" in planted.message
    graded = await verdict(
        workspace, {**spec, "commands": ['echo \'{"reward": 0.5, "n": 9}\' > "$VERIFIER_LOGS/reward.json"']}
    )
    assert (graded.reward, graded.rewards, graded.passed) == (0.5, {"reward": 0.5, "n": 9}, False)
    crashed = await verdict(workspace, {**spec, "commands": ['echo 1 > "$VERIFIER_LOGS/reward.txt"; kill -9 $$']})
    assert crashed.reward == 0


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_the_same_call_makes_the_same_requests(new_workspace: Callable[[], Any]) -> None:
    class Recorded:
        """Records the calls. A replaced runner must make the same ones, or the executor refuses its keys."""

        def __init__(self, workspace: Any) -> None:
            self.workspace = workspace
            self.calls: list[tuple[str, Any, Any]] = []
            self.working_dir = workspace.working_dir

        def __getattr__(self, name: str) -> Any:
            async def call(*arguments: Any, **options: Any) -> Any:
                if name == "untar":
                    body = b"".join([piece async for piece in arguments[1]])
                    self.calls.append((name, (arguments[0], body), options))
                    return await self.workspace.untar(arguments[0], pieces(body), **options)
                if "key" in options:
                    self.calls.append((name, arguments, options))
                return await getattr(self.workspace, name)(*arguments, **options)

            return call

    spec = {**PYTEST, "commands": ["python3 -m pytest -q tests"]}
    recorded = [Recorded(new_workspace()) for _ in range(2)]
    for workspace in recorded:
        await verdict(workspace, spec, calc=RIGHT)
    assert recorded[0].calls == recorded[1].calls
    keys = [options["key"] for _, _, options in recorded[0].calls if options["key"].startswith("7:")]
    assert len(keys) == len(set(keys))


class Broken:
    """A workspace in which one operation fails."""

    def __init__(self, workspace: Any, operation: str, failure: Exception) -> None:
        self.workspace, self.operation, self.failure = workspace, operation, failure
        self.working_dir = workspace.working_dir

    def __getattr__(self, name: str) -> Any:
        if name != self.operation:
            return getattr(self.workspace, name)

        async def fail(*_: Any, **__: Any) -> Any:
            raise self.failure

        return fail


async def test_memory_used_up_while_grading_is_a_failed_verdict(workspace: Any) -> None:
    limit = WorkspaceLimit("Memory", "512 MiB are used up")
    graded = await grade(task(commands=["cat x"]), Verifier(), Broken(workspace, "run", limit), key_turn=1)
    assert (graded.reward, graded.message) == (0, "the grading was ended: 512 MiB are used up")


async def test_unwritable_hidden_file_is_the_policys_fault_only_where_it_may_write(workspace: Any) -> None:
    broken = Broken(workspace, "untar", FileError("x", "a folder is in the way"))
    inside = task(commands=["true"], files=[{"path": "a/test.py", "content": ""}])
    outside = task(commands=["true"], files=[{"path": "/opt/test.py", "content": ""}])
    assert (await grade(inside, Verifier(), broken, key_turn=1)).reward == 0
    with pytest.raises(VerifierUnavailable, match="outside of /workspace cannot be written: a folder is in the way"):
        await require_preparable(outside, Verifier(), broken, key_turn=1)
    assert (await grade(outside, Verifier(), broken, key_turn=1)).reward == 0
    assert (await grade(outside, SHARED, broken, key_turn=1)).reward == 0
    full = Broken(workspace, "untar", DiskFailed("x", "no space"))
    with pytest.raises(VerifierUnavailable, match="cannot be written: no space"):
        await grade(inside, Verifier(), full, key_turn=1)


async def test_task_without_verifier_raises_an_error(workspace: Any) -> None:
    with pytest.raises(ValueError, match="has no verifier"):
        await grade(Task(name="t", prompt="p"), Verifier(), workspace, key_turn=1)
