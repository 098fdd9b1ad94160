"""Conversion of values between an executor's JSON and the engine's types. Pure."""

import base64
from collections.abc import Mapping
from typing import Any, Literal

from agent_runtime.sandboxes.base import CommandResult, FileStat
from rollout_api.base import quantity_value
from rollout_api.sandbox import Resources

FILE_TYPES: Mapping[str, Literal["file", "folder", "link"]] = {"file": "file", "directory": "folder", "symlink": "link"}


def bytes_of(value: Mapping[str, str] | None) -> bytes:
    """Return the bytes of `{"encoding", "data"}`."""
    if value is None:
        return b""
    return value["data"].encode() if value["encoding"] == "utf-8" else base64.b64decode(value["data"])


def not_started(message: str) -> CommandResult:
    """Return the result of a command that could not be started: an unknown program, folder or user."""
    data = message.encode(errors="replace")
    return CommandResult(None, None, "NotStarted", 0.0, b"", data, 0, len(data), stderr_head=len(data))


def file_stat(name: str, entry: Mapping[str, Any]) -> FileStat:
    """Convert a path's or folder entry's status."""
    return FileStat(
        name=name,
        type=FILE_TYPES.get(entry["type"], "other"),
        size=entry["size"],
        mode=entry["mode"],
        modified=entry["modified"],
        target=entry["target"],
    )


def limits_of(resources: Resources) -> dict[str, int | None]:
    def whole(quantity: str | None) -> int | None:
        return None if quantity is None else int(quantity_value(quantity))

    return {
        "memoryBytes": whole(resources.memory),
        "processes": resources.processes,
        "diskBytes": whole(resources.disk),
        "fileBytes": whole(resources.file_size),
    }
