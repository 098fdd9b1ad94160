"""Keep the cache up to date for one kind of object: list, then watch, until cancelled.

kopf's own watching is not used, for three reasons (figures in docs/operator.md). When a watch breaks and its version is too
old to resume, as after a restart of the API server, kopf lists again and never reports objects that were deleted in
between. It does not report when the first list is complete. It keeps parts of objects that are never read.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

from rollout_api.on_cluster.objects import Manifest
from rollout_operator.api import FIRST_PAGE, UNREACHABLE, ApiError, KubeApi, next_limit
from rollout_operator.world import OPTIONAL

log = logging.getLogger(__name__)

RETRY_SECONDS, RETRY_LIMIT_SECONDS = 0.2, 5.0
"""First and longest pause before a retry. The longest one is short, so that informers recover within seconds after an
outage. A watch that lasted longer than it resets the back-off.
"""
FORBIDDEN, GONE = 403, 410
ABSENT = (FORBIDDEN, 404)
"""Statuses for a kind that the cluster lacks or that may not be read. GONE: a version is too old to watch from."""
ABSENT_LIMIT_SECONDS = 300.0
"""Longest pause between requests for a kind that a cluster may lack. It may be installed later."""


class Sink(Protocol):
    """Receives the informer's callbacks. Calls must be quick: the watch is not read during a call."""

    def seen(self, kind: str, obj: Manifest, listed: bool) -> None:
        """An object's current state, from a list or a change."""

    def gone(self, kind: str, obj: Manifest) -> None:
        """An object was deleted; this is its last state."""

    def relisted(self, kind: str, namespace: str, present: set[tuple[str, str]]) -> None:
        """A list is complete. Cached objects that are not `present`, by (namespace, name), no longer exist."""


class Informer:
    """Lists and watches one kind, in one namespace or (`namespace` empty) in all."""

    def __init__(self, api: KubeApi, kind: str, namespace: str, selector: str, sink: Sink) -> None:
        self._api, self._sink = api, sink
        self.kind, self.namespace, self._selector = kind, namespace, selector
        self.synced = asyncio.Event()
        """Set when the first list is complete."""
        self.answered = asyncio.Event()
        """Set when the first list is complete, or was refused in the one namespace that this informer watches."""
        self.alive = time.monotonic()
        """Time at which it last got a response or stopped waiting for one. An old value indicates a bug, not an outage.
        """
        self._version = ""
        self._failures = 0

    async def run(self) -> None:
        """Run until cancelled. A pause follows each watch, because a proxy may end every watch at once."""
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
                log.warning("%s: continuing without it", ended.message)
                self._sync()
            if ended.status == FORBIDDEN and self.namespace and not self.answered.is_set():
                log.warning(
                    "namespace %s is not handled until its objects may be read: %s", self.namespace, ended.message
                )
                self.answered.set()
            await self._pause(ended, self._failures)
            self._failures += 1

    async def _list(self) -> None:
        present = set()
        limit, token, failures = FIRST_PAGE, "", 0
        while True:
            try:
                page = await self._api.page(self.kind, self.namespace, self._selector, limit, token)
            except ApiError as error:
                if not token or error.status == GONE:
                    raise
                # Repeat this page only. If a few requests fail, a long list would never complete from its start.
                await self._pause(error, failures)
                failures += 1
                continue
            self.alive, failures = time.monotonic(), 0
            # The API's documentation requires the same parameters on every page. API servers (1.33 to 1.37) accept
            # another limit: a token contains only the list's version and the key where the next page starts
            # (apiserver/pkg/storage/continue.go).
            limit = next_limit(limit, page.size)
            if page.objects is None:
                continue
            for obj in page.objects:
                present.add((obj["metadata"].get("namespace", ""), obj["metadata"]["name"]))
                self._tell(self._sink.seen, obj, listed=True)
            token, newest = page.token, page.version
            del page  # so that two pages are never in memory together
            if not token:
                break
            await asyncio.sleep(0)
        self._sink.relisted(self.kind, self.namespace, present)
        self._version = newest
        self._sync()

    def _sync(self) -> None:
        self.synced.set()
        self.answered.set()

    async def _watch(self) -> None:
        async for change, obj in self._api.watch(self.kind, self.namespace, self._selector, self._version):
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
            # One malformed object must not stop the operator.
            name = f"{obj['metadata'].get('namespace', '')}/{obj['metadata'].get('name', '')}"
            log.exception("%s %s cannot be read and is ignored in this version", self.kind, name)

    async def _pause(self, error: ApiError, failures: int) -> None:
        """Wait after an error; consecutive errors lengthen the pause."""
        self.alive = time.monotonic()
        absent = error.status in ABSENT and self.kind in OPTIONAL
        limit = ABSENT_LIMIT_SECONDS if absent else RETRY_LIMIT_SECONDS
        pause = min(limit, RETRY_SECONDS * 2 ** min(failures, 12))
        tries = failures + 1
        level = logging.WARNING if tries in (2, 10) or tries % 100 == 0 else logging.DEBUG
        log.log(level, "watching %s: %s (try %d)", self.kind, error.message, tries)
        await asyncio.sleep(max(error.retry_after, pause * (0.5 + random.random() / 2)))
