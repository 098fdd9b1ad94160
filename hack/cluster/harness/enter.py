"""Starts a program in a node's namespaces and prints its process id. `start` runs this file as a separate script.

Only child processes enter a process id namespace, and a process must have no other threads when it enters the other
namespaces; both need a process that does nothing else.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

# sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NEW = "new"


def start(namespaces_of: int | None, argv: list[str], log: Path, environ: dict[str, str] | None = None) -> int:
    """Starts a program in the mount, process id and network namespaces of a process, or in new ones for None.

    Its output is appended to `log`; it has its own session and keeps running when the caller ends. Returns its process
    id in the caller's namespace. Raises CalledProcessError.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    target = NEW if namespaces_of is None else str(namespaces_of)
    done = subprocess.run(
        [sys.executable, "-I", "-S", __file__, target, str(log), *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environ,
        check=True,
    )
    return int(done.stdout)


def _main(target: str, log: str, argv: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if target == NEW:
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET))
    else:
        # The mount namespace last, because /proc shows other process ids afterwards.
        files = [os.open(f"/proc/{target}/ns/{kind}", os.O_RDONLY) for kind in ("pid", "net", "mnt")]
        for file in files:
            _check(libc.setns(file, 0))
    with open(log, "ab") as output:
        program = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
        )
    # Not waited for, because it keeps running when this process ends.
    program.returncode = 0
    print(program.pid)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3:])
