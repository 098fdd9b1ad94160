"""Watches the active workspaces and stops those that exceed a limit. Idle ones cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from agent_runtime.executor.host import Limits, WorkspaceFailure
from agent_runtime.executor.init.processes import Process, all_processes, descendants, live_threads, runnable_threads
from agent_runtime.executor.init.trees import remove_entry
from agent_runtime.executor.overlay.memory import last_mark
from agent_runtime.executor.overlay.sandbox_memory import MeasuredUse, SandboxMemory, grouped
from agent_runtime.executor.overlay.standing_still import tools_of
from agent_runtime.executor.overlay.usage import (
    MAX_NICE,
    KernelKills,
    Usage,
    disk_limit,
    exact_memory_bytes,
    excess,
    fair_nice,
    hidden_bytes,
    is_largest,
    most_memory_bytes,
    sandbox_disk_excess,
    shared_mappings,
    shared_memory_of_machine,
    shm_bytes,
    total,
)
from agent_runtime.executor.overlay.workspace import Workspace

if TYPE_CHECKING:
    from agent_runtime.executor.overlay.hosts import Host

T = TypeVar("T")

# A process can use about 1 GiB of new memory in a second, so some 20 MiB between two checks.
_CHECK_SECONDS = 0.02
# Without limits, measuring only updates the figures of `usage`.
_IDLE_CHECK_SECONDS = 0.25
# Time for the kernel to free the memory of a workspace that was ended.
_FREED_SECONDS = 0.2
# Number of measurements to wait for a stopped workspace before another one is considered.
_DYING_CHECKS = 250
# Measuring takes at most a tenth of one processor, however many processes there are.
_REST_FACTOR = 9
# Other programs of the machine use the disk too, so smaller changes do not cause a count.
_DISK_STEP_BYTES = 1024 * 1024
# Reading the mappings of processes takes long, so it waits for a change of the machine's shared memory, or this long:
# memory that others free could hide a change.
_SHARED_STEP_BYTES = 1024 * 1024
_MAPPINGS_SECONDS = 2.0
# While memory may become short: several processors together use about 20 MiB in this time.
_NEAR_CHECK_SECONDS = 0.005
_NEAR_REST_FACTOR = 3
# Counting time depends on the number of files, and a shared disk changes all the time. So counting pauses like
# measuring, but never longer than this, because nothing is counted during a pause.
_COUNT_REST_SECONDS = 1.0
# A suspended job is stopped, and continued, within milliseconds; an init that stays stopped while this process runs was
# stopped by a tool.
_STOPPED_SECONDS = 5.0
# Reading a process's memory takes milliseconds, on a busy machine a second.
_MEASURE_SECONDS = 5.0
KILLED = "OOMKilled"


@dataclass
class _Observation:
    """The last observation of one workspace."""

    file_system_used: int
    runnable: int = 0
    hidden: int = 0
    mappings: Mapping[int, int] | None = field(default_factory=dict)
    """Shared mappings by inode; None if they may not be measured here."""
    mappings_read_at: float = 0.0
    machine_shared: int = -1
    """Shared memory of the machine when they were read."""
    is_over: bool = False
    counting: asyncio.Task[None] | None = None
    measuring: asyncio.Task[None] | None = None
    """Measures the memory of its processes exactly, since `measuring_since`."""
    measuring_since: float = 0.0
    reading: asyncio.Task[None] | None = None
    """Reads its shared mappings."""
    stopped_at: int = 0
    """Bytes of disk that it used when it was stopped last."""
    init_stopped_at: float = math.inf
    """When its init was first seen stopped; infinite while it runs."""


class Watch:
    """The only monitoring task of a host. When the file system has changed, files are counted."""

    def __init__(self, host: Host) -> None:
        self._host, self._processors = host, len(os.sched_getaffinity(0))
        self._memory_limit, self._disk_limit = host.config.memory_bytes, host.config.disk_bytes
        self._active: set[Workspace] = set()
        self._observations: dict[Workspace, _Observation] = {}
        self._stopping: dict[Workspace, asyncio.Task[None]] = {}
        self._awake = asyncio.Event()
        with open(os.memfd_create("device", os.MFD_CLOEXEC), "rb") as probe:
            self._memory_device = os.fstat(probe.fileno()).st_dev
        self._is_shared = host.config.places > 1
        self._memory = (
            None
            if self._memory_limit is None
            else SandboxMemory(self._memory_limit, self._processors, shared=self._is_shared)
        )
        self._kills = KernelKills()
        self._measured = MeasuredUse(time.monotonic())
        self._machine_shared = 0
        self._killed: set[Workspace] = set()
        """Causes of the workspaces that ran when the kernel last ended a process."""
        # Each workspace may block two of them, for as long as it pleases.
        self._threads = ThreadPoolExecutor(2 * host.config.places + 2, "measure")
        self._task = asyncio.create_task(self._run())

    def add(self, workspace: Workspace) -> None:
        """Watch the workspace until it has no processes."""
        if not self._awake.is_set():
            self._kills.look()  # what the kernel ended while nothing ran here is no loss
        self._active.add(workspace)
        if workspace not in self._observations:
            self._observations[workspace] = _Observation(self._file_system_used())
            self._hold(workspace)
        self._awake.set()

    def admit(self, workspace: Workspace) -> None:
        """Watch the workspace before it starts a command. The command must wait if its `pause` is on then."""
        if self._memory is not None and self._memory.starts_wait and not self._active.intersection(workspace.members):
            workspace.pause.begin()
        self.add(workspace)

    def paused_commands(self) -> dict[str, int]:
        """Return how many commands are paused, and how many wait for their start, because memory is short."""
        counts = [workspace.commands() for workspace in self._active if workspace.pause.is_for_memory]
        return {"paused": sum(started for started, _ in counts), "waiting": sum(waiting for _, waiting in counts)}

    def measured(self) -> dict[str, float]:
        """Return sums over what workspaces have used since the start, as `memoryBytes.measured` of `GET /v1/health`."""
        return self._measured.sums(time.monotonic())

    def _hold(self, workspace: Workspace) -> None:
        """Count the memory of the workspace, with those that joined it, from now on."""
        observed = [member.last.memory_bytes for member in workspace.members if member in self._observations]
        self._measured.hold(id(workspace.members), sum(observed) if observed else None, time.monotonic())

    def is_active(self, workspace: Workspace) -> bool:
        """Whether the workspace has processes, or had some at the last check."""
        return workspace in self._active

    def remove(self, workspace: Workspace) -> None:
        """Stop watching an ended workspace."""
        self._deactivate(workspace)
        self._killed.discard(workspace)
        observation = self._observations.pop(workspace, None)
        self._hold(workspace)
        if observation and observation.counting:
            observation.counting.cancel()

    def killed_by_kernel(self, workspace: Workspace) -> str | None:
        """Return why a workspace ends because the kernel has ended a process of the sandbox, whose memory was used up; else
        None.
        """
        self._look_for_kills()
        return KILLED if workspace in self._killed and workspace in self._stopping else None

    def _look_for_kills(self) -> None:
        """End all that run if the kernel has ended a process. Each of them may have lost it, and a verifier that was killed
        would give a wrong verdict. Nothing proves whose memory it was: not all of the kernel's is measured, and programs
        elsewhere may have used up the limit of a group above.
        """
        if self._kills.look():
            self._killed = set(self._running())
            for group in grouped(self._killed):
                if not self._stopping.keys() & set(group):
                    self._end_for_memory(group, KILLED)

    def _running(self) -> list[Workspace]:
        return [member for group in grouped(self._active) for member in group]

    def _deactivate(self, workspace: Workspace) -> None:
        self._active.discard(workspace)
        if not self._active.intersection(workspace.members):
            workspace.pause.end()

    def close(self) -> None:
        self._task.cancel()
        for workspace in list(self._observations):
            self.remove(workspace)
        self._threads.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            if not self._awake.is_set():
                await self._awake.wait()
                if self._memory is not None:
                    self._memory.begin()
            limited = self._memory_limit or self._disk_limit
            limited = limited or any(_limited(workspace) for workspace in self._active)
            near = self._memory is not None and self._memory.is_near
            pause = _CHECK_SECONDS if limited else _IDLE_CHECK_SECONDS
            await asyncio.sleep(_NEAR_CHECK_SECONDS if near else pause)
            began = time.thread_time()
            await self._check_all()
            await asyncio.sleep((time.thread_time() - began) * (_NEAR_REST_FACTOR if near else _REST_FACTOR))

    async def _check_all(self) -> None:
        used = self._file_system_used()
        self._machine_shared = shared_memory_of_machine()
        for workspace in list(self._active):
            # Checking all of them in a row would block everything else for long.
            await asyncio.sleep(0)
            if workspace not in self._active or workspace.is_resting:
                continue  # a resting one has a command that will wake it
            workspace.end_unreported()
            with contextlib.suppress(OSError):
                self._check(workspace, used)
            self._hold(workspace)
        if not self._active:
            self._awake.clear()
        self._look_for_kills()
        if self._memory is not None:
            uncertain = {workspace for workspace, seen in self._observations.items() if seen.mappings is None}
            ending = self._memory.check(self._active, self._observations, uncertain)
            if ending is not None and not self._stopping:
                self._end_for_memory(*ending)
        if self._stopping:
            return  # a workspace that is being stopped still counts, so do not stop another one meanwhile
        usages = {str(id(workspace)): workspace.last for workspace in self._observations}
        active = {str(id(workspace)): workspace for workspace in self._active}
        leaders = {str(id(workspace)): str(id(workspace.members)) for workspace in self._observations}
        over = sandbox_disk_excess(usages, active, self._disk_limit, leaders)
        if over is not None:
            self._stop(active[over], self._end(active[over], "Disk"))

    def _end_for_memory(self, group: list[Workspace], cause: str) -> None:
        if cause == "Memory":
            largest = max(group, key=lambda member: member.last.memory_bytes)
            self._stop(largest, self._end(largest, cause))
            return
        for member in group:
            why = "the kernel ended a process" if cause == KILLED else "its own limit was not reached"
            message = f"workspace {member.spec.id!r} was ended because memory that it shares was used up; {why}"
            self._stop(member, self._fail(member, cause, message))

    async def _fail(self, workspace: Workspace, cause: str, message: str) -> None:
        await workspace.fail(cause, message)
        # Its last measurement would count until it is removed.
        workspace.last = replace(workspace.last, memory_bytes=0)
        await asyncio.sleep(_FREED_SECONDS)

    def _check(self, workspace: Workspace, used: int, exact: int | None = None) -> None:
        """Compare its use with its limits. `exact` is its memory, if it was just measured exactly."""
        everything = all_processes(workspace.proc)
        observation, now = self._observations[workspace], asyncio.get_running_loop().time()
        if any(process.pid == workspace.inner_init and process.state == "T" for process in everything):
            # When all processes of a job are stopped or continued, this one may run while its init stands still.
            observation.init_stopped_at = min(observation.init_stopped_at, now)
            if now - observation.init_stopped_at > _STOPPED_SECONDS and workspace not in self._stopping:
                message = f"workspace {workspace.spec.id!r} has ended: a tool stopped its init, which is not allowed"
                self._stop(workspace, workspace.fail(workspace.unasked_end, message))
        else:
            observation.init_stopped_at = math.inf
        running = descendants(everything, workspace.inner_init)
        tools = tools_of(running, workspace.inner_init)
        count = sum(process.threads for process in tools)
        self._share_processors(workspace, observation, tools, count)
        running = live_threads(workspace.proc, running)
        limits = workspace.spec.limits
        memory_limit = min(
            (limit for limit in (limits.memory_bytes, self._memory_limit) if limit is not None), default=None
        )
        others = [member.last for member in workspace.members if member is not workspace]
        if self._memory is not None and self._memory.is_near:
            # The sum over many workspaces must be exact before one pauses.
            memory_limit = min(memory_limit or sys.maxsize, int(last_mark(self._memory.limit) / len(self._active)))
        if memory_limit is not None:
            memory_limit = max(0, memory_limit - sum(usage.memory_bytes for usage in others))
        hidden_memory, hidden_disk, descriptors, files = hidden_bytes(workspace.proc, running, self._memory_device)
        hidden_memory += self._in_mappings(workspace, observation, running, files)
        shared = hidden_memory + (shm_bytes(workspace.shm) if workspace.shm is not None else 0)
        memory = exact
        if memory is None:
            most = most_memory_bytes(workspace.proc, running, workspace.inner_init, workspace.init_bytes) + shared
            is_enough = memory_limit is None or most <= memory_limit
            memory = most if is_enough else self._measured_memory(workspace, observation, running, shared, most)
        disk = workspace.last.disk_bytes - observation.hidden + hidden_disk
        observation.hidden = hidden_disk
        workspace.last = Usage(memory, count, disk, descriptors)
        if abs(used - observation.file_system_used) > _DISK_STEP_BYTES and observation.counting is None:
            observation.file_system_used = used
            observation.counting = asyncio.create_task(self._count(workspace, observation))
        cause = excess(total([workspace.last, *others]), limits, self._free(limits))
        # The use of another member may be an upper bound until its own next check.
        was_over, observation.is_over = observation.is_over or not others, cause is not None
        if (
            cause
            and running
            and was_over
            and is_largest(workspace.last, others, cause)
            and workspace not in self._stopping
            and not (cause == "Disk" and disk <= observation.stopped_at)
        ):
            self._stop(workspace, self._end(workspace, cause))
        if count == 0 and not workspace.busy:
            # What the kernel has ended is a loss of those that count as running.
            self._look_for_kills()
            if workspace in self._stopping:
                return
            # The remaining processes are an idle subreaper or are ending, so stop watching.
            workspace.last = Usage(shared, 0, disk)
            self._deactivate(workspace)
            self._host.rest_later(workspace)

    def _in_mappings(
        self, workspace: Workspace, observation: _Observation, running: list[Process], files: Set[tuple[int, int]]
    ) -> int:
        """Return the bytes of the workspace's shared mappings of which no file is open."""
        now, shared = time.monotonic(), self._machine_shared
        if (
            abs(shared - observation.machine_shared) > _SHARED_STEP_BYTES
            or now - observation.mappings_read_at > _MAPPINGS_SECONDS
            or not running
        ):
            observation.machine_shared, observation.mappings_read_at = shared, now
            if not running:
                observation.mappings = {}
            elif observation.reading is None:
                observation.reading = asyncio.create_task(self._read_mappings(workspace, observation, running))
        found = observation.mappings or {}
        return sum(size for inode, size in found.items() if (self._memory_device, inode) not in files)

    async def _read_mappings(self, workspace: Workspace, observation: _Observation, running: list[Process]) -> None:
        before, device = observation.mappings or {}, self._memory_device
        try:
            observation.mappings = await self._read(
                workspace, lambda proc: shared_mappings(proc, running, device, before)
            )
        finally:
            observation.reading = None

    def _measured_memory(
        self, workspace: Workspace, observation: _Observation, running: list[Process], shared: int, most: int
    ) -> int:
        """Return the last known memory while it is being measured exactly. A workspace whose memory cannot be read for
        long, because a process of it holds the lock that protects it, is judged by the upper bound `most`.
        """
        now = asyncio.get_running_loop().time()
        if observation.measuring is None:
            observation.measuring_since = now
            observation.measuring = asyncio.create_task(self._measure(workspace, observation, running, shared))
        return most if now - observation.measuring_since > _MEASURE_SECONDS else workspace.last.memory_bytes

    async def _measure(
        self, workspace: Workspace, observation: _Observation, running: list[Process], shared: int
    ) -> None:
        try:
            exact = await self._read(workspace, lambda proc: exact_memory_bytes(proc, running, shared))
        finally:
            observation.measuring = None
        if workspace in self._active and self._observations.get(workspace) is observation:
            with contextlib.suppress(OSError):
                self._check(workspace, self._file_system_used(), exact)

    async def _read(self, workspace: Workspace, read: Callable[[int], T]) -> T:
        """Return what a thread reads in the workspace's /proc: it may wait for a lock that a tool holds."""
        proc = os.dup(workspace.proc)  # the workspace may end meanwhile

        def read_and_close() -> T:
            try:
                return read(proc)
            finally:
                os.close(proc)

        return await asyncio.get_running_loop().run_in_executor(self._threads, read_and_close)

    def _share_processors(
        self, workspace: Workspace, observation: _Observation, tools: list[Process], count: int
    ) -> None:
        """Raise the nice value of threads that are too many in two checks: the kernel divides processors among threads,
        not workspaces.

        No value is lowered again, because a pod may not do that. So threads that only wait, such as a shell's, are not
        changed.
        """
        # Reading every thread of a large program is slow.
        is_small = fair_nice(count, self._processors) == 0
        threads = [] if is_small else runnable_threads(workspace.proc, tools)
        nice = fair_nice(min(observation.runnable, len(threads)), self._processors, self._host.tool_nice)
        observation.runnable = len(threads)
        if all(thread.nice >= nice for thread in threads):
            return
        outside = tools_of(descendants(all_processes(self._host.proc), workspace.init_pid), workspace.init_pid)
        for thread in runnable_threads(self._host.proc, outside):
            if thread.nice < nice:
                with contextlib.suppress(OSError):  # the thread has ended, or belongs to another user
                    os.setpriority(os.PRIO_PROCESS, thread.pid, nice)
                    if nice == MAX_NICE:
                        os.sched_setscheduler(thread.pid, os.SCHED_IDLE, os.sched_param(0))

    async def _count(self, workspace: Workspace, observation: _Observation) -> None:
        began = time.monotonic()
        try:
            # Counting many files takes long, so the count stops when it exceeds a limit.
            own = disk_limit(workspace.spec.limits, self._free(workspace.spec.limits))
            limits = [int(limit) for limit in (own, self._disk_limit) if limit is not None]
            enough = max(min(limits), observation.stopped_at) if limits else sys.maxsize
            counted = await self._host.measure_disk(workspace, enough=enough)
            disk = counted.bytes + observation.hidden
            if counted.is_disturbed or counted.is_evaded:
                disk = max(disk, workspace.last.disk_bytes)
                observation.file_system_used = -_DISK_STEP_BYTES  # count again at the next check
            workspace.last = replace(workspace.last, disk_bytes=disk)
            if counted.is_evaded and limits and workspace not in self._stopping:
                self._stop(workspace, self._end(workspace, "Disk"))
            await asyncio.sleep(min((time.monotonic() - began) * _REST_FACTOR, _COUNT_REST_SECONDS))
        except WorkspaceFailure:
            pass
        finally:
            observation.counting = None

    def _stop(self, workspace: Workspace, ending: Coroutine[Any, Any, None]) -> None:
        # Its files stay on disk. A later command may run if it does not use more disk.
        if workspace in self._observations:
            self._observations[workspace].stopped_at = workspace.last.disk_bytes
        task = asyncio.create_task(ending)
        self._stopping[workspace] = task
        task.add_done_callback(lambda _: self._stopping.pop(workspace, None))

    async def _end(self, workspace: Workspace, cause: str) -> None:
        before = workspace.last.memory_bytes
        await workspace.stop_excess(cause)
        if cause == "Memory" and workspace.shm is not None:
            await asyncio.get_running_loop().run_in_executor(None, _remove_contents, os.dup(workspace.shm))
        # A large process needs time to end, and its memory counts until then.
        for _ in range(_DYING_CHECKS):
            if workspace not in self._active or workspace.last.memory_bytes <= before / 2:
                break
            await asyncio.sleep(_CHECK_SECONDS)

    def _free(self, limits: Limits) -> float:
        """Return the bytes of disk that are free, if these limits depend on it."""
        return self._host.room() if limits.leaves_free else math.inf

    def _file_system_used(self) -> int:
        info = os.statvfs(self._host.written)
        return (info.f_blocks - info.f_bfree) * info.f_frsize


def _limited(workspace: Workspace) -> bool:
    limits = workspace.spec.limits
    return limits.leaves_free or any(
        limit is not None for limit in (limits.memory_bytes, limits.processes, limits.disk_bytes)
    )


def _remove_contents(folder: int) -> None:
    """Remove files in memory, which outlive the processes that wrote them."""
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                remove_entry(folder, name, missing_ok=True)
    finally:
        os.close(folder)
