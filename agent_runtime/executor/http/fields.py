"""Parses untrusted JSON objects and query strings field by field. Errors name the field and the expected value."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.executor.errors import bad_request

ErrorFactory = Callable[[str], Exception]

_ABSENT = object()
_PLAIN = "a value without NUL characters"
# Default upper bound of a decimal number; in seconds, 30 years.
MAX_NUMBER = 1e9


class Fields:
    """The fields of one JSON object. `done` rejects unread fields. Raises the exception that `make_error` returns."""

    def __init__(self, value: Any, where: str, make_error: ErrorFactory) -> None:
        self._where, self._make_error = where, make_error
        if not isinstance(value, dict):
            raise make_error(f"{where}: a JSON object expected, got {_shown(value)}")
        self._values: dict[str, Any] = value
        self._known: set[str] = set()

    def name_of(self, field: str) -> str:
        """Return a field's name for messages."""
        return f"{self._where}.{field}"

    def wrong(self, field: str, expected: str) -> Exception:
        """Return the error for an invalid field."""
        if field not in self._values:
            return self._make_error(f"{self.name_of(field)} is missing: {expected} expected")
        return self._make_error(f"{self.name_of(field)}: {expected} expected, got {_shown(self._values[field])}")

    def raw(self, field: str, default: Any = _ABSENT) -> Any:
        """Return the unparsed value; `default` if it is absent or null."""
        return self._given(field, default, "a value", lambda value: value is not None)

    def all(self) -> dict[str, Any]:
        """Return every field unparsed."""
        return self._values

    def text(self, field: str, default: Any = _ABSENT, *, pattern: str = r"[^\0]*", expected: str = "a string") -> Any:
        def is_right(value: Any) -> bool:
            return isinstance(value, str) and bool(re.fullmatch(pattern, value, re.DOTALL)) and _is_encodable(value)

        return self._given(field, default, expected, is_right)

    def whole(self, field: str, default: Any = _ABSENT, *, least: int = 0, most: int = 2**53) -> Any:
        """Return an integer between two bounds, inclusive."""

        def is_right(value: Any) -> bool:
            return _is_number(value) and least <= value <= most and value == int(value)

        value = self._given(field, default, f"a whole number from {least} to {most}", is_right)
        return int(value) if isinstance(value, float) else value

    def number(self, field: str, default: Any = _ABSENT, *, least: float = 0, most: float = MAX_NUMBER) -> Any:
        expected = f"a number from {least:g} to {most:g}"
        return self._given(field, default, expected, lambda value: _is_number(value) and least <= value <= most)

    def flag(self, field: str, default: Any = _ABSENT) -> Any:
        return self._given(field, default, "true or false", lambda value: isinstance(value, bool))

    def choice(self, field: str, choices: Sequence[str], default: Any = _ABSENT) -> Any:
        expected = "one of " + ", ".join(choices)
        return self._given(field, default, expected, lambda value: isinstance(value, str) and value in choices)

    def texts(self, field: str, default: Any = _ABSENT) -> Any:
        """Return a list of strings without NUL characters."""
        expected = "a list of strings without NUL characters"
        return self._given(
            field, default, expected, lambda value: isinstance(value, list) and all(map(_is_plain, value))
        )

    def items(self, field: str) -> list[Any]:
        """Return a list of any values; empty by default."""
        items: list[Any] = self._given(field, [], "a list", lambda value: isinstance(value, list))
        return items

    def environment(self, field: str) -> dict[str, str]:
        """Return a map of variables; empty by default."""

        def is_right(value: Any) -> bool:
            return isinstance(value, dict) and all(
                name and "=" not in name and _is_plain(name) and _is_plain(text) for name, text in value.items()
            )

        expected = "an object of names (no '=') and strings without NUL characters"
        variables: dict[str, str] = self._given(field, {}, expected, is_right)
        return variables

    def object(self, field: str) -> Fields:
        """Return the fields of a nested object; no fields if it is absent."""
        return Fields(self.raw(field, {}), self.name_of(field), self._make_error)

    def done(self) -> None:
        """Reject unread fields, so that a typing error is not silently ignored."""
        if not self._values.keys() <= self._known:
            unknown = sorted(self._values.keys() - self._known)
            known = ", ".join(sorted(self._known))
            raise self._make_error(f"{self.name_of(unknown[0])} is not a field of this object, which has: {known}")

    def _given(self, field: str, default: Any, expected: str, is_right: Callable[[Any], bool]) -> Any:
        self._known.add(field)
        value = self._values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if not is_right(value):
            raise self.wrong(field, expected)
        return value


