"""How deeply JSON may be nested, so that what is recorded can be read back."""

from collections.abc import Mapping
from typing import Any, Final

DEEPEST: Final = 128
"""Levels of objects and lists. Pydantic's JSON parser ends at 200 (jiter's recursion limit), and a record adds some."""


def too_deep(value: Any) -> bool:
    """Whether a value is nested more than DEEPEST levels deep. Takes no stack of its own, however deep it is."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (Mapping, list, tuple))
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, (Mapping, list, tuple))
        ]
        if not level:
            return False
    return True
