"""The pins in constraints.txt resolve for every Python that pyproject.toml promises."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLDEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=") + ".0"
PYTHONS = (OLDEST, "3.12", "3.13", "3.14")
"""The oldest supported Python, and the newest release of each later line."""
UNREACHABLE = 2
"""Exit status of uv for failures other than a conflict of versions, such as an unavailable index."""

pytestmark = pytest.mark.full


def why_unresolved(uv: str, python: str, extra: str, constraints: Path) -> str | None:
    """Return the conflict that uv reports; None if the pins resolve. Skips if the package index is unavailable."""
    options = ["--python-version", python, "--extra", extra, "--constraints", str(constraints)]
    command = [uv, "pip", "compile", "--quiet", *options, "pyproject.toml"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if ran.returncode == UNREACHABLE or "network was disabled" in ran.stderr:
        pytest.skip(f"not checked, because uv cannot reach the package index: {ran.stderr.strip()}")
    return ran.stderr if ran.returncode else None


@pytest.fixture(scope="module")
def uv() -> str:
    """uv, which resolves for other versions of Python than the one that runs it."""
    program = shutil.which("uv")
    if program is None:
        pytest.skip("not checked, because uv is not installed: pip install uv")
    return program


@pytest.mark.parametrize("extra", ["test", "docs"])
@pytest.mark.parametrize("python", PYTHONS)
def test_pins_resolve(uv: str, python: str, extra: str) -> None:
    assert why_unresolved(uv, python, extra, ROOT / "constraints.txt") is None


def test_conflict_is_reported(uv: str, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("aiohttp==3.0.1\n")
    told = why_unresolved(uv, OLDEST, "test", tmp_path / "constraints.txt")
    assert told is not None
    assert "aiohttp" in told
