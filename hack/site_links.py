"""Of links that leave docs/, the site shows the path alone: on it there is no repository to lead to."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this with each page before it is rendered."""
    return re.sub(r"\[`?([^]`]+)`?\]\(\.\./([^)]+)\)", r"`\2`", markdown)
