"""A small real git repository with a bug, its fix in later history, and the SWE-bench instance for it."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BUG = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
FIX = BUG.replace("a - b", "a + b  # THE-FIX")
TESTS = "from calculator import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
HIDDEN_TESTS = TESTS.replace("import double", "import add, double") + (
    "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
)


def git(folder: Path, *arguments: str, data: bytes = b"") -> str:
    """Return the output of a git command."""
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "protocol.file.allow=always"]
    run = subprocess.run(
        ["git", *who, *arguments], cwd=folder, env=environ, input=data, capture_output=True, check=True
    )
    return run.stdout.decode(errors="replace")


def commit(folder: Path, message: str, files: Mapping[str, str]) -> str:
    """Write files and commit; return the id."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD").strip()


def make_repository(folder: Path) -> dict[str, Any]:
    """Create a repository in a folder; return its instance. The work tree has the bug. The fix is in branches, tags, a
    stash, a reflog, a remote's branch, a pack, and an unreachable object.
    """
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    first = commit(folder, "first", {"calculator.py": BUG.replace("2 * a", "a + a")})
    git(folder, "tag", "-a", "v1", "-m", "one")
    base = commit(
        folder,
        "base",
        {"calculator.py": BUG, "tests/__init__.py": "", "tests/test_calculator.py": TESTS, ".gitignore": "*.pyc\n"},
    )
    fixed = commit(folder, "Fix THE-FIX", {"calculator.py": FIX})
    tested = commit(folder, "tests", {"tests/test_calculator.py": HIDDEN_TESTS})
    git(folder, "tag", "v2")
    git(folder, "branch", "later")
    git(folder, "update-ref", "refs/remotes/origin/main", tested)
    git(folder, "gc", "-q")
    git(folder, "checkout", "-q", "-B", "main", base)
    (folder / "calculator.py").write_text(FIX + "# stashed\n")
    git(folder, "stash", "-q")
    git(folder, "hash-object", "-w", "--stdin", data=b"THE-FIX, which nothing reaches\n")
    assert first != base
    return {
        "instance_id": "owner__calculator-1",
        "repo": "owner/calculator",
        "base_commit": base,
        "problem_statement": "add(2, 3) should be 5.",
        "patch": git(folder, "diff", base, fixed),
        "test_patch": git(folder, "diff", fixed, tested),
        "FAIL_TO_PASS": json.dumps(["tests/test_calculator.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["tests/test_calculator.py::test_double"]),
        "working_dir": str(folder),
    }
