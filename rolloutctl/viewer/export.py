"""A run as one HTML file: the same pages, with their data inside. `head`, then `group` for each group, then `tail`.

The file runs one script, which its Content-Security-Policy allows by digest, and asks for nothing else.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rolloutctl.viewer.assets import asset
from rolloutctl.viewer.rollout import Rollout, page

Json = Mapping[str, Any]

_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript><p>This report needs JavaScript. Allow it for this file.</p></noscript>
<div id="app"></div>
<script type="application/json" id="data">{data}</script>
"""


def head(summary: Json, rows: Sequence[Json]) -> str:
    """Return the beginning of the file, with what the run's page shows."""
    style, script = asset("app.css"), asset("app.js")
    return _HEAD.format(
        # Styles are set on elements by the script, which needs no permission.
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        "form-action 'none'",
        title=html.escape(f"{summary['name']}: rollouts"),
        style=style,
        data=in_script({"summary": summary, "rows": rows}),
    )


def group(number: int, rollouts: Mapping[int, Rollout]) -> str:
    """Return a script element with the transcripts of a group: JSON by index, compressed with gzip, as base64.

    The members are compressed together because they share their prompt.
    """
    pages = {str(index): page(rollout) for index, rollout in rollouts.items()}
    data = json.dumps(pages, separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
    return f'<script type="text/plain" data-group="{number}">{packed}</script>\n'


def tail() -> str:
    """Return the end of the file."""
    return f"<script>{asset('app.js')}</script>\n</body>\n</html>\n"


def in_script(value: Any) -> str:
    """Return JSON for a script element. It has no `<`, so that it cannot end the element or begin a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _digest(inline: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
