"""Carry a real folder into another one, as a grading does."""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_runtime.executor.init import archives, carrying, unpacking
from agent_runtime.grading.artifacts import carry_rules
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import Task


def piped(write: Callable[[int], Any], read: Callable[[int], Any]) -> Any:
    """Give `read` what `write` writes to a descriptor."""
    ours, theirs = os.pipe()

    def run() -> None:
        try:
            write(theirs)
        except BrokenPipeError:
            pass
        finally:
            os.close(theirs)

    writer = threading.Thread(target=run)
    writer.start()
    try:
        return read(ours)
    finally:
        os.close(ours)
        writer.join()


def packed(folder: Path, parts: Sequence[str] = (".",)) -> bytes:
    """Return the tar of a folder, as a workspace packs it."""

    def read(stream: int) -> bytes:
        with open(stream, "rb", closefd=False) as file:
            return file.read()

    data: bytes = piped(lambda stream: archives.pack_parts(str(folder), stream, tuple(parts)), read)
    return data


def write_all(data: bytes) -> Callable[[int], None]:
    """Write bytes to a descriptor."""

    def write(stream: int) -> None:
        with open(stream, "wb", closefd=False) as file:
            file.write(data)

    return write


def unpack(folder: Path, data: bytes, ancestors: unpacking.Ancestors = "refuse") -> None:
    """Unpack a tar as a workspace does it."""
    piped(write_all(data), lambda stream: unpacking.unpack(str(folder), stream, ancestors))


def rules(*, artifacts: Sequence[str] = (".",), hidden: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rules of a task with those hidden files."""
    files = [{"path": path, "content": ""} for path in hidden]
    task = Task.model_validate({"name": "t", "prompt": "p", "verifier": {"commands": ["true"], "files": files}})
    return carry_rules(task, Verifier(artifacts=list(artifacts)), "/workspace")[1]


def carry(folder: Path, data: bytes, form: Sequence[Mapping[str, Any]]) -> list[str]:
    """Carry a tar into a prepared folder; return what was dropped."""
    reply = carried(folder, data, form)
    return [*reply["dropped"], *(["more"] if reply["more"] else [])]


def carried(folder: Path, data: bytes, form: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Carry a tar into a prepared folder; return the executor's answer."""
    body = json.dumps(list(form)).encode() + b"\n" + data
    reply: Mapping[str, Any] = piped(write_all(body), lambda stream: carrying.carry(os.path.realpath(folder), stream))
    return reply
