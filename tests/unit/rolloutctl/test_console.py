"""Commands that are printed for the user to type."""

import os
import sys
from pathlib import Path

import pytest

from agent_runtime.engine.check import CheckRow
from rolloutctl.commands.check import _print
from rolloutctl.ui.console import answer_described, answer_table, out, program


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a `rolloutctl` in a folder, which is then the running program."""
    script = tmp_path / "my project" / "rolloutctl"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "run", "job.yaml"])
    return script


def test_printed_command_is_the_name_when_it_is_on_the_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{installed.parent}{os.pathsep}{os.environ['PATH']}")
    assert program() == "rolloutctl"


def test_printed_command_has_the_path_when_path_lacks_it(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    assert program() == f"'{installed}'"


def test_printed_command_is_the_name_when_started_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/rolloutctl/__main__.py"])
    assert program() == "rolloutctl"


def test_described_rows_are_paragraphs_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "_width", 60)
    answer_described("", ["field", "form", "default", "meaning"], [["seed", "integer", "0", "Seed of all randomness."]])
    assert capsys.readouterr().out == "seed  form: integer; default: 0\n  Seed of all randomness.\n"


def test_check_breaks_no_word_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "_width", 60)
    name, message = "fix-the-parser", f"expected reward 1: {'a report was not written ' * 9}"
    _print([CheckRow(name, "Oracle", 0.25, "Completed", False, message, output="KeyError")])
    printed = capsys.readouterr().out
    for word in (name, "reward", "Completed", "Oracle", message, "KeyError"):
        assert word in printed


def test_a_long_name_is_broken_before_columns_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "_width", 60)
    answer_table("", ["task", "mean"], [["n" * 70, "0.5"]], right=["mean"], optional=["mean"])
    printed = capsys.readouterr()
    assert (printed.out.count("n"), "0.5" in printed.out, printed.err) == (71, True, "")
