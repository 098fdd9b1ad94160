"""Short functions for operations on workspaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.executor.host import Exit, Limits, WorkspaceSpec
from agent_runtime.executor.init import processes
from agent_runtime.executor.init.channel import StartRequest
from agent_runtime.executor.overlay.hosts import Host
from agent_runtime.executor.overlay.workspace import Spawned, Workspace, spawn

# A test that waits so long for something that takes milliseconds has found it broken.
PATIENCE = 60.0


@dataclass(frozen=True)
class Done:
    """How a command ended, and everything that it wrote to both outputs."""

    exit: Exit
    output: str

    @property
    def ok(self) -> bool:
        return self.exit.code == 0


async def read_all(descriptor: int) -> bytes:
    """Return everything until the other end is closed."""
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
    """Start a command; return it, and the descriptor of its output."""
    readable, writable = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        child = await spawn(workspace, StartRequest(argv, env or {}, cwd, user), [null, writable, os.dup(writable)])
    except BaseException:
        os.close(readable)
        raise
    return child, readable


async def run(workspace: Workspace, argv: Sequence[str] | str, **options: Any) -> Done:
    """Run a command to its end, without waiting for background processes that hold its output."""
    async with asyncio.timeout(PATIENCE):
        child, readable = await start(workspace, argv, **options)
        output = await read_all(readable)
        return Done(await child.exited, output.decode(errors="surrogateescape"))


async def write(workspace: Workspace, path: str, content: bytes, **arguments: Any) -> dict[str, Any]:
    return await put(workspace, "write", content, path=path, **arguments)


async def put(workspace: Workspace, operation: str, content: bytes, **arguments: Any) -> dict[str, Any]:
    """Run a file operation that reads a body."""
    async with asyncio.timeout(PATIENCE):
        readable, writable = os.pipe()
        sending = asyncio.create_task(write_all(writable, content))
        try:
            return await workspace.file(operation, arguments, readable)
        finally:
            await sending


async def get(workspace: Workspace, operation: str, **arguments: Any) -> bytes:
    """Run a file operation that writes a body; return it."""
    async with asyncio.timeout(PATIENCE):
        readable, writable = os.pipe()
        reading = asyncio.create_task(read_all(readable))
        try:
            await workspace.file(operation, arguments, writable)
        finally:
            content = await reading
        return content


def keepers_children(host: Any) -> tuple[list[int], int]:
    """Return the inits and the spares of workspaces, which have PID namespaces of their own, and the process that
    removes layers.
    """
    for _ in range(1000):
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        try:
            below = processes.descendants(processes.all_processes(proc), host._zygote_pid)
        finally:
            os.close(proc)
        (keeper,) = (process.pid for process in below if process.parent == host._zygote_pid)
        children = [process.pid for process in below if process.parent == keeper]
        own = os.readlink(f"/proc/{keeper}/ns/pid")
        namespaces = {}
        for pid in children:
            with contextlib.suppress(FileNotFoundError):  # of one that ended meanwhile
                namespaces[pid] = os.readlink(f"/proc/{pid}/ns/pid")
        removers = [pid for pid, namespace in namespaces.items() if namespace == own]
        if len(removers) == 1:
            return [pid for pid in namespaces if pid != removers[0]], removers[0]
        time.sleep(0.01)  # a child that was just forked still has the keeper's namespace
    raise AssertionError(f"{removers} have the namespace of {keeper}")


async def assert_no_layer_is_left_over(host: Any, *, but: int = 0) -> None:
    """Check that every layer, except `but`, belongs to an init or a spare once all removals are done."""
    deadline = time.monotonic() + PATIENCE
    while True:
        layers = [name for name in os.listdir(f"{host.config.state_dir}/layers") if set(name) <= set(string.hexdigits)]
        count = len(keepers_children(host)[0])
        # A spare that was just forked has no layer yet: it would make up for one that is still being removed.
        if len(layers) == count + but and len(host._removals) <= but:
            return
        assert time.monotonic() < deadline, (layers, count)
        await asyncio.sleep(0.02)


class Inside:
    """A host, with short functions to create workspaces in it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._made = 0

    async def make(self, *, parent: str | None = None, limits: Limits | None = None, **options: Any) -> Workspace:
        self._made += 1
        spec = WorkspaceSpec(f"w{self._made}", parent=parent, limits=limits or Limits(), **options)
        return await self.host.create(spec)
