"""What a page tells its reader in words to have, by the page's name."""

from collections.abc import Callable
from pathlib import Path


def by_page(name: str, folder: Path) -> None:
    """Put it into the folder in which the page is typed."""
    if found := GIVEN.get(name):
        found(folder)


GIVEN: dict[str, Callable[[Path], object]] = {}
