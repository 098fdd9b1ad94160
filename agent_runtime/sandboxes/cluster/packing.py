"""Decides which sandbox gets the next workspace, when another one is opened, and which are deleted.

All sandboxes and requests of one plan are of the same kind, so each sandbox is suitable for each request.

- A place that is free is given away at once.
- A member goes where its group's prepared state is while there is a place. A new group goes where all of it will fit, into
  the tightest such room; so a group is split only when it does not fit.
- Sandboxes are opened for those who wait and find no place. One more is opened ahead of them when everything is taken and
  more are expected, so that its start is hidden behind the others' work.
- A sandbox that stays empty is given back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """A request that waits for a place."""

    number: int
    """Order of arrival."""
    group: str
    to_come: int = 0
    """Members of its group that have not requested a place yet."""


@dataclass(frozen=True)
class Room:
    """A sandbox. Until it is ready, `places` is its expected number."""

    name: str
    places: int
    taken: int = 0
    is_ready: bool = True
    to_come: Mapping[str, int] = field(default_factory=dict)
    """The groups whose prepared state is here, and how many members of each have not requested a place yet."""
    empty_seconds: float = 0.0
    """How long it has been ready and empty."""

    @property
    def free(self) -> int:
        return max(0, self.places - self.taken) if self.is_ready else 0


@dataclass(frozen=True)
class Bounds:
    """Limits of the sandboxes of one kind."""

    places: int
    """Expected places of a sandbox that is opened now."""
    may_come: int
    """Most further requests, of any kind, before a release."""
    keep_seconds: float
    """How long an empty sandbox is kept."""
    is_reusable: bool = True
    """Whether a released place can be used again; a `Plain` sandbox is used up by its only workspace."""
    opens_ahead: bool = True
    """Whether sandboxes may be opened before they are requested. They are then older than the workspaces in them."""
    is_shared: bool = True
    """Whether several groups use this kind, so that further groups can be expected."""


@dataclass(frozen=True)
class PackingPlan:
    """Actions for sandboxes and requests."""

    placed: Mapping[int, str]
    """Sandbox by request number."""
    opened: int
    """Number of sandboxes to open."""
    given_back: Sequence[str]
    """Sandboxes to delete."""


def plan_packing(requests: Sequence[Request], rooms: Sequence[Room], bounds: Bounds) -> PackingPlan:
    """Return the plan for the waiting requests and the existing sandboxes."""
    free = {room.name: room.free for room in rooms}
    placed = _place(requests, rooms, free)
    coming = sum(room.places for room in rooms if not room.is_ready)
    spare = coming + sum(free.values()) - (len(requests) - len(placed))
    opened = max(0, math.ceil(-spare / bounds.places))
    if spare + opened * bounds.places == 0 and _expects_more(requests, rooms, bounds):
        opened += 1
    is_at_work = any(room.taken or not room.is_ready for room in rooms)
    given_back = [
        room.name
        for room in rooms
        if room.is_ready and room.taken == 0 and free[room.name] == room.places
        # Keep a `Plain` sandbox that was opened ahead while further workspaces are expected.
        and room.empty_seconds >= bounds.keep_seconds
        and (bounds.is_reusable or not bounds.opens_ahead or not is_at_work)
    ]  # fmt: skip
    return PackingPlan(placed, opened, given_back)


def _expects_more(requests: Sequence[Request], rooms: Sequence[Room], bounds: Bounds) -> bool:
    """Whether further requests that find no place are expected."""
    if not bounds.opens_ahead:
        return False
    if not bounds.is_reusable:
        # The grading of the same rollout, or the next rollout.
        return bool(requests)
    known = {group for room in rooms for group in room.to_come}
    return bounds.is_shared and bounds.may_come > 0 and any(request.group not in known for request in requests)


def _place(requests: Sequence[Request], rooms: Sequence[Room], free: dict[str, int]) -> dict[int, str]:
    """Assign free places; `free` is reduced to the remaining ones."""
    homes = {room.name: dict(room.to_come) for room in rooms if room.free}
    known = {group for to_come in homes.values() for group in to_come}
    waiting = Counter(request.group for request in requests)
    oldest: dict[str, int] = {}
    for request in requests:
        oldest[request.group] = min(request.number, oldest.get(request.group, request.number))
    placed: dict[int, str] = {}
    # First members whose group has a sandbox, then group by group, so that members in between do not split a group.
    for request in sorted(requests, key=lambda r: (r.group not in known, oldest[r.group], r.number)):
        rest = waiting[request.group] + request.to_come
        name = _choose(request.group, rest, homes, free)
        if name is None:
            break
        placed[request.number] = name
        free[name] -= 1
        waiting[request.group] -= 1
        homes[name][request.group] = request.to_come
    return placed


def _choose(group: str, rest: int, homes: Mapping[str, Mapping[str, int]], free: Mapping[str, int]) -> str | None:
    """Return the room for a member of a group of which `rest` members, this one included, still need a place; None if
    all are taken.
    """

    def rank(name: str) -> tuple[bool, bool, int, str]:
        # Leave places for the expected members of other groups.
        left = free[name] - sum(count for other, count in homes[name].items() if other != group)
        return group in homes[name], left >= rest, -left if left >= rest else left, name

    return max((name for name in homes if free[name] > 0), key=rank, default=None)
