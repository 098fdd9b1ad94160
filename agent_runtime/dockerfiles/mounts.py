"""Reads the `--mount` flags of RUN."""

import re
from collections.abc import Callable
from typing import Any, Final

from agent_runtime.dockerfiles.instructions import Mount

_TYPES: Final = ("bind", "cache", "secret", "tmpfs", "ssh")
_SHARING: Final = ("shared", "private", "locked")
_OPTIONS: Final = (
    "type, from, source (src), target (dst, destination), readonly (ro), readwrite (rw), id, sharing, required, size, "
    "mode, uid, gid, env"
)
_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_FIELD: Final = re.compile(r'(?:"((?:[^"]|"")*)"|([^",]*))(,|\Z)')
_SIZE: Final = re.compile(r"(\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)) ?(?:([kmgtp])(?:i?b)?|b)?", re.IGNORECASE)
_SIZE_UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_MAX_ID: Final = 2**32 - 1
_MAX_SIZE: Final = 2**63 - 1


class MountError(ValueError):
    """A mount that BuildKit refuses."""


def read_mount(text: str, expand: Callable[[str], str] | None = None) -> Mount:
    """Read the value of a `--mount` flag, and expand the value of each option.

    Without `expand`, values are kept as written, and those that contain `$` are checked only once they are expanded.
    Raises MountError, and what `expand` raises.
    """
    options: dict[str, Any] = {"type": "bind"}
    for option in _fields(text):
        key, equals, value = option.partition("=")
        key = key.lower()
        if key == "from" and "$" in value[:-1]:
            raise MountError("from= does not expand variables; name a stage (FROM ... AS NAME) and use its name")
        if expand is not None:
            value = expand(value)
        elif "$" in value and key not in ("from", "source", "src", "target", "dst", "destination", "id", "env"):
            continue
        _set(options, key, value if equals else None)
    return _checked(text, options)


def _fields(text: str) -> list[str]:
    fields: list[str] = []
    at = 0
    while text:
        match = _FIELD.match(text, at)
        if match is None:
            raise MountError(f'{text!r} has a misplaced double quote; quote a whole option, for example "source=a,b"')
        quoted, plain, separator = match.groups()
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
        at = match.end()
        if not separator:
            return fields
    raise MountError("--mount is empty; expected, for example, type=cache,target=/root/.cache")


def _set(options: dict[str, Any], key: str, value: str | None) -> None:
    if value is None and key not in ("readonly", "ro", "readwrite", "rw", "required"):
        raise MountError(f"the option {key!r} has no value; expected {key}=VALUE")
    kind = options["type"]
    text = "true" if value is None else value
    match key:
        case "type" | "sharing":
            allowed = _TYPES if key == "type" else _SHARING
            if text.lower() not in allowed:
                raise MountError(f"{key} is {text!r}; expected {', '.join(allowed)}")
            options[key] = text.lower()
        case "from":
            options["from_"] = text or None
        case "source" | "src":
            options["source"] = text or None
        case "target" | "dst" | "destination":
            options["target"] = text or None
        case "id":
            options["id"] = text or None
        case "env":
            options["env"] = text
        case "readonly" | "ro":
            options["read_only"] = _boolean(key, text)
        case "readwrite" | "rw":
            options["read_only"] = not _boolean(key, text)
        case "required":
            if kind not in ("secret", "ssh"):
                raise MountError(f"required is not an option of {kind} mounts; write type=secret or type=ssh before it")
            options["required"] = _boolean(key, text)
        case "size":
            if kind != "tmpfs":
                raise MountError(f"size is not an option of {kind} mounts; write type=tmpfs before it")
            options["size"] = _size(text) or None
        case "mode":
            options["mode"] = _number(key, text, 8)
        case "uid" | "gid":
            options[key] = _number(key, text, 10)
        case _:
            raise MountError(f"unknown option {key!r}; expected {_OPTIONS}")


def _checked(text: str, options: dict[str, Any]) -> Mount:
    kind = options["type"]
    if kind in ("bind", "tmpfs"):
        for name in ("mode", "uid", "gid"):
            if name in options:
                raise MountError(f"{name} is not an option of {kind} mounts")
    options.setdefault("read_only", kind not in ("cache", "tmpfs"))
    if kind == "secret":
        if options.get("from_") is not None:
            raise MountError("from is not an option of secret mounts")
        if not any(options.get(name) for name in ("source", "target", "id")):
            raise MountError("a secret mount needs id, source or target")
        if options.get("source") and options.get("id"):
            raise MountError("a secret mount has both id and source, which mean the same; remove one")
    if options.get("sharing") is not None and kind != "cache":
        raise MountError(f"sharing is not an option of {kind} mounts; only of cache mounts")
    return Mount(text, **options)


def _boolean(key: str, text: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise MountError(f"{key} is {text!r}; expected true or false")
    return text in _TRUE


def _number(key: str, text: str, base: int) -> int:
    digits = "01234567" if base == 8 else "0123456789"
    # Checked before the conversion, whose time grows with the square of the length.
    significant = text.lstrip("0")
    if text and len(significant) <= 11 and all(character in digits for character in text):
        number = int(text, base)
        if number <= _MAX_ID:
            return number
    raise MountError(f"{key} is {text!r}; expected {'an octal' if base == 8 else 'a'} number up to 2^32 - 1")


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is not None:
        size = float(match[1]) * 1024 ** _SIZE_UNITS[(match[2] or "").lower()]
        if size <= _MAX_SIZE:
            return int(size)
    raise MountError(f"size is {text!r}; expected a number of bytes, or with a unit such as 64m or 2g")
