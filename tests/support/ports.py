"""Ports of this machine's loopback, for servers that a test starts."""

import contextlib
import random
import socket
import subprocess
import time
from pathlib import Path

PORTS = range(12_000, 30_000)
"""Above Kubernetes' own ports, below its node ports (30000 and more) and below Linux's ports of outgoing connections
(32768 and more). So no connection takes one of them between the choice and the server's start.
"""


def free_ports(count: int) -> list[int]:
    """Return different ports without a listener. They are random whatever the seed, because other tests choose at the
    same time.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", random.SystemRandom().choice(PORTS)))
                found.append(one.getsockname()[1])
        return found


def free_port() -> int:
    """Return a port without a listener."""
    return free_ports(1)[0]


def listens(port: int) -> bool:
    """Return whether something listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_for_port(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server listens there. Raises RuntimeError, with the end of its log, if it ends or takes too long."""
    deadline = time.monotonic() + 20
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{server.args!r} did not start on port {port}:\n{log.read_text()[-2000:]}")
