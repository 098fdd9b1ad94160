"""Keep the cache true to one kind of object: list, then watch, for ever.

Not kopf's own watching: when a watch breaks and its version is too old to resume (every restart of the API server), kopf
lists again and nobody learns which objects went in between; it says neither when a first list is complete, nor lets go of
the parts of an object that nobody reads. docs/operator.md has the figures.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

from rollout_operator.actions import Manifest
from rollout_operator.api import FIRST_PAGE, UNREACHABLE, ApiError, KubeApi, next_limit
from rollout_operator.kinds import OPTIONAL

log = logging.getLogger(__name__)

RETRY_SECONDS, RETRY_LIMIT_SECONDS = 0.2, 5.0
"""The API server is asked again this soon; all informers of all replicas come back within seconds of an outage's end. A
watch that lasted for the longer of the two was a good one: the next pause is a first one."""
ABSENT, GONE = (403, 404), 410
ABSENT_LIMIT_SECONDS = 300.0
"""A kind that a cluster may lack is asked for this often at last: it may be installed later."""


class Sink(Protocol):
    """Who is told. Calls must be quick: nothing else is read from the watch meanwhile."""

    def seen(self, kind: str, obj: Manifest, listed: bool) -> None:
        """An object as it is now; from a list, or from a change."""

    def gone(self, kind: str, obj: Manifest) -> None:
        """An object was deleted; this is its last state."""

    def relisted(self, kind: str, namespace: str, present: set[tuple[str, str]]) -> None:
        """A list is complete: whatever the cache has beyond these (namespace, name) is gone."""


class Informer:
    """One kind, in one namespace or (`namespace` empty) in all."""

    def __init__(self, api: KubeApi, kind: str, namespace: str, selector: str, sink: Sink) -> None:
        self._api, self._sink = api, sink
        self.kind, self._namespace, self._selector = kind, namespace, selector
        self.synced = asyncio.Event()
        """Set when the first list is complete."""
        self.alive = time.monotonic()
        """When it last heard of the API server or gave up waiting for it: an old value is a bug, not an outage."""
        self._version = ""
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled. However a watch ends, there is a pause before the next: a proxy may end each at once."""
        began = time.monotonic()
        while True:
            try:
                if not self._version:
                    await self._list()
                began = time.monotonic()
                await self._watch()
                ended = ApiError(UNREACHABLE, "the watch ended")
            except ApiError as error:
                ended = error
            if self._version and time.monotonic() - began >= RETRY_LIMIT_SECONDS:
                self._failures = 0
            if ended.status == GONE:
                self._version = ""  # Too old to resume from: list again.
            if ended.status in ABSENT and self.kind in OPTIONAL and not self.synced.is_set():
                log.warning("%s: doing without", ended.message)
                self.synced.set()
            await self._pause(ended, self._failures)
            self._failures += 1

    async def _list(self) -> None:
        present = set()
        limit, token, failures = FIRST_PAGE, "", 0
        while True:
            try:
                page = await self._api.page(self.kind, self._namespace, self._selector, limit, token)
            except ApiError as error:
                if not token or error.status == GONE:
                    raise
                # From the same page, not from the first: a long list would never end while a few requests fail.
                await self._pause(error, failures)
                failures += 1
                continue
            self.alive, failures = time.monotonic(), 0
            # The API's text asks for the same parameters on every page. API servers (1.33 to 1.37) take another limit: a
            # token holds only the list's version and the key where the next page begins (apiserver/pkg/storage/continue.go).
            limit = next_limit(limit, page.size)
            if page.objects is None:
                continue
            for obj in page.objects:
                present.add((obj["metadata"].get("namespace", ""), obj["metadata"]["name"]))
                self._tell(self._sink.seen, obj, listed=True)
            token, newest = page.token, page.version
            del page  # Else its objects would be in memory together with those of the next one.
            if not token:
                break
            await asyncio.sleep(0)
        self._sink.relisted(self.kind, self._namespace, present)
        self._version = newest
        self.synced.set()

    async def _watch(self) -> None:
        async for change, obj in self._api.watch(self.kind, self._namespace, self._selector, self._version):
            self.alive = time.monotonic()
            self._version = obj["metadata"]["resourceVersion"]
            if change == "DELETED":
                self._tell(self._sink.gone, obj)
            elif change != "BOOKMARK":
                self._tell(self._sink.seen, obj, listed=False)

    def _tell(self, callback: Callable[..., None], obj: Manifest, **how: bool) -> None:
        try:
            callback(self.kind, obj, **how)
        except Exception:
            # One object must not stop the operator for all others.
            name = f"{obj['metadata'].get('namespace', '')}/{obj['metadata'].get('name', '')}"
            log.exception("%s %s cannot be read and is ignored in this version", self.kind, name)

    async def _pause(self, error: ApiError, failures: int) -> None:
        """Wait after an error, the longer the more of them there were before it in a row."""
        self.alive = time.monotonic()
        absent = error.status in ABSENT and self.kind in OPTIONAL
        limit = ABSENT_LIMIT_SECONDS if absent else RETRY_LIMIT_SECONDS
        pause = min(limit, RETRY_SECONDS * 2 ** min(failures, 12))
        tries = failures + 1
        level = logging.WARNING if tries in (2, 10) or tries % 100 == 0 else logging.DEBUG
        log.log(level, "watching %s: %s (try %d)", self.kind, error.message, tries)
        await asyncio.sleep(max(error.retry_after, pause * (0.5 + random.random() / 2)))
