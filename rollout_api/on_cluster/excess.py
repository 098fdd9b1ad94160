"""Checks for objects that are too large to keep and plan."""

import json
from typing import Any

from rollout_api.nesting import DEEPEST, too_deep

EXCESS = "excess"
"""Field of an object whose spec was too large to be kept: why."""
TOO_DEEP = f"is nested more than {DEEPEST} levels deep; nothing in a manifest has to be"
"""Why a value is too large that `too_deep` finds."""
MOST_CHARACTERS = 65_536
"""Of a spec that is kept whole. Hundreds of one tenant's objects of a megabyte each would fill the operator's memory."""


def excess(value: Any) -> str | None:
    """Why a value is too large to be kept and planned with; None for what people write."""
    if too_deep(value):
        return TOO_DEEP
    if (size := len(json.dumps(value))) > MOST_CHARACTERS:
        return f"has {size} characters as JSON, expected at most {MOST_CHARACTERS}; make it smaller"
    return None
