"""`docs/troubleshooting.md` is ordered by messages, which must exist in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
OTHERS = ("rolloutctl: command not found", "No module named 'my_tools'", "helm install")
"""Messages of a shell and of Python, and a command."""


def quoted_messages() -> list[str]:
    """Return the messages in the first column: quoted as code, with several words."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    return [message for message in found if " " in message and message not in OTHERS]


@pytest.fixture(scope="module")
def texts_of_the_code() -> str:
    folders = [ROOT / name for name in ("rolloutctl", "agent_runtime", "rollout_api", "operator")]
    trees = [ast.parse(path.read_text()) for folder in folders for path in folder.rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return "\n".join(text for text in texts if isinstance(text, str))


@pytest.mark.parametrize("message", quoted_messages())
def test_symptom_is_a_message_of_the_code(message: str, texts_of_the_code: str) -> None:
    """`…` and whole numbers stand for variable parts."""
    fixed = [message] if message in texts_of_the_code else re.split(r"\s*(?:…|\b\d+\b)\s*", message)
    assert [part for part in fixed if part not in texts_of_the_code] == []
