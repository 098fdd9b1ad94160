"""Which server a call goes to: bounded-load rendezvous hashing by group. Pure.

All calls of a group prefer the same server, because it has their shared prefix in its cache. Rendezvous hashing (Thaler
and Ravishankar, 1998): each group ranks all servers by a hash of both, so that a server that joins or leaves only moves
the groups that rank it first. The bound is that of "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup,
Zadimoghaddam, 2016).
"""

import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from hashlib import blake2b

BOUND = 1.25
"""Limit of a server's calls relative to the mean of all servers: the value of the paper and of kubeai. A lower value
balances better, but moves more calls.
"""


@lru_cache(maxsize=65_536)  # some thousand active groups, times the servers
def _weight(group: str, server: str) -> bytes:
    return blake2b(f"{len(group)}:{group}{server}".encode(), digest_size=8).digest()


def preference(group: str, servers: Collection[str]) -> list[str]:
    """Return the servers in the group's order, equal in every process."""
    return sorted(servers, key=lambda server: (_weight(group, server), server), reverse=True)


def bound(calls: int, servers: int) -> int:
    """Return how many calls one of `servers` may have at most while `calls` are in flight."""
    return math.ceil(BOUND * calls / servers)


def choose(group: str, in_flight: Mapping[str, int], limits: Mapping[str, int]) -> str | None:
    """Return the server of the next call: the first in the group's order below the bound and below its own limit.

    `in_flight` has this runner's calls at each available server, `limits` the most that each may have. If only the
    bound prevents a choice, the first below its limit is taken; None if all are at their limits.
    """
    if not in_flight:
        return None
    most = bound(sum(in_flight.values()) + 1, len(in_flight))
    free = [server for server in preference(group, in_flight) if in_flight[server] < limits[server]]
    return next((server for server in free if in_flight[server] < most), free[0] if free else None)
