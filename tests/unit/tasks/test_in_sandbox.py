"""Programs that run in the Python of a task's image."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime.grading.junit import judge_named, parse_report
from agent_runtime.tasks.in_sandbox import report_tests

RUNTIME = Path(__file__).parents[3] / "agent_runtime"
SOURCES = [*(RUNTIME / "tasks" / "in_sandbox").glob("*.py"), RUNTIME / "executor" / "init" / "tree_rules.py"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_programs_in_a_sandbox_have_the_syntax_of_python_3_5(source: Path) -> None:
    tree = ast.parse(source.read_text("utf-8"), feature_version=(3, 5))
    newer = ast.JoinedStr | ast.AnnAssign | ast.NamedExpr
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, newer)]


SUMMARY = """
=== short test summary info ===
PASSED t.py::printed_by_a_test
= \x1b[36mshort test summary info\x1b[0m =
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mTestA::test_b[a b - c]\x1b[0m
PASSED r2e_tests/test_1.py::TestA::test_c[::1]
PASSED r2e_tests/test_1.py::test_d
FAILED r2e_tests/test_2.py::test_d - RuntimeError: PASSED
FAILED r2e_tests/test_2.py::test_e - RuntimeError: PASSED x::y
FAILED r2e_tests/test_2.py::test_p[2 - x] - RuntimeError
PASSED r2e_tests/test_2.py::test_p[2 - 1]
ERROR r2e_tests/test_3.py
XFAIL r2e_tests/test_3.py::test_f
"""


def test_summary_of_a_script_is_reported_as_r2e_gym_reads_it(tmp_path: Path) -> None:
    (tmp_path / "output.txt").write_text(SUMMARY)
    # What stays behind keeps the output open.
    (tmp_path / "run_tests.sh").write_text("sleep 600 & echo $! > left\ncat output.txt\nexit 3\n")
    command = [sys.executable, report_tests.__file__, "report.xml", "summary", "run_tests.sh"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.wait() == 3
        subprocess.run(["kill", (tmp_path / "left").read_text().strip()], check=True)
        assert process.stdout is not None
        assert process.stdout.read() == SUMMARY
    reported = parse_report((tmp_path / "report.xml").read_bytes())
    named = ["TestA.test_b[a b", "TestA.test_c[.1]", "test_p[2", "test_d", "test_e", "test_f", "printed_by_a_test", "y"]
    verdicts = judge_named(reported, named)
    assert [verdict.name for verdict in verdicts if verdict.passed] == named[:3]
