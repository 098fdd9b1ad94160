"""Programs that run in the Python of a task's image."""

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[3] / "agent_runtime"
SOURCES = [*(RUNTIME / "tasks" / "in_sandbox").glob("*.py"), RUNTIME / "executor" / "init" / "tree_rules.py"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_programs_in_a_sandbox_have_the_syntax_of_python_3_5(source: Path) -> None:
    tree = ast.parse(source.read_text("utf-8"), feature_version=(3, 5))
    newer = ast.JoinedStr | ast.AnnAssign | ast.NamedExpr
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, newer)]
