"""Tasks whose work is a patch: real git, real workspaces. A policy can neither read nor plant what would pass the
tests.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.export.formats import Format, export
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from agent_runtime.tasks.repository import COLLECT_PATCH, PATCH, TESTS_FOLDER, hidden_files, scrub_history
from rollout_api.files import TaskFile
from rollout_api.records import Result
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client
from tests.support.repository import FIX, HIDDEN_TESTS, commit, git, make_repository

THIS_MACHINE = "agent-rollouts-quickstart:latest"
"""Name of an image that the local provider replaces by the Python environment that runs it."""

FIXES = "sed -i 's/a - b/a + b/' calculator.py"
CHEATING_TESTS = (
    "sed -i 's/a - b/a - b # looked/' calculator.py && "
    "printf 'def test_add():\\n    pass\\n\\ndef test_double():\\n    pass\\n' > tests/test_calculator.py"
)
PASSING_HOOK = (
    "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
    '    made = yield\\n    made.get_result().outcome = "passed"\\n\' > conftest.py && cp conftest.py tests/'
)
REPORT = (
    "mkdir .rollout-verifier .rollout-tests; echo 'print()' > .rollout-tests/apply_patch.py; printf '<testsuite>"
    '<testcase classname="tests.test_calculator" name="test_add"/>'
    '<testcase classname="tests.test_calculator" name="test_double"/></testsuite>\' > .rollout-verifier/0.xml; '
    "printf 'import os; os._exit(0)' > calculator.py; git add -fA"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that workspaces of this machine can see; they have a /tmp of their own."""
    path = Path(tempfile.mkdtemp(prefix="agent-rollouts-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


async def run(
    folder: Path, instance: dict[str, Any], *commands: str, agent: str = "ToolCalling", form: str = "SWEBench"
) -> list[Result]:
    """Return the results, with one rollout for each command."""
    (folder / "instances.jsonl").write_text(json.dumps(instance) + "\n")
    members = [
        {"turns": [{"toolCalls": [{"name": "bash", "arguments": {"command": command}}]}, {"content": "done"}]}
        for command in commands
    ]
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "swe"},
        "spec": {
            "mode": "Eval",
            "groupSize": len(commands) or 1,
            "agent": {"type": agent},
            "tasks": {"from": {"uri": str(folder / "instances.jsonl"), "format": form}, "imageTemplate": THIS_MACHINE},
            "model": {"scripted": {"tasks": [{"task": instance["instance_id"], "members": members}]}}
            if members
            else None,
            "output": {"uri": str(folder / "out")},
        },
    }
    (group,) = [group async for group in Client().run(RolloutJob.model_validate(job), new=True)]
    return list(group.results)


async def exported(folder: Path) -> list[dict[str, Any]]:
    reader = await open_run(Store.open(str(folder / "out"), {}), "swe")
    return [json.loads(line) async for line in export(reader, Format.SWE_BENCH)]


async def test_only_the_fix_is_rewarded_and_every_graded_patch_is_a_prediction(folder: Path) -> None:
    instance = make_repository(folder / "repository")
    attempts = {
        FIXES: 1,
        f"{FIXES} && git add -A && git -c user.name=a -c user.email=a@b commit -qm fixed": 1,
        f"{FIXES} && echo more > notes.txt && rm tests/test_calculator.py": 1,
        "true": 0,
        CHEATING_TESTS: 0,
        PASSING_HOOK: 0,
        REPORT: 0,
        f"{FIXES} && rm -rf .git": 0,
    }
    results = await run(folder, instance, *attempts)
    assert [(result.outcome.value, result.reward) for result in results] == [
        ("Completed", reward) for reward in attempts.values()
    ]
    assert "verifier.collect[0] failed" in results[-1].message
    predictions = await exported(folder)
    assert [list(line) for line in predictions] == [["instance_id", "model_name_or_path", "model_patch"]] * 8
    patches = [line["model_patch"] for line in predictions]
    assert patches[3] == patches[7] == ""
    assert patches[0] == patches[1]
    repository = folder / "repository"
    git(repository, "apply", data=patches[2].encode())
    assert "a + b" in (repository / "calculator.py").read_text()
    assert (repository / "notes.txt").read_text() == "more\n"
    assert not (repository / "tests" / "test_calculator.py").exists()


async def test_the_instances_own_patch_is_the_solution(folder: Path) -> None:
    (result,) = await run(folder, make_repository(folder / "repository"), agent="Oracle")
    assert (result.reward, result.passed) == (1.0, True)


