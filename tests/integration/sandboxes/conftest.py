"""The three providers that share one contract, and the spec of a small task."""

import asyncio
import shlex
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.sandboxes.base import CommandResult, Fence, SandboxProvider, WorkspaceSpec
from agent_runtime.sandboxes.local.environment import readable_by, running_environment
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.files import TaskFile
from rollout_api.sandbox import SandboxTemplate
from tests.support.dummy_sandboxes import DummyProvider, Files, ended

REPOSITORY = Path(__file__).parents[3]
FIRST = Fence(1, "first")
NOBODY = 65534


FETCH = "import sys, urllib.request\nprint(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"


def fetched(url: str) -> bytes:
    """Return what `FETCH` prints."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return bytes(response.read()) + b"\n"


async def small_shell(command: str | Sequence[str], files: Files) -> CommandResult:
    """Run the commands of the contract tests without a shell: `a; b`, echo, >>, cat, sleep, exit, python3.

    A Python program reads the URL in its last argument, as `FETCH` does.
    """
    output = b""
    for part in (command if isinstance(command, str) else shlex.join(command)).split("; "):
        words, _, target = part.partition(" >> ")
        name, *arguments = shlex.split(words)
        text = b""
        match name:
            case "echo":
                text = " ".join(arguments).encode() + b"\n"
            case "cat":
                path = f"/workspace/{arguments[0]}"
                if path not in files.content:
                    return ended(1, output, b"no such file")
                text = files.content[path]
            case "sleep":
                await asyncio.sleep(float(arguments[0]))
            case "python3":
                text = await asyncio.to_thread(fetched, arguments[-1])
            case "exit":
                return ended(int(arguments[0]), output)
        if target:
            path = f"/workspace/{target}"
            files.content[path] = files.content.get(path, b"") + text
            files.modes.setdefault(path, 0o644)
        else:
            output += text
    return ended(0, output)


def python_for_nobody() -> tuple[str, str]:
    """Return an interpreter that any user may start, and the PYTHONPATH by which it finds this repository and its
    libraries.
    """
    libraries = f"{REPOSITORY}:{Path(pytest.__file__).parents[1]}"
    if readable_by(running_environment(), NOBODY):
        return sys.executable, libraries
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = Path(f"/usr/bin/python{version}")
    assert system.exists(), f"install Python {version} where every user can start it, to test as an ordinary user"
    return str(system), libraries


@dataclass
class Case:
    """One provider under test; `provider()` makes a further object for the same place, as another process would."""

    kind: str
    provider: Callable[..., SandboxProvider]


def spec(**changes: Any) -> WorkspaceSpec:
    """Return a small task: one file, and a setup command that writes one line."""
    defaults: dict[str, Any] = {
        "group": "task-1",
        "working_dir": "/workspace",
        "files": [TaskFile(path="given.txt", content="given\n")],
        "setup": ["echo prepared >> setup.log"],
        "setup_seconds": 30,
        "start_seconds": 30,
    }
    return WorkspaceSpec(**{**defaults, **changes})


def template(mode: str, **changes: Any) -> SandboxTemplate:
    """Return the sandbox of a job in that mode."""
    return SandboxTemplate.model_validate({"workspaces": {"mode": mode}, "idleSeconds": 120, **changes})


@pytest.fixture(params=["dummy", "Overlay", "Plain"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    kind: str = request.param

    def provider(places: int = 8) -> SandboxProvider:
        if kind == "dummy":
            return DummyProvider(str(tmp_path), small_shell, places=places)
        return LocalProvider(tmp_path / "run", template(kind), places=places)

    yield Case(kind, provider)
    last = provider()
    if kind == "dummy" or (tmp_path / "run").exists():
        await last.close()


@pytest.fixture
async def provider(case: Case) -> AsyncIterator[SandboxProvider]:
    opened = case.provider()
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def overlay(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    opened = LocalProvider(tmp_path / "run", template("Overlay"), places=8)
    await opened.open()
    yield opened
    await opened.close()
