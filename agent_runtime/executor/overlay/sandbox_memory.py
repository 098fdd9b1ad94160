"""Pauses workspaces while the memory that they share is short, and says which one must end. memory.py decides."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from agent_runtime.executor.overlay.memory import (
    Decision,
    ProgressClock,
    Situation,
    Unit,
    decide,
    is_near,
    node_has_pressure,
    possible_growth,
    read_pressure,
)
from agent_runtime.executor.overlay.standing_still import listed_tools
from agent_runtime.executor.overlay.usage import OwnGroup

if TYPE_CHECKING:
    from agent_runtime.executor.overlay.workspace import Workspace

_PRESSURE_SECONDS = 1.0
# Share of the longest time between two measurements that remains at the next one.
_LESS_BUSY = 0.9

Groups = dict[str, list["Workspace"]]
"""Workspaces with those that joined them, the joined ones last, by the name of the first."""


class SandboxMemory:
    """The memory of a sandbox with this limit in bytes, from one measurement of its workspaces to the next. Where it is not
    `shared`, it has a place for one workspace only: memory that no measurement shows can be no other one's.
    """

    def __init__(self, limit: int, processors: int, *, shared: bool) -> None:
        self.limit, self._processors, self._is_shared = limit, processors, shared
        self.starts_wait = False
        """Whether commands of workspaces without processes must wait for their start."""
        self._used = 0
        self._group = OwnGroup(limit)
        self._progress = ProgressClock(time.monotonic())
        self._is_settled = True
        self._was_over_alone = self._has_pressure = False
        self._checked_at, self._interval = time.monotonic(), 0.0
        self._pressure_read_at = -_PRESSURE_SECONDS

    @property
    def is_near(self) -> bool:
        """Whether memory may become short within a few measurements."""
        return is_near(self._used, self.limit)

    def begin(self) -> None:
        """Begin to measure again after a time without active workspaces."""
        self._checked_at = time.monotonic()

    def check(
        self, active: Collection[Workspace], observed: Collection[Workspace], uncertain: Collection[Workspace]
    ) -> tuple[list[Workspace], str] | None:
        """Pause and resume after a measurement of the `active` workspaces. `observed` are all that may hold memory,
        `uncertain` those with shared mappings that could not be measured. Return those that must end, with the cause.
        """
        groups = _groups(active)
        idle = _idle_groups(observed, groups)
        every = {**groups, **idle}
        known = sum(workspace.last.memory_bytes for workspace in observed)
        of_group, shared = self._group.used()
        used = max(known, of_group)
        growth, self._used = max(0, used - self._used), used
        only = _only_group(observed, shared=self._is_shared)
        own = 0 if only is None else min(used - known, shared)
        shares = {} if own else _shares_of_unknown(every, uncertain, used - known)
        units = [
            Unit(
                name,
                _memory(group) + own,
                min(member.oldest_command for member in group),
                group[0].created,
                group[0].spec.limits.memory_bytes,
                group[0].pause.is_for_memory,
                any(member.pause.is_forbidden for member in group),
                name in idle,
                shares.get(name, 0),
            )
            for name, group in every.items()
        ]
        decision = decide(units, self._situation(used, growth))
        self._progress.decided(decision, used, self._checked_at)
        self._apply(decision, groups)
        if only is not None and self._is_over(only, own):
            return only, "Memory"
        if decision.end is None:
            return None
        name, cause = decision.end
        return every[name], cause

    def _situation(self, used: int, growth: int) -> Situation:
        now = time.monotonic()
        # A machine that was too busy to measure once will be so again.
        self._interval = max(now - self._checked_at, self._interval * _LESS_BUSY)
        self._checked_at = now
        possible = possible_growth(self.limit, self._processors, self._interval)
        stuck = self._progress.seconds(used, self.limit, now, starts_wait=self.starts_wait)
        if now - self._pressure_read_at >= _PRESSURE_SECONDS:
            self._pressure_read_at, self._has_pressure = now, node_has_pressure(read_pressure())
        return Situation(used, self.limit, growth, possible, stuck, self._has_pressure, self._is_settled)

    def _is_over(self, group: list[Workspace], unknown: int) -> bool:
        """Whether a workspace exceeds its own limit at two checks because of `unknown` bytes, which no measurement of it
        shows.
        """
        limit = group[0].spec.limits.memory_bytes
        was_over = self._was_over_alone
        self._was_over_alone = limit is not None and unknown > 0 and _memory(group) + unknown > limit
        return was_over and self._was_over_alone

    def _apply(self, decision: Decision, groups: Groups) -> None:
        self.starts_wait = bool(groups) and decision.starts_wait
        self._is_settled = not (decision.pause or decision.resume)
        for name in decision.resume:
            for member in groups[name]:
                member.pause.proceed(member.proc, listed_tools(member))
            groups[name][0].pause.end()
        for name in decision.pause:
            groups[name][0].pause.begin()
        for group in groups.values():
            if group[0].pause.is_on:
                for member in group:
                    member.pause.stop(member.proc, listed_tools(member))


class MeasuredUse:
    """Sums over the time of all workspaces, from which the mean of their memory and its variance follow. Workspaces count
    together with those that joined them. Times are of any one clock.
    """

    def __init__(self, now: float) -> None:
        self._groups: dict[int, int] = {}
        self._bytes = self._squares = 0
        self._seconds = self._byte_seconds = self._square_seconds = 0.0
        self._counted_until = now

    def hold(self, group: int, used: int | None, now: float) -> None:
        """Set the bytes that a group of workspaces uses from now on; None: it has ended."""
        self._count(now)
        before = self._groups.pop(group, 0)
        if used is not None:
            self._groups[group] = used
        after = used or 0
        self._bytes += after - before
        self._squares += after * after - before * before

    def sums(self, now: float) -> dict[str, float]:
        """Return the object `memoryBytes.measured` of `GET /v1/health`."""
        self._count(now)
        return {"seconds": self._seconds, "byteSeconds": self._byte_seconds, "squareSeconds": self._square_seconds}

    def _count(self, now: float) -> None:
        passed, self._counted_until = now - self._counted_until, now
        self._seconds += passed * len(self._groups)
        self._byte_seconds += passed * self._bytes
        self._square_seconds += passed * self._squares


def _memory(group: Iterable[Workspace]) -> int:
    return sum(member.last.memory_bytes for member in group)


def _only_group(observed: Iterable[Workspace], *, shared: bool) -> list[Workspace] | None:
    """Return the only workspace, with those that joined it; None if others have or had memory too. Being left alone in a
    `shared` sandbox is no proof: the others may just have been ended.
    """
    groups = grouped(workspace for workspace in observed if not workspace.frozen)
    return groups[0] if len(groups) == 1 and not shared else None


def grouped(workspaces: Iterable[Workspace]) -> list[list[Workspace]]:
    """Return them with those that joined them, which are last."""
    sets = {id(workspace.members): workspace.members for workspace in workspaces}
    return [sorted(members, key=lambda member: member.spec.joins is not None) for members in sets.values()]


def _groups(active: Iterable[Workspace]) -> Groups:
    """Return those with processes or waiting commands, and end the pauses of the others."""
    groups = {}
    for group in grouped(active):
        pause = group[0].pause
        if any(member.last.processes for member in group) or (pause.is_on and any(m.busy for m in group)):
            groups[group[0].spec.id] = group
        else:
            pause.end()
    return groups


def _idle_groups(observed: Iterable[Workspace], active: Groups) -> Groups:
    """Return the others that have files in memory."""
    holders = grouped(workspace for workspace in observed if workspace.last.memory_bytes)
    return {group[0].spec.id: group for group in holders if group[0].spec.id not in active}


def _shares_of_unknown(groups: Groups, uncertain: Collection[Workspace], unknown: int) -> Mapping[str, int]:
    """Divide memory that no measurement of a workspace shows, equally among those that may have it."""
    may = [name for name, group in groups.items() if any(member in uncertain for member in group)]
    holders = may or list(groups)
    return {name: unknown // len(holders) for name in holders}
