"""What `apply_patch.py` leaves of an agent's patch, in a repository."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime.tasks.repository import COLLECT_PATCH, PATCH, PREPARED, TESTS_FOLDER, hidden_files
from rollout_api.files import TaskFile

PREPARE = f"""
git init -q . && git config user.name a && git config user.email a@example.com
mkdir -p package tests && touch package/__init__.py && echo old > package/code.py && echo test > tests/test_a.py
%s
git add -A && git commit -qm prepared && git update-ref {PREPARED} "$(git rev-parse 'HEAD^{{tree}}')"
"""


def sh(folder: Path, script: str) -> str:
    return subprocess.run(["sh", "-ec", script], cwd=folder, check=True, capture_output=True, text=True).stdout


def graded(folder: Path, prepared: str, agent: str) -> tuple[Path, str]:
    work, grading = folder / "work", folder / "grading"
    work.mkdir()
    sh(work, PREPARE % prepared)
    shutil.copytree(work, grading, symlinks=True)
    sh(work, agent)
    sh(work, COLLECT_PATCH)
    shutil.copytree((work / PATCH).parent, (grading / PATCH).parent)
    (grading / TESTS_FOLDER).mkdir()
    for file in map(TaskFile.model_validate, hidden_files("HEAD", "", ["tests/test_a.py"], [])):
        (grading / file.path).write_bytes(file.data())
    return grading, sh(grading, f"{sys.executable} {TESTS_FOLDER}/apply_patch.py")


def test_a_solution_behind_a_link_in_a_folder_of_tests_is_kept(tmp_path: Path) -> None:
    grading, told = graded(tmp_path, "ln -s ../package tests/package", "echo new | tee package/code.py > package/b.py")
    assert [(grading / "package" / name).read_text() for name in ("code.py", "b.py")] == ["new\n", "new\n"], told


def test_file_in_place_of_a_folder_with_protected_files_is_undone(tmp_path: Path) -> None:
    grading, told = graded(
        tmp_path, "mkdir data && touch data/conftest.py", "rm -r data; echo > data; echo new > package/code.py"
    )
    assert "data replaces a folder" in told
    assert (grading / "data" / "conftest.py").is_file()
    assert (grading / "package" / "code.py").read_text() == "new\n"


@pytest.mark.parametrize(
    "agent",
    ["rm tests/fixtures; mkdir tests/fixtures; echo > tests/fixtures/conftest.py", "rm -r other; ln -s fixtures other"],
)
def test_undoing_a_patch_removes_nothing_behind_a_link(tmp_path: Path, agent: str) -> None:
    prepared = "mkdir fixtures other; touch fixtures/conftest.py other/conftest.py; ln -s ../fixtures tests/fixtures"
    grading, told = graded(tmp_path, prepared, agent)
    assert "left out" in told
    assert sh(grading, "git status --porcelain -- . ':!.rollout-*'") == ""


def test_modules_in_a_new_folder_cannot_replace_the_test_processs(tmp_path: Path) -> None:
    grading, told = graded(tmp_path, "", "mkdir new; echo > new/pluggy.py; echo > new/mine.py")
    assert "new/pluggy.py would be imported in place of pluggy" in told
    assert [path.name for path in (grading / "new").iterdir()] == ["mine.py"]
