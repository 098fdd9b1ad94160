"""Size limits for specs, so that objects of tenants cannot exhaust the operator's memory."""

import json
from typing import Any

from rollout_api.nesting import DEEPEST, too_deep

EXCESS = "excess"
"""Field that the operator's cache adds to an object whose spec was too large to keep. Its value is the reason."""
TOO_DEEP = f"is nested more than {DEEPEST} levels deep; no field of a manifest needs that many"
"""Message for a value that `too_deep` rejects."""
MOST_CHARACTERS = 65_536
"""Longest spec, as JSON, that the operator keeps. Hundreds of objects of a megabyte each would fill its memory."""


def size_problem(value: Any) -> str | None:
    """Return why a value is too large to keep; None if it is within the limits."""
    if too_deep(value):
        return TOO_DEEP
    if (size := len(json.dumps(value))) > MOST_CHARACTERS:
        return f"has {size} characters as JSON, expected at most {MOST_CHARACTERS}; make it smaller"
    return None
