"""Processes identified by id and start time, so that a later process with the same id is never taken for it."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A started process: its id, and the kernel's start time in clock ticks after boot."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether the process runs (a zombie does not count)."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.started and found[0] not in ("Z", "X")


def parse_stat(text: str) -> tuple[str, int]:
    """Returns the state letter and the start time in ticks from the text of `/proc/PID/stat`, in which a program's name
    may contain spaces and brackets.
    """
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def current(pid: int) -> Process:
    """Returns the process that has this id now. Raises ProcessLookupError if there is none."""
    found = _stat(pid)
    if found is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid, found[1])


def save(process: Process, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"pid": process.pid, "started": process.started}) + "\n")


def load(file: Path) -> Process | None:
    """Returns the process stored in a file, alive or not; None if there is no such file, or it is truncated."""
    try:
        value = json.loads(file.read_text())
        return Process(value["pid"], value["started"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def running(file: Path) -> Process | None:
    """Returns the process stored in a file if it is alive."""
    process = load(file)
    return process if process is not None and process.alive else None


def stop(process: Process, number: signal.Signals, grace_seconds: float) -> None:
    """Ends a process with this signal, and with SIGKILL after the grace period; returns when it has ended."""
    deadline = time.monotonic() + grace_seconds
    while process.alive:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return
        while process.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        number, deadline = signal.SIGKILL, time.monotonic() + grace_seconds


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
