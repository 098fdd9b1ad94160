"""Commands that the documentation shows for buildah and Docker, typed on a machine with buildah and podman."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.containers.conftest import IMAGE
from tests.support.cluster import small_job
from tests.support.documentation import PAGES, REPOSITORY, Block, blocks
from tests.support.terminal import Terminal, checkout

SHOWN = [block for page in PAGES for block in blocks(page) if block.needs == "container engine"]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.place)
def test_commands_of_a_page_work(block: Block, tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    job = small_job("in-a-container", sandbox={"image": IMAGE}, output={"uri": "out"})
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    (folder / "app").mkdir()
    (folder / "app" / "notes.txt").write_text("kept\n")
    (folder / "rootfs" / "bin").mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), folder / "rootfs" / "bin" / "sh")
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'operator'}",
    }
    terminal = Terminal(folder, environ)
    terminal.run(block)
    terminal.close()