class Query:
    """The values of a query string, read like Fields. Raises BadRequest."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values = values
        self._known: set[str] = set()

    def many(self, name: str) -> list[str]:
        """Return all values of a repeatable field."""
        self._known.add(name)
        return self._values.get(name, [])

    def text(self, name: str) -> str:
        """Return a required, non-empty value without NUL characters."""
        value: str = self._given(name, _ABSENT, _PLAIN, lambda value: value if value and "\0" not in value else None)
        return value

    def whole(self, name: str, default: Any = _ABSENT, *, most: int = 2**53) -> Any:
        """Return an integer from 0 to `most`."""

        def read(value: str) -> int | None:
            return int(value) if re.fullmatch(r"[0-9]{1,17}", value) and int(value) <= most else None

        return self._given(name, default, f"a whole number from 0 to {most}", read)

    def seconds(self, name: str, most: float) -> float:
        """Return a decimal number from 0 to `most`; 0 by default."""

        def read(value: str) -> float | None:
            is_decimal = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", value)
            return float(value) if is_decimal and float(value) <= most else None

        return float(self._given(name, 0.0, f"a number of seconds from 0 to {most:g}", read))

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        expected = f"one of {', '.join(choices)}"
        return str(self._given(name, default, expected, lambda value: value if value in choices else None))

    def user(self, name: str) -> str | None:
        """Return a user; empty means the workspace's default user; None if the field is not given."""
        user: str | None = self._given(name, None, _PLAIN, lambda value: value if "\0" not in value else None)
        return user

    def mode(self, name: str) -> int | None:
        """Return octal file permissions, 0 to 7777."""

        def read(value: str) -> int | None:
            return int(value, 8) if re.fullmatch(r"[0-7]{1,4}", value) else None

        mode: int | None = self._given(name, None, "permissions in octal like 644", read)
        return mode

    def done(self) -> None:
        """Reject unread fields."""
        unknown = sorted(self._values.keys() - self._known)
        if unknown:
            known = ", ".join(sorted(self._known)) or "none"
            raise bad_request(f"query {_shown(unknown[0])}: unknown field; expected one of: {known}")

    def _given(self, name: str, default: Any, expected: str, read: Callable[[str], Any]) -> Any:
        """Return a value parsed by `read`, which returns None for an invalid one."""
        values = self.many(name)
        if len(values) > 1:
            raise bad_request(f"query {name}: given {len(values)} times, once expected")
        if not values and default is not _ABSENT:
            return default
        value = values[0] if values else None
        found = None if value is None else read(value)
        if found is None:
            raise bad_request(f"query {name}: {expected} expected, got {_shown(value)}")
        return found


def encoded(data: bytes | bytearray) -> dict[str, str]:
    """Return bytes as `{"encoding", "data"}`: utf-8 only if they are valid UTF-8."""
    try:
        return {"encoding": "utf-8", "data": data.decode()}
    except UnicodeDecodeError:
        return {"encoding": "base64", "data": base64.b64encode(data).decode()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and _is_encodable(value)


def _is_encodable(value: str) -> bool:
    """Whether a text can be encoded. Lone surrogates are accepted if they represent the bytes of a name that is not
    UTF-8.
    """
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
