"""Fails the build if the Python pages lack a public name, because mkdocstrings omits what it cannot resolve, silently."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = ROOT / "tests" / "unit" / "public_names.txt"


def on_post_build(config: Any, **_: Any) -> None:
    """Compare the pages with the list that a unit test keeps equal to the package; mkdocs calls this at the end."""
    site = "".join(page.read_text() for page in Path(config["site_dir"]).glob("python-*.html"))
    names = [name for name in NAMES.read_text().split() if name.count(".") > 1]
    if missing := [name for name in names if f'id="{name}"' not in site]:
        raise SystemExit(f"The Python pages lack {', '.join(missing)}: see preload_modules in mkdocs.yml")
