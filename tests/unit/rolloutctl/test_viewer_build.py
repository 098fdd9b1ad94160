"""The viewer's built files in the package."""

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

VIEWER = Path(__file__).parents[3] / "rolloutctl" / "viewer"


def test_the_pages_are_built_from_these_sources() -> None:
    lines = (VIEWER / "static" / "sources.txt").read_text().splitlines()
    listed = {path: digest for digest, path in (line.split("  ") for line in lines)}
    frontend = VIEWER / "frontend"
    sources = [frontend / "package.json", frontend / "package-lock.json", *(frontend / "src").iterdir()]
    found = {str(path.relative_to(frontend)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    assert listed == found, "run hack/viewer"


def test_the_lock_names_no_registry() -> None:
    assert not re.search(r'"resolved"', (VIEWER / "frontend" / "package-lock.json").read_text())


@pytest.mark.full
def test_a_build_gives_the_committed_files() -> None:
    static = VIEWER / "static"
    before = {path.name: path.read_bytes() for path in static.iterdir()}
    subprocess.run([VIEWER.parents[1] / "hack" / "viewer"], check=True)
    assert {path.name: path.read_bytes() for path in static.iterdir()} == before
