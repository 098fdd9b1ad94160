"""The site's tabs and pages."""

import pkgutil
import re
from pathlib import Path
from typing import Any

import yaml

import agent_rollouts

ROOT = Path(__file__).parents[3]
NAVIGATION: list[dict[str, list[Any]]] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
MOST_LINES = 200
TABS = ["Tutorials", "How-to", "Concepts", "Reference", "Operations", "Maintainers"]


def pages(entry: Any) -> list[str]:
    """Return the files of a navigation entry, in order."""
    match entry:
        case str():
            return [entry]
        case dict():
            return [page for value in entry.values() for page in pages(value)]
        case _:
            return [page for value in entry for page in pages(value)]


def test_site_has_a_tab_for_each_purpose() -> None:
    assert [name for tab in NAVIGATION for name in tab] == TABS


def test_site_shows_each_page_in_one_tab() -> None:
    shown = pages(NAVIGATION)
    assert sorted(shown) == sorted({*(path.name for path in (ROOT / "docs").glob("*.md")), "decisions/index.md"})


def test_python_api_has_each_public_module_on_one_page() -> None:
    generated = [
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    modules = pkgutil.iter_modules(agent_rollouts.__path__, "agent_rollouts.")
    assert sorted(generated) == sorted(module.name for module in modules)


def test_no_page_is_longer_than_200_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "docs").rglob("*.md")}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}
