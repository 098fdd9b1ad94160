"""Reads untrusted JSON objects and query strings field by field; every complaint names the field and what was expected."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Complaint = Callable[[str], Exception]

_ABSENT = object()
# A number that may have a fraction, where nothing smaller bounds it: as seconds, 30 years.
MAX_NUMBER = 1e9


class Fields:
    """The fields of one JSON object. `done` refuses those that nobody asked for. Raises what `complaint` makes."""

    def __init__(self, value: Any, where: str, complaint: Complaint) -> None:
        self._where, self._complaint = where, complaint
        if not isinstance(value, dict):
            raise complaint(f"{where}: a JSON object expected, got {_shown(value)}")
        self._values: dict[str, Any] = value
        self._known: set[str] = set()

    def name_of(self, field: str) -> str:
        """How messages call a field."""
        return f"{self._where}.{field}"

    def wrong(self, field: str, expected: str) -> Exception:
        """The complaint about a field that is not as expected."""
        if field not in self._values:
            return self._complaint(f"{self.name_of(field)} is missing: {expected} expected")
        return self._complaint(f"{self.name_of(field)}: {expected} expected, got {_shown(self._values[field])}")

    def raw(self, field: str, default: Any = _ABSENT) -> Any:
        """The value as it is; `default` where it is absent or null."""
        self._known.add(field)
        value = self._values.get(field)
        if value is None:
            if default is _ABSENT:
                raise self.wrong(field, "a value")
            return default
        return value

    def all(self) -> dict[str, Any]:
        """Every field as it is."""
        return self._values

    def text(self, field: str, default: Any = _ABSENT, *, pattern: str = r"[^\0]*", expected: str = "a string") -> Any:
        self._known.add(field)
        value = self._values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL) or not _is_encodable(value):
            raise self.wrong(field, expected)
        return value

    def whole(self, field: str, default: Any = _ABSENT, *, least: int = 0, most: int = 2**53) -> Any:
        """A whole number between the two, both included."""
        self._known.add(field)
        value = self._values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(field, f"a whole number from {least} to {most}")
        return value

    def number(self, field: str, default: Any = _ABSENT, *, least: float = 0, most: float = MAX_NUMBER) -> Any:
        self._known.add(field)
        value = self._values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(field, f"a number from {least:g} to {most:g}")
        return value

    def flag(self, field: str, default: Any = _ABSENT) -> Any:
        self._known.add(field)
        value = self._values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def choice(self, field: str, choices: Sequence[str], default: Any = _ABSENT) -> Any:
        self._known.add(field)
        value = self._values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(field, "one of " + ", ".join(choices))
        return value

    def texts(self, field: str, default: Any = _ABSENT, *, least: int = 0) -> Any:
        """A list of strings without NUL characters."""
        self._known.add(field)
        value = self._values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if not isinstance(value, list) or len(value) < least or not all(map(_is_plain, value)):
            raise self.wrong(field, f"a list of {least or 'any number of'} or more strings without NUL characters")
        return value

    def items(self, field: str) -> list[Any]:
        """A list of anything; empty by default."""
        value = self.raw(field, [])
        if not isinstance(value, list):
            raise self.wrong(field, "a list")
        return value

    def environment(self, field: str) -> dict[str, str]:
        """A map of variables; empty by default."""
        value = self.raw(field, {})
        if not isinstance(value, dict) or not all(
            name and "=" not in name and _is_plain(name) and _is_plain(text) for name, text in value.items()
        ):
            raise self.wrong(field, "an object of names (no '=') and strings without NUL characters")
        return value

    def object(self, field: str) -> Fields:
        """The fields of a nested object; no fields when it is absent."""
        return Fields(self.raw(field, {}), self.name_of(field), self._complaint)

    def done(self) -> None:
        """Refuse fields that were never asked for, so that a typing error is not silently ignored."""
        if not self._values.keys() <= self._known:
            unknown = sorted(self._values.keys() - self._known)
            known = ", ".join(sorted(self._known))
            raise self._complaint(f"{self.name_of(unknown[0])} is not a field of this object, which has: {known}")


class Query:
    """The values of a query string, read like Fields. Raises what `complaint` makes."""

    def __init__(self, values: Mapping[str, list[str]], complaint: Complaint) -> None:
        self._values, self._complaint = values, complaint
        self._known: set[str] = set()

    def many(self, name: str) -> list[str]:
        """All values of a repeatable field."""
        self._known.add(name)
        return self._values.get(name, [])

    def text(self, name: str) -> str:
        """A required value, not empty and without NUL characters."""
        value = self._one(name)
        if not value or "\0" in value:
            raise self._complaint(f"query {name}: a value without NUL characters expected, got {_shown(value)}")
        return value

    def whole(self, name: str, default: Any = _ABSENT, *, most: int = 2**53) -> Any:
        """A whole number from 0 to `most`."""
        value = self._one(name)
        if value is None and default is not _ABSENT:
            return default
        if value is None or not re.fullmatch(r"[0-9]{1,17}", value) or int(value) > most:
            raise self._complaint(f"query {name}: a whole number from 0 to {most} expected, got {_shown(value)}")
        return int(value)

    def seconds(self, name: str, most: float) -> float:
        """A decimal number from 0 to `most`; 0 by default."""
        value = self._one(name)
        if value is None:
            return 0.0
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", value) or float(value) > most:
            raise self._complaint(f"query {name}: a number of seconds from 0 to {most:g} expected, got {_shown(value)}")
        return float(value)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self._one(name)
        if value is None:
            return default
        if value not in choices:
            raise self._complaint(f"query {name}: one of {', '.join(choices)} expected, got {_shown(value)}")
        return value

    def user(self, name: str) -> str | None:
        """A user, empty for the workspace's default one; None where the field is not given."""
        value = self._one(name)
        if value is not None and "\0" in value:
            raise self._complaint(f"query {name}: a value without NUL characters expected, got {_shown(value)}")
        return value

    def mode(self, name: str) -> int | None:
        """File permissions in octal, 0 to 7777."""
        value = self._one(name)
        if value is None:
            return None
        if not re.fullmatch(r"[0-7]{1,4}", value):
            raise self._complaint(f"query {name}: permissions in octal like 644 expected, got {_shown(value)}")
        return int(value, 8)

    def done(self) -> None:
        """Refuse fields that were never asked for."""
        unknown = sorted(self._values.keys() - self._known)
        if unknown:
            known = ", ".join(sorted(self._known)) or "none"
            raise self._complaint(f"query {_shown(unknown[0])}: no such field here; known: {known}")

    def _one(self, name: str) -> str | None:
        self._known.add(name)
        values = self._values.get(name)
        if values is None:
            return None
        if len(values) > 1:
            raise self._complaint(f"query {name}: given {len(values)} times, once expected")
        return values[0]


def encoded(data: bytes | bytearray) -> dict[str, str]:
    """`{"encoding", "data"}` of bytes: utf-8 only when they are valid UTF-8."""
    try:
        return {"encoding": "utf-8", "data": data.decode()}
    except UnicodeDecodeError:
        return {"encoding": "base64", "data": base64.b64encode(data).decode()}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and _is_encodable(value)


def _is_encodable(value: str) -> bool:
    """JSON can carry lone surrogates; those that stand for the bytes of a name that is not UTF-8 are welcome."""
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
