"""Ports of this machine's loopback, for servers that a test starts."""

import contextlib
import socket
import subprocess
import time
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    """A port that nobody listens on."""
    return free_ports(1)[0]


def wait_for_port(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the server listens there. Raises RuntimeError, with the end of its log, where it ends or takes too long."""
    deadline = time.monotonic() + 20
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{server.args!r} did not start on port {port}:\n{log.read_text()[-2000:]}")
