"""Fetches the trajectory file that a program wrote of itself. What is wrong with it is a note: nothing hangs on it."""

import asyncio
from collections.abc import Awaitable, Callable

from agent_runtime.recording.program_trajectory import UnreadableTrajectory, to_atif
from agent_runtime.sandboxes.base import FileError, Workspace, WorkspaceLimit
from rollout_api.records import ObjectDigest, ProgramTrajectory
from rollout_api.rollout_job import AgentTrajectory

FILE_BYTES = 32 << 20
"""Most bytes of the file: some hundred turns with every answer of the server in it, and it is parsed in memory."""

Store = Callable[[bytes, bytes | None], Awaitable[tuple[ObjectDigest, ObjectDigest | None]]]


async def collect(workspace: Workspace, wanted: AgentTrajectory, session: str, store: Store) -> ProgramTrajectory:
    """Store the file and its conversion, as far as they can be had. Raises SandboxFailure, Fenced, StorageError."""
    try:
        found = await workspace.stat(wanted.path)
        if found is None:
            return ProgramTrajectory(note=f"{wanted.path}: the program left no such file")
        if found.type != "file":
            return ProgramTrajectory(note=f"{wanted.path}: a file was expected, and it is a {found.type}")
        if found.size > FILE_BYTES:
            return ProgramTrajectory(
                bytes=found.size, note=f"{wanted.path}: {found.size} bytes, and at most {FILE_BYTES} are kept"
            )
        data = await workspace.read(wanted.path, limit=FILE_BYTES)
    except FileError as error:
        return ProgramTrajectory(note=f"{wanted.path}: {error.message}")
    except WorkspaceLimit as limit:
        return ProgramTrajectory(note=f"{wanted.path}: the workspace was ended ({limit.cause})")
    try:
        form, atif = await asyncio.to_thread(to_atif, data, wanted.format, session)
    except UnreadableTrajectory as unreadable:
        file, _ = await store(data, None)
        return ProgramTrajectory(file=file, bytes=len(data), note=f"{wanted.path}: {unreadable}")
    file, converted = await store(data, atif)
    return ProgramTrajectory(file=file, bytes=len(data), format=form.value, atif=converted)