LOOKS = (
    "{ git log --all -p --reflog; git stash list -p; git rev-list --all --objects --reflog; git fsck --lost-found; "
    "git cat-file --batch --batch-all-objects; find .git -type f -exec zcat -f {} +; grep -r THE-FIX . ; } 2>/dev/null "
)


async def test_the_fix_cannot_be_read_from_the_history(folder: Path) -> None:
    repository = folder / "repository"
    instance = make_repository(repository)
    looks = await asyncio.to_thread(subprocess.run, ["sh", "-c", LOOKS], cwd=repository, capture_output=True)
    assert b"THE-FIX" in looks.stdout, "the fixture hides nothing"
    (result,) = await run(folder, instance, f"{LOOKS} | grep -c THE-FIX > found.txt; git log --format=%s >> found.txt")
    assert result.reward == 0
    (line,) = await exported(folder)
    added = [text[1:] for text in line["model_patch"].splitlines() if text.startswith("+") and text[1:2] != "+"]
    assert added == ["0", "base", "first"]


@pytest.mark.parametrize("plant", ["alternates", "worktree", "kept pack", "nested", "shallow"])
def test_git_history_is_removed_from_every_form_of_repository(plant: str, folder: Path) -> None:
    repository = folder / "repository"
    base = make_repository(repository)["base_commit"]
    if plant == "alternates":
        git(folder, "clone", "-q", "--shared", "repository", "borrower")
        repository = folder / "borrower"
        git(repository, "checkout", "-q", base)
    elif plant == "worktree":
        git(repository, "worktree", "add", "-q", "--detach", str(folder / "tree"), base)
        repository = folder / "tree"
    elif plant == "kept pack":
        for pack in (repository / ".git" / "objects" / "pack").glob("*.pack"):
            pack.with_suffix(".keep").touch()
    elif plant == "nested":
        git(folder, "clone", "-q", "repository", "repository/vendored")
        git(repository / "vendored", "checkout", "-q", base)
    else:
        git(folder, "clone", "-q", "--depth", "3", "--no-single-branch", f"file://{repository}", "shallow")
        repository = folder / "shallow"
        git(repository, "checkout", "-q", base)
    subprocess.run(["sh", "-c", scrub_history(base)], cwd=repository, check=True)
    objects = git(repository, "cat-file", "--batch", "--batch-all-objects")
    assert "return a - b" in objects
    assert "THE-FIX" not in objects
    assert git(repository, "fsck", "--full", "--strict").strip() == ""
    assert git(repository, "status", "--porcelain", "--untracked-files=no") == ""
    if plant != "shallow":
        assert git(repository, "describe").startswith("v1-1-g")
    assert not [path for path in repository.rglob(".git") if path != repository / ".git"]
    assert git(repository, "rev-list", "--all", "--reflog") == git(repository, "rev-list", base)


@pytest.mark.parametrize("obstacle", ["ignored file of the base commit", "repository without a commit", "submodule"])
def test_the_patch_has_the_fix(obstacle: str, folder: Path) -> None:
    repository = folder / "repository"
    make_repository(repository)
    fixed = repository / "calculator.py"
    if obstacle.startswith("ignored"):
        commit(repository, "ignored", {".gitignore": "calculator.py\n"})
    elif obstacle == "submodule":
        git(repository, "submodule", "add", "-q", str(repository), "vendored")
        commit(repository, "submodule", {})
        fixed = repository / "vendored" / "calculator.py"
    base = git(repository, "rev-parse", "HEAD").strip()
    subprocess.run(["sh", "-c", scrub_history(base)], cwd=repository, check=True)
    fixed.write_text(FIX)
    if obstacle.startswith("repository"):
        git(repository, "init", "-q", "scratch")
    subprocess.run(["sh", "-c", COLLECT_PATCH], cwd=repository, check=True)
    assert "+    return a + b" in (repository / PATCH).read_text()


def test_patch_of_a_file_in_another_encoding_can_be_in_json_and_applies(folder: Path) -> None:
    repository, latin, fixed = folder / "repository", b"# caf\xe9\nvalue = 1\n", b"# caf\xe9\nvalue = 2\n"
    make_repository(repository)
    (repository / "latin.py").write_bytes(latin)
    commit(repository, "latin", {".gitattributes": "*.py diff=python\n"})
    base = git(repository, "rev-parse", "HEAD").strip()
    subprocess.run(["sh", "-c", scrub_history(base)], cwd=repository, check=True)
    (repository / "latin.py").write_bytes(fixed)
    (repository / "calculator.py").write_text(FIX)
    (repository / ".git/info/attributes").write_text("* diff\n")
    subprocess.run(["sh", "-c", COLLECT_PATCH], cwd=repository, check=True)
    patch = (repository / PATCH).read_bytes().decode()
    git(repository, "checkout", "-q", ".")
    git(repository, "apply", data=patch.encode())
    assert (repository / "latin.py").read_bytes() == fixed
    assert "a + b" in (repository / "calculator.py").read_text()


