"""The prepared state of a group: its task's files and setup, done once for all members that can fork from it.

The keys of its steps depend only on the spec, so the next runner continues a preparation, and two runners share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.sandboxes.base import (
    WORKSPACE_USER,
    CommandResult,
    FileError,
    SetupFailed,
    StoredLayer,
    Workspace,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.shared_tasks import has_failed, started
from rollout_api.cluster import MOST_LAYER_BYTES

# Turn in the keys of operations on the workspace itself. It is above all real turns, so these keys are never
# acknowledged.
LIFECYCLE_TURN = 10**9
# Limits of a failed setup command's output in the message: enough for a traceback, short enough for a status.
LAST_LINES, LAST_CHARACTERS = 20, 4000
# Limit of the command in the message: enough to recognise it.
COMMAND_CHARACTERS = 500


PREPARED = "prepared-"


def prepared_id(spec: WorkspaceSpec) -> str:
    """Return the name of the state that a spec describes: equal only for equal specs of one group and tenant."""
    described = {
        **preparation(spec),
        "group": spec.group,
        "image": spec.image,
        "layers": [layer.digest for layer in spec.layers],
        "bare": spec.is_bare,
        "resources": spec.limits.wire(),
        "start": None if spec.start is None else spec.start.name,
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return f"{spec.tenant}{PREPARED}{digest[:32]}"


def preparation(spec: WorkspaceSpec) -> Mapping[str, Any]:
    """Return everything in a spec that decides what `prepare` changes in a given root, unless a limit stops it."""
    return {
        "workingDir": spec.working_dir,
        "user": spec.user,
        "env": dict(spec.env),
        "network": spec.network.get("setup", "None"),
        "files": [file.wire() for file in spec.files],
        "setup": list(spec.setup),
        **({"services": [[one.name, *one.aliases] for one in spec.prepares_for]} if spec.prepares_for else {}),
    }


async def prepare(workspace: Workspace, spec: WorkspaceSpec) -> None:
    """Create the working folder, write the files and run the setup, or apply `spec.start`. Raises SetupFailed."""
    if spec.start is not None:
        await spec.start.apply_to(workspace, spec)
        return
    try:
        # Unpacking an empty archive creates the folder without a program of the image.
        await workspace.untar(spec.working_dir, _empty_tar(), key=f"{LIFECYCLE_TURN}:working-dir", owner=WORKSPACE_USER)
        for number, file in enumerate(spec.files):
            key = f"{LIFECYCLE_TURN}:file-{number}"
            await workspace.write(file.path, file.data(), key=key, mode=file.mode, replace=True, owner=WORKSPACE_USER)
        if spec.setup:
            await workspace.enter("setup", key=f"{LIFECYCLE_TURN}:setup-network")
        # Add up the recorded durations instead of using a clock: they leave out pauses, in which the commands of other
        # workspaces have the sandbox's memory, and the next runner makes the same requests.
        left = spec.setup_seconds
        for number, command in enumerate(spec.setup):
            result = await workspace.run(command, key=f"{LIFECYCLE_TURN}:setup-{number}", deadline_seconds=left)
            left -= result.seconds
            if not result.ok and not (number and result.cause == "Deadline"):
                what = f"setup command {number + 1} of {len(spec.setup)}"
                seconds, limit = spec.setup_seconds, "timeouts.setupSeconds"
                raise SetupFailed(failed_command(what, result, seconds=seconds, limit=limit, command=command))
            if (left <= 0 and number + 1 < len(spec.setup)) or result.cause == "Deadline":
                raise SetupFailed(
                    f"the {len(spec.setup)} setup commands took more than {spec.setup_seconds:g} s in all; "
                    "make them faster or raise timeouts.setupSeconds"
                )
    except FileError as error:
        raise SetupFailed(_refused(error, spec)) from error
    except WorkspaceLimit as limit:
        raise SetupFailed(f"the setup exceeded a limit of sandbox.resources: {limit.message}") from limit


def _refused(error: FileError, spec: WorkspaceSpec) -> str:
    if error.path != spec.working_dir:
        return f"the task's files could not be written: {error.message}"
    user = f"user {spec.user!r}" if spec.user else "the image's user"
    return (
        f"sandbox.workingDir could not be created: {error.message}; if {user} may not create it, choose a writable "
        "folder of the image, such as /tmp/workspace"
    )


class PreparedGroups:
    """Prepared states of one sandbox, each created once by `make`, as a frozen workspace, and removed by `drop`.

    A failure reaches all current waiters; the next request tries again.
    """

    def __init__(
        self, make: Callable[[str, WorkspaceSpec], Awaitable[None]], drop: Callable[[str], Awaitable[None]]
    ) -> None:
        self._make, self._drop = make, drop
        self._states: dict[str, asyncio.Task[None]] = {}
        self._forks: dict[str, int] = {}
        self._groups: dict[str, set[str]] = {}
        self._forgotten: set[str] = set()

    async def fork_of(self, spec: WorkspaceSpec) -> str:
        """Return the prepared state to fork from; it counts as in use until `fork_ended`. Raises SetupFailed,
        SandboxFailure.
        """
        name = prepared_id(spec)
        self.adopt(name, spec.group)
        try:
            task = self._states.get(name)
            if task is None:
                task = self._states[name] = started(self._make_once(name, spec))
            # A cancelled member must not end the preparation that others wait for.
            await asyncio.shield(task)
        except BaseException:
            await self.fork_ended(name)
            raise
        return name

    def adopt(self, name: str, group: str) -> None:
        """Count a fork of a state, also of one that an earlier process prepared."""
        self._forgotten.discard(name)
        self._groups.setdefault(group, set()).add(name)
        self._forks[name] = self._forks.get(name, 0) + 1

    async def fork_ended(self, name: str) -> None:
        """Record the end of a fork. The last one removes its state if the group is forgotten."""
        self._forks[name] -= 1
        await self._drop_unused(name)

    async def forget(self, group: str) -> None:
        for name in self._groups.pop(group, set()):
            self._forgotten.add(name)
            await self._drop_unused(name)

    async def _drop_unused(self, name: str) -> None:
        if name in self._forgotten and not self._forks.get(name):
            self._forgotten.discard(name)
            self._forks.pop(name, None)
            if (task := self._states.pop(name, None)) is not None:
                # All waiting callers were cancelled.
                task.cancel()
                await asyncio.wait({task})
            if name not in self._states:
                await self._drop(name)

    async def _make_once(self, name: str, spec: WorkspaceSpec) -> None:
        try:
            await self._make(name, spec)
        except BaseException:
            if self._states.get(name) is asyncio.current_task():
                del self._states[name]
            raise


@dataclass
class _LayerState:
    """One layer over those below it, as a frozen workspace."""

    below: str | None
    size: int
    task: asyncio.Task[None]
    needed: int = 0
    """Number of callers that are about to start from it, or from a layer over it."""


class LayerStates:
    """Stored layers of one sandbox as frozen workspaces, each restored once by `make` over the one below it.

    Beyond `most_bytes`, those that were needed longest ago are removed by `drop`. Workspaces that started from one keep
    its files, so only a later one has to restore it again.
    """

    def __init__(
        self,
        make: Callable[[str, str | None, StoredLayer, bool], Awaitable[None]],
        drop: Callable[[str], Awaitable[None]],
        most_bytes: int | None = MOST_LAYER_BYTES,
    ) -> None:
        self._make, self._drop, self._most_bytes = make, drop, most_bytes
        # The one that was needed longest ago first; a layer comes after those over it.
        self._states: dict[str, _LayerState] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def ready(self, layers: Sequence[StoredLayer], *, is_bare: bool = False) -> AsyncIterator[str | None]:
        """Give the frozen workspace with these layers, which stays while the context is open; None if there are none.

        With `is_bare`, the lowest layer has no image below it. Raises SandboxFailure.
        """
        held: list[_LayerState] = []
        names: list[str] = []
        try:
            digest = hashlib.sha256(b"bare" if is_bare else b"")
            for layer in layers:
                digest.update(layer.digest.encode())
                name = f"layers-{digest.hexdigest()[:32]}"
                below = names[-1] if names else None
                state = self._states.get(name)
                if state is None or has_failed(state.task):
                    task = started(self._made(name, below, layer, is_bare))
                    state = self._states[name] = _LayerState(below, layer.size, task)
                state.needed += 1
                held.append(state)
                names.append(name)
                # A cancelled rollout must not end the work that others wait for.
                await asyncio.shield(state.task)
            for name in reversed(names):
                self._states[name] = self._states.pop(name)
            yield names[-1] if names else None
        finally:
            for state in held:
                state.needed -= 1
        await self._remove_excess()

    async def _remove_excess(self) -> None:
        total = sum(state.size for state in self._states.values())
        for name, state in list(self._states.items()):
            if self._most_bytes is None or total <= self._most_bytes:
                return
            is_below_others = any(other.below == name for other in self._states.values())
            if state.needed or is_below_others or not state.task.done():
                continue
            total -= state.size
            del self._states[name]
            removal = self._removals[name] = asyncio.create_task(self._removed(name))
            await asyncio.shield(removal)

    async def _removed(self, name: str) -> None:
        try:
            await self._drop(name)
        finally:
            del self._removals[name]

    async def _made(self, name: str, below: str | None, layer: StoredLayer, is_bare: bool) -> None:
        if (removal := self._removals.get(name)) is not None:
            await asyncio.wait({removal})
        await self._make(name, below, layer, is_bare)


async def _empty_tar() -> AsyncIterator[bytes]:
    yield bytes(2 * tarfile.BLOCKSIZE)


def failed_command(what: str, result: CommandResult, *, seconds: float, limit: str, command: str | None = None) -> str:
    """Return the message of a command that failed, with the end of its output.

    `limit` is the name of its time limit of `seconds`. `command` is shown after how it ended.
    """
    if result.cause == "Deadline":
        end = f"was still running after {seconds:g} s; make it faster, or raise {limit}"
    elif result.start_error is not None:
        end = f"cannot be started: {result.start_error}"
    elif result.exit_code is not None:
        end = f"ended with exit code {result.exit_code}, expected 0"
    else:
        end = f"was ended by {result.cause or f'signal {result.signal}'}"
    shown = "" if command is None else f": {shortened(command)!r}"
    output = (result.stdout + result.stderr).decode(errors="replace").strip()
    lines = "\n".join(output.splitlines()[-LAST_LINES:])[-LAST_CHARACTERS:]
    return f"{what} {end}{shown}" + (f"\n{lines}" if lines else "")


def setup_text(spec: WorkspaceSpec) -> str:
    """Return files and setup of a spec as one line, for people."""
    files = f"{len(spec.files)} files; " if spec.files else ""
    return shortened(f"setup: {files}{' '.join('; '.join(spec.setup).split())}".rstrip("; "))


def shortened(command: str) -> str:
    """Return the beginning of a long command."""
    return command if len(command) <= COMMAND_CHARACTERS else f"{command[:COMMAND_CHARACTERS]}…"
