"""Leader election by a coordination.k8s.io Lease, as in Kubernetes' own controllers.

A holder that cannot renew the lease for `renewDeadlineSeconds` stops writing before another replica may take it
(`durationSeconds`). So two replicas never write at once, even if the API server or the network fails. The process does
not exit: its cache stays warm, and it requests the lease again.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from rollout_api.on_cluster.operator_config import LeaseSettings
from rollout_operator.api import ApiError, KubeApi

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeenLease:
    """The lease as last read."""

    holder: str
    duration: float
    """Seconds for which the holder has the lease."""
    version: str
    since: float
    """Local time of the first response with this version. Clocks of other machines are not trusted."""
    transitions: int = 0
    acquired: str = ""
    """When the holder took the lease, by its own clock; for display only."""


def decide(seen: SeenLease | None, me: str, now: float) -> Literal["take", "wait"]:
    """Decide whether a replica may take or renew a lease. It may if the lease is its own, was released, or was not
    renewed for its whole duration.
    """
    is_free = seen is None or seen.holder in ("", me) or now - seen.since >= seen.duration
    return "take" if is_free else "wait"


def updated(seen: SeenLease | None, lease: Mapping[str, Any], now: float) -> SeenLease:
    """Update the lease after reading it. An unchanged lease keeps the time at which it was first seen."""
    spec = lease.get("spec") or {}
    fresh = SeenLease(
        holder=spec.get("holderIdentity") or "",
        duration=float(spec.get("leaseDurationSeconds") or 0),
        version=lease["metadata"]["resourceVersion"],
        since=now,
        transitions=int(spec.get("leaseTransitions") or 0),
        acquired=spec.get("acquireTime") or "",
    )
    return replace(fresh, since=seen.since) if seen and seen.version == fresh.version else fresh


class Leadership:
    """Takes and renews the lease while `run` runs. Times are seconds of `clock`."""

    def __init__(
        self,
        api: KubeApi,
        settings: LeaseSettings,
        identity: str,
        clock: Callable[[], float],
        on_won: Callable[[], None],
    ) -> None:
        self._api = api
        self._settings = settings
        self._identity = identity
        self._clock = clock
        self._on_won = on_won
        self._seen: SeenLease | None = None
        self._exists = False
        self._stale = True  # whether the lease must be read again before a write
        self._held_until = 0.0
        self._was_leading = False  # for the log
        self._failures = 0  # in a row

    def held(self) -> bool:
        """Whether this replica may write now."""
        return self._clock() < self._held_until

    async def run(self) -> None:
        """Request the lease, renew it, and request it again after losing it, until cancelled."""
        while True:
            try:
                # A request that hangs must leave time for another one before the deadline.
                async with asyncio.timeout(self._settings.renew_deadline_seconds / 2):
                    await self._try()
                self._failures = 0
            except (ApiError, TimeoutError) as error:
                self._failures += 1
                level = logging.WARNING if self._failures == 1 else logging.DEBUG
                log.log(level, "lease %s: %s; trying again", self._settings.name, error or "no answer in time")
            if self._was_leading and not self.held():
                self._was_leading = False
                log.warning("lease %s is lost: this replica stops writing", self._settings.name)
            await asyncio.sleep(self._settings.retry_seconds * (0.8 + 0.4 * random.random()))

    async def _try(self) -> None:
        if self._stale:
            lease = await self._api.find("Lease", self._settings.namespace, self._settings.name)
            # The time of the response, because the holder may have renewed after the request was sent.
            self._exists = lease is not None
            if lease is not None:
                self._seen = updated(self._seen, lease, self._clock())
        self._stale = True
        # The time before the renewal is sent, because other replicas may see the renewal from then on.
        asked = self._clock()
        if decide(self._seen, self._identity, asked) == "wait":
            self._held_until = 0.0
            return
        write = self._api.replace if self._exists else self._api.create
        self._won(await write(self._lease(self._identity)), asked)

    def _won(self, lease: Mapping[str, Any], asked: float) -> None:
        self._seen = updated(self._seen, lease, asked)
        self._stale, self._exists = False, True
        newly = not self.held()
        self._held_until = asked + self._settings.renew_deadline_seconds
        if newly:
            self._was_leading = True
            log.info("lease %s is held by this replica, %s", self._settings.name, self._identity)
            self._on_won()

    async def release(self) -> None:
        """Release the lease, so that another replica need not wait for its expiry. No write may follow."""
        if not self.held():
            return
        self._held_until = 0.0
        try:
            await self._api.replace(self._lease(""))
        except ApiError as error:
            log.info("lease %s was not released and will expire: %s", self._settings.name, error)

    def _lease(self, holder: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        seen = self._seen
        same = seen is not None and seen.holder == holder
        metadata = {"namespace": self._settings.namespace, "name": self._settings.name}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata | ({"resourceVersion": seen.version} if seen and self._exists else {}),
            "spec": {
                "holderIdentity": holder,
                # Kubernetes' own controllers also write the duration 1 when they release a lease.
                "leaseDurationSeconds": self._settings.duration_seconds if holder else 1,
                "renewTime": now,
                "acquireTime": (seen.acquired if seen and same else "") or now,
                "leaseTransitions": (seen.transitions if seen else 0) + (1 if seen and holder and not same else 0),
            },
        }
