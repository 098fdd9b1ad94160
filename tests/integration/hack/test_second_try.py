"""`hack/pytest`: what fails in a crowd has a second try, and what fails twice fails the whole."""

import os
import subprocess
from pathlib import Path

import pytest

PYTEST = Path(__file__).parents[3] / "hack" / "pytest"
PASSES, ONCE, TWICE = (
    "def test_passes(): pass\n",
    "import pathlib\ndef test_once():\n    before = pathlib.Path(__file__).with_suffix('.tried')\n"
    "    tried = before.exists()\n    before.touch()\n    assert tried\n",
    "def test_twice(): assert False\n",
)


def hack_pytest(*arguments: str, again: Path | None = None) -> tuple[int, str]:
    """Its exit status and what it printed."""
    environ = {name: value for name, value in os.environ.items() if name != "AGAIN" and not name.startswith("PYTEST")}
    if again is not None:
        environ["AGAIN"] = str(again)
    command = [str(PYTEST), *arguments]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("tests", "status"), [((PASSES,), 0), ((PASSES, ONCE), 0), ((PASSES, ONCE, TWICE), 1)])
@pytest.mark.parametrize("later", [False, True])
def test_a_failure_counts_when_the_second_try_shows_it_too(
    tmp_path: Path, tests: tuple[str, ...], status: int, later: bool
) -> None:
    for number, test in enumerate(tests):
        (tmp_path / f"test_{number}.py").write_text(test)
    again = tmp_path / "again"
    again.mkdir()
    # An argument with a space comes to the second try as it was.
    arguments = (str(tmp_path), "-k", "passes or once or twice")
    if later:
        assert hack_pytest(*arguments, again=again)[0] == 0, "the verdict comes at the end"
        found, told = hack_pytest("--again", again=again)
    else:
        found, told = hack_pytest(*arguments)
    assert found == status, told
    assert ("FAILED" in told) == (len(tests) > 1)
    if later and len(tests) > 1:
        assert "1 passed" in told, "only what failed is tried again"


def test_a_run_that_cannot_begin_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_like_this\n")
    status, told = hack_pytest(str(tmp_path), again=tmp_path)
    assert status not in (0, 1), told
