"""Marks of tests: what `make test` leaves to `make test-full`, and which failures do not fail a run."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MOST_IN_QUARANTINE = 5
MARKED = """
import pytest

@pytest.mark.quarantine(reason="the clock")
def test_fails_now(): assert 1 + 1 == 3

@pytest.mark.quarantine(reason="the clock")
def test_passes_now(): pass

@pytest.mark.full
def test_takes_long(): assert False

def test_is_plain(): assert {plain}
"""


def run_marked(folder: Path, plain: bool, **environ: str) -> tuple[int, str]:
    """Return pytest's exit status and output for tests with these marks."""
    (folder / "test_marked.py").write_text(MARKED.format(plain=plain))
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-q", str(folder)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "ROLLOUT_FULL"))}
    done = subprocess.run(command, cwd=REPOSITORY, env=inherited | environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_quarantined_failures_are_printed_and_counted_and_do_not_fail_the_run(tmp_path: Path) -> None:
    status, output = run_marked(tmp_path, plain=True)
    assert status == 0, output
    assert "assert (1 + 1) == 3" in output
    assert "1 failed, which fails nothing, and 1 passed." in output
    assert "1 deselected" in output


def test_other_failures_fail_the_run_and_full_tests_run_in_test_full(tmp_path: Path) -> None:
    status, output = run_marked(tmp_path, plain=False, ROLLOUT_FULL="1")
    assert status == 1, output
    assert [match[1] for match in re.finditer(r"FAILED .*::(\w+)", output)] == ["test_takes_long", "test_is_plain"]


def test_quarantine_holds_few_tests_each_with_its_reason() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in (REPOSITORY / "tests").rglob("*.py")
        if ".quarantine" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "quarantine"
    ]
    assert len(found) <= MOST_IN_QUARANTINE, found
