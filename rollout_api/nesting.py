"""Limit on JSON nesting, so that every record can be read back."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

DEEPEST: Final = 128
"""Most levels of nested objects and lists. Pydantic's JSON parser (jiter) stops at 200, and a record adds some levels."""

_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]|[^][{}"]+', re.DOTALL)


def read_json(data: bytes) -> Any:
    """Parse JSON that tenants or models wrote: any depth, and numbers of any length. Raises ValueError if it is no JSON.

    Everything below 2 × DEEPEST levels is read as null, so that code which recurses can read the value. If a number has
    more digits than Python converts, it is read as text.
    """
    most = 2 * DEEPEST
    try:
        value = _loads(data)
        is_deeper = data.count(b"[") + data.count(b"{") > most and _is_deeper(value, most)
    except RecursionError:
        is_deeper = True
    return _loads(_without_depths(data, most)) if is_deeper else value


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # from int()
        return json.loads(data, parse_int=_number)


def _number(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


def json_object(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError with a message such as `malformed JSON (...)`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}; expected an object")
    return value


def _without_depths(data: bytes, most: int) -> bytes:
    kept, depth = [], 0
    for token in _TOKENS.findall(data):
        if token in (b"{", b"["):
            depth += 1
            if depth == most:
                kept.append(b"null")
        if depth < most:
            kept.append(token)
        if token in (b"}", b"]"):
            depth -= 1
    return b"".join(kept)


def too_deep(value: Any) -> bool:
    """Whether a value is nested more than DEEPEST levels deep. Does not recurse."""
    return _is_deeper(value, DEEPEST)


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
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


def record_json(value: Any) -> str:
    """Serialize a value as JSON. Raises TypeError or ValueError if it is too deep or cannot be represented."""
    if too_deep(value):
        raise ValueError(f"it is nested more than {DEEPEST} levels deep; make it flatter")
    return json.dumps(value, default=_object)


def estimated_values(data: bytes) -> int:
    """Return about how many values JSON text has, from its separators. Parsed, a value may take 100 times its length."""
    return sum(map(data.count, (b",", b"[", b"{")))


def as_recorded(value: Any) -> Any:
    """Return a copy of a JSON value as its record returns it: unpaired surrogates are `?`, numbers that JSON lacks are
    null, tuples are lists, and names are text.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {as_recorded(_name(name)): as_recorded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_recorded(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _name(name: Any) -> str:
    return str(name).lower() if isinstance(name, bool) else str(name)


def _object(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")
