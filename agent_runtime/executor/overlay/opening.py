"""Opens a host: proves `Overlay` by a trial, falls back to `Plain` where `Auto` allows it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket

from agent_runtime.executor import kernel
from agent_runtime.executor.host import FileFailure, WorkspaceFailure, WorkspaceSpec
from agent_runtime.executor.init.channel import close_all
from agent_runtime.executor.overlay import HostFailure
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.hosts import OverlayHost, PlainHost
from agent_runtime.executor.overlay.peer import Peer, PeerGone
from agent_runtime.executor.overlay.workspace import spawn
from agent_runtime.executor.overlay.zygote import take_zygote


async def open_overlay_or_plain(config: HostConfig) -> tuple[OverlayHost | PlainHost, str | None]:
    """See `open_host`."""
    lock = _lock(config.state_dir)
    zygote_pid, end = take_zygote()
    _settle()
    zygote = Peer(end)
    reason = None
    if config.mode != "Plain":
        try:
            remover = await _prepare(zygote, config)
            overlay = OverlayHost(config, zygote, zygote_pid, lock, remover)
            try:
                await _try_out(overlay)
                return overlay, None
            except (WorkspaceFailure, FileFailure) as failure:
                await overlay.give_up()
                raise HostFailure(failure.message) from None
        except HostFailure as failure:
            reason = str(failure)
        if config.mode == "Overlay":
            zygote.close("Overlay cannot be had")
            os.close(lock)
            raise HostFailure(f"mode Overlay cannot be had here: {reason}")
    return PlainHost(config, zygote, zygote_pid, lock), reason


def _lock(state_dir: str) -> int:
    try:
        folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HostFailure(f"stateDir {state_dir!r}: {error.strerror}; an existing folder is expected") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        raise HostFailure(f"stateDir {state_dir!r} is in use by another executor; give each its own") from None
    return folder


def _settle() -> None:
    """Prepare the executor's own process: unreadable for tools, reaping what falls to it."""
    kernel.hide_from_tools()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if os.getpid() == 1:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def _prepare(zygote: Peer, config: HostConfig) -> Peer:
    """Have it become an overlay host; the process that removes layers. Raises HostFailure."""
    request = {
        "do": "prepare",
        "layers": os.path.join(os.path.realpath(config.state_dir), "layers"),
        "root": os.path.realpath(config.root),
        "rootLayers": [os.path.realpath(layer) for layer in config.root_layers],
        "masks": list(config.masks),
        "binds": [list(bind) for bind in config.binds],
    }
    try:
        reply, received = await zygote.ask(request)
    except PeerGone as gone:
        raise HostFailure(f"the process that makes workspaces has ended: {gone}") from None
    if "error" in reply:
        close_all(received)
        raise HostFailure(str(reply["error"]))
    return Peer(socket.socket(fileno=received[0]))


async def _try_out(host: OverlayHost) -> None:
    """Create, write, run, freeze, fork, read, destroy: what every workspace will need.

    As root, whom every image has: a user that somebody misspelt is no reason against the mode.
    """
    first = await host.create(WorkspaceSpec("trial", user="0"))
    try:
        readable, writable = os.pipe()
        os.close(writable)
        await first.file("write", {"path": "/tmp/trial"}, readable)
        streams = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) for _ in range(3)]
        with contextlib.suppress(FileFailure):  # an image without `true` is fine, and has proved as much
            command = await spawn(first, ["true"], stdin=streams[0], stdout=streams[1], stderr=streams[2])
            ended = await command.exited
            if ended.code != 0:
                raise WorkspaceFailure("CreateFailed", f"`true` ended with {ended} in a workspace")
        await first.freeze()
        fork = await host.create(WorkspaceSpec("trial fork", parent="trial", user="0"))
        try:
            await fork.file("stat", {"path": "/tmp/trial"})
        finally:
            await fork.destroy()
    finally:
        await first.destroy()
