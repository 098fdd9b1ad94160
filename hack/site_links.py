"""Shows links that leave docs/ as plain paths, because the site has no repository to link to."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the page with such links replaced; mkdocs calls this for each page before it is rendered."""
    return re.sub(r"\[`?([^]`]+)`?\]\(\.\./([^)]+)\)", r"`\2`", markdown)
