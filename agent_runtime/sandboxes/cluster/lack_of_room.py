"""Decides how long requests wait for a sandbox whose start lacks nothing but room: in a quota, on nodes, or in a pool.

Room that other sandboxes use becomes free when these end. So `startSeconds` count from the last time at which the start
lacked room that others used. If none uses any, the start fails after `startSeconds` like every other one.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress

from agent_runtime.kube.api import ApiError, KubeApi
from agent_runtime.sandboxes.cluster.sandbox_object import sandbox_view
from rollout_api.base import quantity_value

# Words of the API server for a full quota, and of the scheduler for full nodes. Only the messages tell these causes from
# others: a refusal by admission is also Forbidden, and a node selector that matches no node is also Unschedulable.
LACK_OF_ROOM = re.compile(r"exceeded quota:|\d+ Insufficient \S|Too many pods")
QUOTA = re.compile(r"requested: (\S+), used: \S+, limited: (\S+)")
AMOUNT = re.compile(r"([^,;=]+)=([^,;=]+)")
# Interval of lists of the namespace's Sandboxes while this runner waits for room and has no sandbox itself.
LOOK_SECONDS = 10.0


def is_lack_of_room(message: str) -> bool:
    """Whether a start failed or is delayed because there is no room for its Sandbox or pod, by the cause's message."""
    return LACK_OF_ROOM.search(message) is not None and not _exceeds_whole_quota(message)


def _exceeds_whole_quota(message: str) -> bool:
    """Whether the request is larger than the quota, so that no end of another sandbox helps."""
    if (found := QUOTA.search(message)) is None:
        return False
    requested, limited = (dict(AMOUNT.findall(amounts)) for amounts in found.groups())
    try:
        return any(
            quantity_value(requested[name]) > quantity_value(limited[name]) for name in requested.keys() & limited
        )
    except (ValueError, KeyError):  # a quantity in a form that is not known here, or a shortened message
        return False


def seconds_left(start_seconds: float, *, waited: float, unused: float) -> float:
    """Return for how many seconds a request still waits; 0 or less if it fails.

    Args:
        waited: seconds since the request.
        unused: seconds since its start lacked room that others used.
    """
    return start_seconds - min(waited, unused)


class UseOfRoom:
    """Whether any Sandbox of the namespace is ready and so uses room. All requests of a runner share what it reads."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._is_used = False
        self._looked_at = float("-inf")

    async def read(self) -> bool:
        """Return what the API server reported within LOOK_SECONDS; the last answer while it does not respond."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            with suppress(ApiError):
                self._is_used = await self._api.has_sandbox(lambda found: sandbox_view(found).can_be_reached)
        return self._is_used
