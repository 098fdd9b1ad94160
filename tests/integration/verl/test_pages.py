"""What the documentation shows for a Python with verl, run in one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.documentation import PAGES, blocks
from tests.support.terminal import Terminal

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def test_commands_of_the_verl_pages_can_be_typed(tmp_path: Path) -> None:
    python = subprocess.run([ROOT / "hack/verl-environment"], check=True, stdout=subprocess.PIPE, text=True).stdout
    shutil.copy(HERE / "tools.yaml", tmp_path)
    search = os.pathsep.join(map(str, (ROOT, ROOT / "operator", HERE)))
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    environ = os.environ | {"PATH": path, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}
    terminal = Terminal(tmp_path, environ, python.strip())
    for page in PAGES:
        for block in blocks(page):
            if block.needs == "verl":
                terminal.run(block)
