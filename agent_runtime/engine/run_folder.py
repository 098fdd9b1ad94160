"""Where a run keeps what belongs to this machine alone: the sockets and tokens of its live sandboxes."""

import contextlib
import os
import tempfile
from pathlib import Path


def run_folder(uid: str) -> Path:
    """A private folder of that run, the same for every process of this user that goes on with it.

    In the system's temporary folder, not beside the output: unix socket paths are limited to 107 bytes, and the output may
    be in object storage.
    """
    folder = _path(uid)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it or set TMPDIR to a folder of your own")
    return folder


def remove_run_folder(uid: str) -> None:
    """After the run's end. What a sandbox said stays, for whoever wants to read it."""
    for folder, _, _ in os.walk(_path(uid), topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


def _path(uid: str) -> Path:
    return Path(tempfile.gettempdir()) / f"agent-rollouts-{os.getuid()}" / uid[:16]
