"""Files of a run on this machine: the sockets and tokens of its live sandboxes, and its lock."""

import contextlib
import fcntl
import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

_locked_files: set[int] = set()
"""Descriptors of the files that `process_lock` holds."""


class RunInProgress(Exception):
    """Another live process of this machine runs the job. `holder`: its process, host and start."""

    def __init__(self, run: str, holder: str) -> None:
        pid = holder.partition(" ")[0] or "PID"
        stop = f"stop it with `kill -INT {pid}` and run the same command to resume"
        if pid == str(os.getpid()):
            stop = (
                "leave its loop by `async with contextlib.aclosing(Client().run(...)) as groups:`, which waits for that"
            )
        super().__init__(
            f"{run} is already running (pid {holder or 'unknown'}). Wait for its end, {stop}, "
            "or start another run with --new (Client: new=True)."
        )


def run_folder(uid: str) -> Path:
    """Return a private folder of that run, the same for every process of this user that resumes it.

    It is in the system's temporary folder, because unix socket paths are limited to 107 bytes, and the output may be in
    object storage.
    """
    folder = _path(uid)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it or set TMPDIR to a folder of your own")
    return folder


@contextlib.contextmanager
def run_lock(uid: str, shard: int, name: str) -> Iterator[None]:
    """Lock a shard of a run against other processes of this user on this machine. Raises RunInProgress.

    The kernel releases the lock when its holder dies, so a killed run can be resumed at once.
    """
    path, file, held = _locked(uid, shard, name)
    with held:
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a later holder has also ended and removed the folder
                if not list(path.parent.glob("*.lock")):
                    for folder, _, _ in os.walk(path.parent, topdown=False):
                        with contextlib.suppress(
                            OSError
                        ):  # not empty: live sandboxes, or the logs of those that failed
                            os.rmdir(folder)


def holder(uid: str) -> str | None:
    """Return the process of this user on this machine that works on a run, with its host and start; None without one."""
    for path in sorted(_path(uid).glob("shard-*.lock")):
        with contextlib.suppress(FileNotFoundError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or "unknown"
    return None


def start_lock(uri: str, name: str, shard: int) -> contextlib.AbstractContextManager[None]:
    """Lock the first start of a job against others of this machine until its run has an id. Raises RunInProgress."""
    return run_lock(hashlib.sha256(f"{uri}/{name}".encode()).hexdigest(), shard, name)


@contextlib.contextmanager
def process_lock(descriptor: int) -> Iterator[None]:
    """Lock an open file until the block ends or this process dies. Raises BlockingIOError.

    A forked child of the process, for example a worker of a trainer, does not keep the lock.
    """
    _locked_files.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        _locked_files.discard(descriptor)


def _leave_locks() -> None:
    """Detach a forked child from the locked files. Their descriptors stay valid, because file objects refer to them."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _locked_files:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _locked_files.clear()


os.register_at_fork(after_in_child=_leave_locks)


def _locked(uid: str, shard: int, name: str) -> tuple[Path, TextIO, contextlib.ExitStack]:
    while True:
        # Retry if the holder ended in the meantime and removed file and folder.
        with contextlib.suppress(FileNotFoundError, FileExistsError), contextlib.ExitStack() as opened:
            path = run_folder(uid) / f"shard-{shard}.lock"
            file = opened.enter_context(path.open("a+"))
            for is_last in (False, True):
                try:
                    opened.enter_context(process_lock(file.fileno()))
                    break
                except BlockingIOError:
                    if is_last:
                        file.seek(0)
                        raise RunInProgress(name, file.read()) from None
                    time.sleep(0.05)  # `holder` locks the file for a moment
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return path, file, opened.pop_all()


def _path(uid: str) -> Path:
    return Path(tempfile.gettempdir()) / f"agent-rollouts-{os.getuid()}" / uid[:16]
