"""Whoever types what a page shows, from its top to its end, gets what the page says."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.docs import given
from tests.support.answering_server import answering
from tests.support.documentation import PAGES, REPOSITORY, blocks
from tests.support.terminal import Terminal, checkout

ANSWER = "I have looked at it. <answer>Right</answer>"
MODEL_SERVERS = ("http://localhost:8000", "http://127.0.0.1:8000")
"""Where pages have their model server."""
TYPED = [page for page in PAGES if any(block.language != "text" and not block.needs for block in blocks(page))]


@pytest.fixture(scope="session")
def model_server() -> Iterator[str]:
    with answering(ANSWER) as url:
        yield url


@pytest.fixture
def terminal(tmp_path: Path, model_server: str) -> Iterator[Terminal]:
    """In a checkout, with the virtual environment at work, as `make quickstart` leaves it."""
    folder = checkout(tmp_path)
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY, REPOSITORY / "operator"))),
        "OPENAI_API_KEY": "none",
        "COLUMNS": "120",
    }
    found = Terminal(folder, environ, dict.fromkeys(MODEL_SERVERS, model_server))
    yield found
    found.close()


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.name)
def test_what_a_page_shows_can_be_typed(page: Path, terminal: Terminal) -> None:
    given.by_page(page.stem, terminal.folder)
    for block in blocks(page):
        if not block.needs:
            terminal.run(block)
