"""Each page gives what it says when a reader types it from top to bottom."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.docs import given
from tests.support.documentation import PAGES, REPOSITORY, blocks
from tests.support.ports import free_ports
from tests.support.terminal import Terminal, checkout

ANSWER = "I have looked at it. <answer>Right</answer>"
"""The model's answer in each turn. It ends most tasks, and is an action in FrozenLake and Sokoban."""
MODEL_SERVERS = ("http://localhost:8000", "http://127.0.0.1:8000")
"""Addresses of model servers in the pages."""
IMAGES = ("python:3.12-slim",)
"""Images that the pages pull from a registry."""
PORTS = ("8080", "8090")
"""Ports on which the pages serve something."""
TUTORIALS = ("first-agent", "first-plugin", "first-tool", "first-verifier")
"""Pages whose reader has an empty folder and no variables but PATH."""
TYPED = [page for page in PAGES if any(block.language != "text" and not block.needs for block in blocks(page))]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
DEAR = ("benchmarks", "bringing-tasks", "training-a-policy")
"""Pages that take half as long as all others together. Faster tests cover their commands."""


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of `my-model` with the routes of vLLM that the tests need."""
    script = tmp_path_factory.mktemp("model") / "script.json"
    script.write_text(json.dumps({"*": [ANSWER] * 50}))
    options = ["--port", "0", "--print-url", "--script", str(script)]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command = [sys.executable, "-m", "tests.support.vllm_server", "serve", "my-model", *tools, *options]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip().rpartition(':')[2]}"
        server.terminate()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that workspaces of this machine can see; they have a /tmp of their own."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-page-", dir="/var/tmp", ignore_cleanup_errors=True) as made:
        yield Path(made) / "folder"


@pytest.fixture
def terminal(folder: Path, model_server: str) -> Iterator[Terminal]:
    """A terminal in a checkout with an active virtual environment, as after `make quickstart`."""
    environ = {
        **os.environ,
        "PATH": PATH,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY, REPOSITORY / "operator"))),
        "OPENAI_API_KEY": "none",
        "COLUMNS": "120",
    }
    yield from opened(checkout(folder), environ, model_server)


@pytest.fixture
def newcomer(folder: Path, model_server: str) -> Iterator[Terminal]:
    """A terminal in an empty folder, with an active virtual environment and nothing else."""
    folder.mkdir()
    home = folder.with_name("home")
    home.mkdir()
    yield from opened(folder, {"PATH": PATH, "HOME": str(home), "LANG": "C.UTF-8", "COLUMNS": "120"}, model_server)


def opened(folder: Path, environ: Mapping[str, str], model_server: str) -> Iterator[Terminal]:
    """A terminal, closed at the end."""
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    here = dict.fromkeys(MODEL_SERVERS, model_server) | dict.fromkeys(IMAGES, given.THIS_MACHINE) | ports
    found = Terminal(folder, environ, stand_ins=here)
    yield found
    found.close()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.full] * (page.stem in DEAR))
        for page in TYPED
        if page.stem not in TUTORIALS
    ],
)
def test_commands_of_a_page_work(page: Path, terminal: Terminal) -> None:
    given.by_page(page.stem, terminal.folder)
    for block in blocks(page):
        if not block.needs:
            terminal.run(block)


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_works_in_an_empty_folder(name: str, newcomer: Terminal) -> None:
    for block in blocks(REPOSITORY / "docs" / f"{name}.md"):
        newcomer.run(block)
