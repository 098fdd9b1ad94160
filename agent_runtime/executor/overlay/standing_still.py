"""Let a workspace and those that joined it stand still while a caller reads their files."""

from __future__ import annotations

import asyncio
import contextlib

from agent_runtime.executor.init.processes import Process, all_processes, descendants, has_stopped
from agent_runtime.executor.overlay.workspace import Workspace

# SIGSTOP takes effect within a millisecond, but a program may fork all the time.
_STOP_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.002
# After so many looks, all processes continue for a moment: one that waits in vfork() for a child stops only after that
# child has started its program, and the child may have been stopped before.
_LOOKS = 50


class PauseBroken(Exception):
    """A workspace's processes cannot be stopped, or have continued too early."""


async def pause_for(workspace: Workspace, seconds: float) -> None:
    """Stop all processes of a workspace and of those that joined it; they continue after that time. Returns when all
    stand still. Raises PauseBroken.
    """
    pause = workspace.pause
    pause.lease(_STOP_SECONDS + seconds, lambda: end_pause(workspace))
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await _stop_all(workspace)
    except BaseException as error:
        end_pause(workspace)
        if isinstance(error, TimeoutError):
            raise PauseBroken(f"its processes do not stop within {_STOP_SECONDS:g} s") from None
        raise
    pause.lease(seconds, lambda: end_pause(workspace))


def extend_pause(workspace: Workspace, seconds: float) -> None:
    """Extend a leased pause to that time from now on. Raises PauseBroken if its processes have not stood still since its
    begin.
    """
    pause = workspace.pause
    if not pause.is_leased:
        raise PauseBroken("the pause has ended")
    if not all(has_stopped(proc, process) for proc, tools in _tools_of_all(workspace) for process in tools):
        end_pause(workspace)
        raise PauseBroken("a program has continued processes of the workspace")
    pause.lease(seconds, lambda: end_pause(workspace))


def end_pause(workspace: Workspace) -> None:
    """End a leased pause. Idempotent."""
    if workspace.pause.is_leased:
        workspace.pause.end_lease(_tools_of_all(workspace))


async def _stop_all(workspace: Workspace) -> None:
    looks = still = 0
    # A process that is forked during a look may be missing in it, but not in the next one.
    while still < 2:
        is_still = True
        for proc, tools in _tools_of_all(workspace):
            workspace.pause.stop(proc, tools)
            is_still = is_still and all(has_stopped(proc, process) for process in tools)
        still = still + 1 if is_still else 0
        looks += 1
        if looks % _LOOKS == 0 and not is_still:
            for proc, tools in _tools_of_all(workspace):
                workspace.pause.let_run(proc, tools)
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


def _tools_of_all(workspace: Workspace) -> list[tuple[int, list[Process]]]:
    found = []
    for member in workspace.members:
        if member.is_live:  # the descriptor of an ended one may be another file's by now
            with contextlib.suppress(OSError):  # it ends
                found.append((member.proc, listed_tools(member)))
    return found


def tools_of(running: list[Process], init: int) -> list[Process]:
    """Return all processes except direct children of init, which are subreapers and helpers."""
    return [process for process in running if process.parent != init]


def listed_tools(workspace: Workspace) -> list[Process]:
    """Return the processes of a workspace's tools."""
    if workspace.is_resting:
        return []  # its descriptor is that of the whole machine
    everything = all_processes(workspace.proc)
    return tools_of(descendants(everything, workspace.inner_init), workspace.inner_init)