PLANTED = {
    "conftest.py": "diff --git a/.gitignore b/.gitignore\n--- a/.gitignore\n+++ b/.gitignore\n@@ -1,3 +1 @@\n"
    "-*.pyc\n-/.venv\n-/data\n+*.py\n",
    "org/python/core.py": "",
    "json.py": "diff --git a/__init__.py b/__init__.py\nnew file mode 100644\n",
    ".venv/bin/bash": "",
    "data/sh": "",
    ".gitattributes": "",
    "tests/helper.py": "",
    "tests.py": "",
    "__init__.py": "",
    "check_calculator.py": "",
    "tests/test_calculator/__init__.py": "",
    "tests.txt": f"diff --git a/{TESTS_FOLDER}/tests.patch.0 b/x.txt\nsimilarity index 100%\n"
    f"rename from {TESTS_FOLDER}/tests.patch.0\nrename to x.txt\n",
}
"""New files by path, and the patch that adds them, which git may not have written."""


@pytest.mark.parametrize("planted", PLANTED)
def test_patch_cannot_plant_files_that_decide_the_hidden_tests(planted: str, folder: Path) -> None:
    repository = folder / "repository"
    instance = make_repository(repository)
    (repository / ".venv" / "bin").mkdir(parents=True)
    (repository / ".venv" / "pyvenv.cfg").touch()
    (repository / "data").symlink_to(folder)
    settings = {"pytest.ini": "[pytest]\npython_files = test_*.py check_*.py\n"}
    base = commit(repository, "prepared", {".gitignore": "*.pyc\n/.venv\n/data\n", **settings})
    subprocess.run(["sh", "-c", scrub_history(base)], cwd=repository, check=True)
    header = f"diff --git a/{planted} b/{planted}\nnew file mode 100755\n--- /dev/null\n+++ b/{planted}\n"
    new = f"{header}@@ -0,0 +1 @@\n+x = 1\n"
    hidden = hidden_files(base, instance["test_patch"], ["tests/test_calculator.py"], [])
    for file in [*map(TaskFile.model_validate, hidden), TaskFile(path=PATCH, content=PLANTED[planted] + new)]:
        place = repository / file.path
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(file.data())
    script = [sys.executable, f"{TESTS_FOLDER}/apply_patch.py"]
    applied = subprocess.run(script, cwd=repository, capture_output=True, text=True, check=False)
    has_hidden_tests = (repository / "tests" / "test_calculator.py").read_text() == HIDDEN_TESTS
    assert applied.returncode or (has_hidden_tests and not (repository / planted).exists()), applied


