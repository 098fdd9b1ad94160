"""Which sandbox takes the next workspace, when a further one is opened, and which are given back. Pure.

All sandboxes and requests of one plan are of one kind: whatever one of these sandboxes offers serves any of the requests.

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
    """Someone waits for a place."""

    number: int
    """Order of asking."""
    group: str
    to_come: int = 0
    """Members of its group that have not asked yet."""


@dataclass(frozen=True)
class Room:
    """A sandbox. While it is not ready, `places` is what it is expected to offer."""

    name: str
    places: int
    taken: int = 0
    is_ready: bool = True
    to_come: Mapping[str, int] = field(default_factory=dict)
    """The groups that are at home here, and how many members of each have not asked yet."""
    empty_seconds: float = 0.0
    """How long it has been ready with nobody in it."""

    @property
    def free(self) -> int:
        return max(0, self.places - self.taken) if self.is_ready else 0


@dataclass(frozen=True)
class Bounds:
    """What limits the sandboxes of one kind."""

    places: int
    """What a sandbox that is opened now will offer."""
    may_come: int
    """How many more requests there can be, of any kind, before something is released."""
    keep_seconds: float
    """How long an empty sandbox is kept."""
    is_reusable: bool = True
    """Whether a release leaves a place to the next one; a `Plain` sandbox is used up by its one workspace."""
    is_shared: bool = True
    """Whether more than one group uses this kind, so that after a new group another one can be expected."""


@dataclass(frozen=True)
class PackingPlan:
    """What is to be done."""

    placed: Mapping[int, str]
    """Sandbox by request number."""
    opened: int
    """Further sandboxes."""
    given_back: Sequence[str]
    """Sandboxes to be deleted."""


def plan_packing(requests: Sequence[Request], rooms: Sequence[Room], bounds: Bounds) -> PackingPlan:
    """The plan for the requests that wait and the sandboxes there are."""
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
        # The one that was opened ahead for the next `Plain` workspace stays while others may be followed by one.
        and room.empty_seconds >= bounds.keep_seconds and (bounds.is_reusable or not is_at_work)
    ]  # fmt: skip
    return PackingPlan(placed, opened, given_back)


def _expects_more(requests: Sequence[Request], rooms: Sequence[Room], bounds: Bounds) -> bool:
    """Whether those who ask now will be followed by others who find no place."""
    if not bounds.is_reusable:
        # The grading of the same rollout, or the next rollout.
        return bool(requests)
    known = {group for room in rooms for group in room.to_come}
    return bounds.is_shared and bounds.may_come > 0 and any(request.group not in known for request in requests)


def _place(requests: Sequence[Request], rooms: Sequence[Room], free: dict[str, int]) -> dict[int, str]:
    """Give the free places away; `free` becomes what is left of them."""
    homes = {room.name: dict(room.to_come) for room in rooms if room.free}
    known = {group for to_come in homes.values() for group in to_come}
    waiting = Counter(request.group for request in requests)
    oldest: dict[str, int] = {}
    for request in requests:
        oldest[request.group] = min(request.number, oldest.get(request.group, request.number))
    placed: dict[int, str] = {}
    # First those who have a home, then group by group: members that came between must not split another group.
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
    """The room for a member of a group of which `rest` members, it included, still want a place; None when all is taken."""

    def rank(name: str) -> tuple[bool, bool, int, str]:
        # Those whom other groups there still expect will want their places.
        left = free[name] - sum(count for other, count in homes[name].items() if other != group)
        return group in homes[name], left >= rest, -left if left >= rest else left, name

    return max((name for name in homes if free[name] > 0), key=rank, default=None)
