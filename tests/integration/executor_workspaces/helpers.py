"""Short words for what the tests do with workspaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.executor.host import Exit, Limits, Workspace, WorkspaceHost, WorkspaceSpec
from agent_runtime.executor.workspaces.spawned import Spawned, spawn

# A test that waits so long for something that takes milliseconds has found it broken.
PATIENCE = 60.0


@dataclass(frozen=True)
class Done:
    """How a command ended, and all it wrote to both outputs."""

    exit: Exit
    output: str

    @property
    def ok(self) -> bool:
        return self.exit.code == 0


async def read_all(descriptor: int) -> bytes:
    """Everything until the other end is closed."""
    loop = asyncio.get_running_loop()
    content = bytearray()
    while block := await loop.run_in_executor(None, os.read, descriptor, 1 << 16):
        content += block
    os.close(descriptor)
    return bytes(content)


async def write_all(descriptor: int, content: bytes) -> None:
    def write() -> None:
        with open(descriptor, "wb") as pipe:
            pipe.write(content)

    with contextlib.suppress(BrokenPipeError):  # the operation refused the body; its own error says why
        await asyncio.get_running_loop().run_in_executor(None, write)


async def start(
    workspace: Workspace,
    argv: Sequence[str] | str,
    *,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> tuple[Spawned, int]:
    """A command, and the descriptor that its output can be read from."""
    readable, writable = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    child = await spawn(
        workspace, argv, stdin=null, stdout=writable, stderr=os.dup(writable), env=env or {}, cwd=cwd, user=user
    )
    return child, readable


async def run(workspace: Workspace, argv: Sequence[str] | str, **options: Any) -> Done:
    """Run a command to its end. What it leaves in the background must not hold its output."""
    async with asyncio.timeout(PATIENCE):
        child, readable = await start(workspace, argv, **options)
        output = await read_all(readable)
        return Done(await child.exited, output.decode(errors="surrogateescape"))


async def write(workspace: Workspace, path: str, content: bytes, **arguments: Any) -> dict[str, Any]:
    return await put(workspace, "write", content, path=path, **arguments)


async def put(workspace: Workspace, operation: str, content: bytes, **arguments: Any) -> dict[str, Any]:
    """A file operation that reads a body."""
    async with asyncio.timeout(PATIENCE):
        readable, writable = os.pipe()
        sending = asyncio.create_task(write_all(writable, content))
        try:
            return await workspace.file(operation, arguments, readable)
        finally:
            await sending


async def get(workspace: Workspace, operation: str, **arguments: Any) -> bytes:
    """A file operation that writes a body."""
    async with asyncio.timeout(PATIENCE):
        readable, writable = os.pipe()
        reading = asyncio.create_task(read_all(readable))
        try:
            await workspace.file(operation, arguments, writable)
        finally:
            content = await reading
        return content


async def layers_left(state_dir: Path, *, patience: float = PATIENCE) -> list[str]:
    """The layers of workspaces that are there, when all have gone or so many seconds have passed."""
    deadline = time.monotonic() + patience
    while True:
        found = [name for name in os.listdir(state_dir / "layers") if set(name) <= set(string.hexdigits)]
        if not found or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(0.02)


class Inside:
    """A host, with short ways to make workspaces in it."""

    def __init__(self, host: WorkspaceHost) -> None:
        self.host = host
        self._made = 0

    async def make(self, *, parent: str | None = None, limits: Limits | None = None, **options: Any) -> Workspace:
        self._made += 1
        spec = WorkspaceSpec(f"w{self._made}", parent=parent, limits=limits or Limits(), **options)
        return await self.host.create(spec)
