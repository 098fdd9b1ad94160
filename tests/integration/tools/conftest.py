"""A workspace on this machine: real processes and real files below a temporary folder."""

import os
import shutil
import stat as stat_module
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.sandboxes.base import CommandResult, FileError, FileStat
from agent_runtime.tools.base import ToolContext, ToolResult
from agent_runtime.tools.registry import open_tools
from rollout_api.tasks import Task
from tests.support.commands import run_here


class Crash(Exception):
    """The runner dies before a call."""


class LocalWorkspace:
    """A `ToolWorkspace`. Replies are remembered in the order of the calls, as an executor remembers them by key.

    `memory` of an earlier instance makes this one repeat its replies. `crash_before` is the number of the call before
    which it raises Crash.
    """

    def __init__(self, root: Path, memory: list[Any] | None = None, crash_before: int | None = None) -> None:
        self.root = root
        self.working_dir = str(root / "work")
        self.memory = [] if memory is None else memory
        self.crash_before = crash_before
        self._calls = 0
        os.makedirs(self.working_dir, exist_ok=True)

    async def _once(self, act: Callable[[], Awaitable[Any]]) -> Any:
        number = self._calls
        self._calls += 1
        if number < len(self.memory):
            return self.memory[number]
        if number == self.crash_before:
            raise Crash
        self.memory.append(await act())
        return self.memory[-1]

    def real(self, path: str) -> Path:
        full = os.path.normpath(os.path.join(self.working_dir, path))
        return Path(full) if full.startswith(str(self.root)) else Path(f"{self.root}{full}")

    async def run(
        self,
        command: str | list[str],
        *,
        deadline_seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        head_bytes: int = 16_384,
        tail_bytes: int = 16_384,
    ) -> CommandResult:
        async def act() -> CommandResult:
            return await run_here(
                command,
                cwd=Path(self.working_dir, cwd or ""),
                deadline_seconds=deadline_seconds,
                stdin=stdin,
                head_bytes=head_bytes,
                tail_bytes=tail_bytes,
            )

        result: CommandResult = await self._once(act)
        return result

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        async def act() -> bytes:
            try:
                with self.real(path).open("rb") as file:
                    return file.read(limit)
            except OSError as error:
                raise FileError(path, str(error.strerror)) from error

        data: bytes = await self._once(act)
        return data

    async def write(self, path: str, data: bytes, *, mode: str = "644") -> None:
        async def act() -> None:
            try:
                self.real(path).parent.mkdir(parents=True, exist_ok=True)
                beside = self.real(path + ".new")
                beside.write_bytes(data)
                beside.chmod(int(mode, 8))
                beside.rename(self.real(path))
            except OSError as error:
                raise FileError(path, str(error.strerror)) from error

        await self._once(act)

    async def remove(self, path: str) -> None:
        async def act() -> None:
            if self.real(path).is_dir():
                shutil.rmtree(self.real(path))
            else:
                self.real(path).unlink(missing_ok=True)

        await self._once(act)

    async def stat(self, path: str) -> FileStat | None:
        async def act() -> FileStat | None:
            return described(self.real(path)) if os.path.lexists(self.real(path)) else None

        found: FileStat | None = await self._once(act)
        return found

    async def list(self, path: str) -> list[FileStat]:
        async def act() -> list[FileStat]:
            return [described(entry) for entry in sorted(self.real(path).iterdir())]

        entries: list[FileStat] = await self._once(act)
        return entries


def described(path: Path) -> FileStat:
    seen = path.lstat()
    kinds = [(stat_module.S_ISLNK, "link"), (stat_module.S_ISDIR, "folder"), (stat_module.S_ISREG, "file")]
    kind: Any = next((name for matches, name in kinds if matches(seen.st_mode)), "other")
    return FileStat(path.name, kind, seen.st_size, stat_module.S_IMODE(seen.st_mode), seen.st_mtime)


class Bench:
    """One workspace with every built-in tool."""

    crash = Crash

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "work"
        self.workspace = LocalWorkspace(root)
        self.tools = open_tools(["bash", "editor", "search", "finish", "calculator", "commands-and-files"])
        self.task = Task.model_validate({"name": "t", "prompt": "p", "timeouts": {"commandSeconds": 5}})

    def context(self, workspace: LocalWorkspace | None = None) -> ToolContext:
        # A tool call has a workspace view of its own, whose keys start anew.
        return ToolContext(workspace or LocalWorkspace(self.root), self.task, "call-0", 60)

    async def use(self, tool: str, **arguments: Any) -> ToolResult:
        return await self.tools[tool].execute(arguments, self.context())

    def crashing(self, memory: list[Any], crash_before: int | None) -> ToolContext:
        return self.context(LocalWorkspace(self.root, memory, crash_before))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "sandbox")