def test_a_repository_without_the_base_commit_is_refused_in_words(folder: Path) -> None:
    make_repository(folder / "repository")
    script = scrub_history("0" * 40)
    refused = subprocess.run(
        ["sh", "-c", script], cwd=folder / "repository", capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "has no commit 0000" in refused.stderr
    assert FIX in git(folder / "repository", "show", "later:calculator.py"), "a refused repository was changed"


PLANTED_TEST = (
    'import _pytest.python as p\\np.Function.runtest = lambda self: 1 / 0 if self.name == "test_flawed" else None\\n'
)


def make_r2e(folder: Path) -> dict[str, Any]:
    """Create an instance of R2E-Gym: its tests are in the repository's folder, and its Python in `.venv`."""
    instance = make_repository(folder)
    (folder / "r2e_tests").mkdir()
    (folder / "r2e_tests" / "__init__.py").touch()
    (folder / "r2e_tests" / "test_1.py").write_text(
        "from calculator import add, double\n\nclass TestAll:\n    def test_add(self):\n        assert add(2, 3) == 5\n\n"
        "    def test_flawed(self):\n        assert False\n\ndef test_double():\n    assert double(2) == 4  # KEPT-SECRET\n"
    )
    (folder / "run_tests.sh").write_text(".venv/bin/python -W ignore -m pytest -rA r2e_tests\n")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    (folder / ".venv" / ".gitignore").write_text("*\n")
    outcomes = {"\x1b[1mTestAll.test_add\x1b[0m": "PASSED", "test_double": "PASSED", "TestAll.test_flawed": "FAILED"}
    return {
        "instance_id": "calculator-1",
        "repo_name": "calculator",
        "commit_hash": "f" * 40,
        "docker_image": THIS_MACHINE,
        "problem_statement": instance["problem_statement"],
        "expected_output_json": json.dumps(outcomes),
        "parsed_commit_content": json.dumps({"old_commit_hash": instance["base_commit"]}),
        "working_dir": str(folder),
    }


async def test_image_with_its_tests_hides_them_and_grades_by_them(folder: Path) -> None:
    instance = make_r2e(folder / "repository")
    looks = "{ grep -rac KEPT-SECRET . ; ls -d run_tests.sh r2e_tests; git log --all --format=%s; } 2>/dev/null"
    attempts = {
        FIXES: 1,
        f"{looks} | grep -v ':0$' > seen.txt": 0,
        "mkdir r2e_tests && echo 'class TestAll: test_add = id' > r2e_tests/test_1.py; echo true > run_tests.sh": 0,
        f"mkdir r2e_tests && printf '{PLANTED_TEST}' > r2e_tests/test_0.py": 0,
    }
    results = await run(folder, instance, *attempts, form="R2E")
    assert [(result.outcome.value, result.reward) for result in results] == [
        ("Completed", reward) for reward in attempts.values()
    ]
    seen = (await exported(folder))[1]["model_patch"]
    assert [line for line in seen.splitlines() if line.startswith("+") and line[1:2] != "+"] == ["+base", "+first"]


SUMMARIZING = """
import io, unittest

class Case(unittest.TestCase):
    def test_add(self):
        from calculator import add
        self.assertEqual(add(2, 3), 5)

result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))
print("= short test summary info =")
print("PASSED" if result.wasSuccessful() else "FAILED", "r2e_tests/runner.py::Case::test_add")
"""


async def test_image_whose_script_does_not_use_pytest_is_graded_by_its_summary(folder: Path) -> None:
    instance = make_r2e(folder / "repository")
    (folder / "repository" / "r2e_tests" / "runner.py").write_text(SUMMARIZING)
    (folder / "repository" / "run_tests.sh").write_text("PYTHONPATH=. .venv/bin/python r2e_tests/runner.py\n")
    instance["expected_output_json"] = json.dumps({"Case.test_add": "PASSED"})
    attempts = {FIXES: 1, "true": 0}
    results = await run(folder, instance, *attempts, form="R2E")
    assert [(result.outcome.value, result.reward) for result in results] == [
        ("Completed", reward) for reward in attempts.values()
    ]


async def test_image_of_another_kind_is_an_infrastructure_failure_without_a_reward(folder: Path) -> None:
    instance = make_r2e(folder / "repository")
    (folder / "repository" / "run_tests.sh").unlink()
    (result,) = await run(folder, instance, "true", form="R2E")
    assert (result.outcome.value, result.reason, result.reward) == ("InfraFailed", "SetupFailed", None)
    assert "has no run_tests.sh; expected an image of R2E-Gym" in result.message


UNITTEST = """
import unittest
from calculator import add

class Case(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)

    def test_described(self):
        \"\"\"Zero: adding it changes nothing.\"\"\"
        self.assertEqual(add(2, 0), 2)

    def test_parts(self):
        for number in (0, 1):
            with self.subTest(number=number):
                self.assertEqual(add(number, number), 2 * number)

    @unittest.skip("not here")
    def test_skipped(self):
        \"\"\"Zero: adding it changes nothing.\"\"\"
"""
RUNTESTS = """
import os, sys, unittest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
labels = [argument for argument in sys.argv[1:] if argument.endswith("_tests")]
suite = unittest.defaultTestLoader.loadTestsFromNames(labels)
sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
"""


async def test_a_repository_with_unittests_own_runner_is_graded_test_by_test(folder: Path) -> None:
    repository = folder / "repository"
    instance = make_repository(repository)
    base = commit(repository, "runner", {"tests/runtests.py": RUNTESTS})
    tested = commit(repository, "tests", {"tests/sum_tests.py": UNITTEST})
    name = f"test_add (sum_tests.Case{'.test_add' if sys.version_info >= (3, 11) else ''})"
    parts = name.replace("test_add", "test_parts")
    instance |= {
        "repo": "django/django",
        "base_commit": base,
        "test_patch": git(repository, "diff", base, tested),
        "FAIL_TO_PASS": [name, parts],
        "PASS_TO_PASS": ["Zero: adding it changes nothing."],
    }
    git(repository, "checkout", "-q", base)
    right, wrong = await run(folder, instance, FIXES, "true")
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    (skipped,) = await run(folder, {**instance, "instance_id": "x-2", "PASS_TO_PASS": ["test_skipped"]}, FIXES)
    assert skipped.reward == 0.0, "a skipped test counts as a passed one"
