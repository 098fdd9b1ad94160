"""`rolloutctl` without the second for imports that each of its processes takes.

A process that has imported what most commands need forks a child for each command, with its own folder, environment,
standard streams and exit code.
"""

import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

MODULES = (
    "agent_runtime.engine.check",
    "agent_runtime.engine.opening",
    "agent_runtime.engine.run",
    "agent_runtime.engine.validation",
    "agent_runtime.export.formats",
    "agent_runtime.models.factory",
    "agent_runtime.recording.reader",
    "agent_runtime.sandboxes.factory",
    "agent_runtime.tasks.source",
    "rich.live",
    "rich.progress",
    "rich.table",
    "rollout_api.manifest",
    "typer.main",
    "typer.rich_utils",
)
"""Modules to import. `rolloutctl` itself and `kubernetes` are left out, because they read the environment when they are
imported.
"""
MOST_BYTES = 1 << 20


def run_rolloutctl(
    *arguments: str, folder: Path, environ: Mapping[str, str] | None = None, text: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `rolloutctl ARGUMENTS` in a folder to its end.

    `environ` is added to this process's environment. Variables that an interpreter reads at its start have no effect,
    except PYTHONPATH. `text` is its standard input.
    """
    request = json.dumps([arguments, str(folder.absolute()), os.environ | dict(environ or {})]).encode()
    answers, answer = socket.socketpair()
    with answers, contextlib.ExitStack() as opened:
        streams: list[IO[bytes]] = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        streams[0].write(text.encode())
        streams[0].seek(0)
        with answer:
            fds = [*(file.fileno() for file in streams), answer.fileno()]
            socket.send_fds(_forking_process(), [request], fds)
        answers.settimeout(timeout)
        status = int(answers.recv(16))
        written = []
        for file in streams[1:]:
            file.seek(0)
            written.append(file.read().decode())
    return subprocess.CompletedProcess(["rolloutctl", *arguments], status, *written)


@functools.cache
def _forking_process() -> socket.socket:
    """Return the channel to the forking process, which ends when this process closes the channel or ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"from {__name__} import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", code]
        folder = Path(__file__).parents[2]
        subprocess.Popen(
            command, cwd=folder, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
    return ours


def serve(channel_fd: int) -> None:
    """Fork a process for each request. It waits for the command's process, and answers with its exit code."""
    for module in MODULES:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this process does not wait for its children
    with socket.socket(fileno=channel_fd) as channel:
        while True:
            request, fds, _, _ = socket.recv_fds(channel, MOST_BYTES, 4)
            if not request:
                return
            if not os.fork():
                channel.close()
                _wait_for_command(request, fds)
            for fd in fds:
                os.close(fd)


def _wait_for_command(request: bytes, fds: Sequence[int]) -> NoReturn:
    *streams, answer = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = os.fork()
    if not command:
        os.close(answer)
        arguments, folder, environ = json.loads(request)
        _become_rolloutctl(arguments, folder, environ, streams)
    _, status = os.waitpid(command, 0)
    os.write(answer, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become_rolloutctl(
    arguments: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[int]
) -> NoReturn:
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[1:1] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["rolloutctl", *arguments]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        from rolloutctl.main import app

        app()  # does not return
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
