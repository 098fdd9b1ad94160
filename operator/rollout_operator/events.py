"""Kubernetes Events: equal Events become one object with a count, and their rate is limited."""

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from rollout_api.on_cluster.objects import Manifest
from rollout_operator import clock
from rollout_operator.actions import Event
from rollout_operator.api import ApiError, KubeApi
from rollout_operator.budgets import TokenBucket
from rollout_operator.conditions import timestamp
from rollout_operator.tenant_limits import digest, shortened

log = logging.getLogger(__name__)

COMPONENT = "rollout-operator"
PER_SECOND = 10.0
MOST_WAITING = 1000
"""Most queued Events. Further ones are dropped, which loses nothing: conditions hold the same information."""
REMEMBERED = 5000
COUNT_AGAIN_SECONDS = 60.0
"""A repeated Event is written again at this interval."""


@dataclass
class _Known:
    name: str
    count: int
    written: float


class EventRecorder:
    """Queues Events and writes them in the background."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._waiting: asyncio.Queue[tuple[Manifest, str, Event]] = asyncio.Queue(MOST_WAITING)
        self._bucket = TokenBucket(PER_SECOND)

    def record(self, obj: Manifest, kind: str, event: Event) -> None:
        metadata = {key: obj["metadata"][key] for key in ("namespace", "name", "uid")}
        about = {
            "apiVersion": obj["apiVersion"],
            "metadata": metadata,
        }  # The whole object may have been deleted meanwhile.
        try:
            self._waiting.put_nowait((about, kind, replace(event, message=shortened(event.message))))
        except asyncio.QueueFull:
            log.debug("dropped event %s about %s %s", event.reason, kind, obj["metadata"]["name"])

    async def run(self) -> None:
        while True:
            obj, kind, event = await self._waiting.get()
            try:
                await self._write(obj, kind, event)
            except ApiError as error:
                log.debug("event %s about %s: %s", event.reason, obj["metadata"]["name"], error)

    async def _write(self, obj: Manifest, kind: str, event: Event) -> None:
        metadata = obj["metadata"]
        now = time.monotonic()
        key = digest(metadata["uid"], event.type, event.reason, event.message)
        known = self._known.get(key)
        if known:
            known.count += 1
            if now - known.written < COUNT_AGAIN_SECONDS:
                return
        await asyncio.sleep(self._bucket.reserve(now) - now)
        if known:
            known.written = now
            try:
                change = {"count": known.count, "lastTimestamp": timestamp(clock.now())}
                await self._api.merge("Event", metadata["namespace"], known.name, change)
                return
            except ApiError as error:
                if error.status != 404:  # The API server deletes Events after an hour.
                    raise
        body = _body(obj, kind, event)
        await self._api.create(body)
        self._known[key] = _Known(body["metadata"]["name"], 1, now)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def _body(obj: Manifest, kind: str, event: Event) -> dict[str, Any]:
    metadata, now = obj["metadata"], timestamp(clock.now())
    key = digest(metadata["uid"], event.type, event.reason, event.message, now).hex()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{key}"},
        "involvedObject": {
            "apiVersion": obj["apiVersion"],
            "kind": kind,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
    }
