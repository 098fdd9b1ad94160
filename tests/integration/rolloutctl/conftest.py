"""Fixtures of tests of the command line."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.browser import Page, open_in_browser


@pytest.fixture
def browser() -> Callable[[Path | str], AbstractAsyncContextManager[Page]]:
    """Opens a file or a URL in a fresh browser."""
    return open_in_browser


@pytest.fixture(scope="session")
def rolloutctl_program() -> list[str]:
    """The real command line, as a subprocess's argv."""
    return [sys.executable, "-m", "rolloutctl.main"]
