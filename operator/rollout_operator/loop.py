"""The control loop. For every object that changed or is due: observe, plan, execute, write the status, record Events.

The loop is level-triggered: plans depend on the current state, never on the change itself.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence

from rollout_api.on_cluster.objects import Manifest
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator import clock
from rollout_operator.actions import Event, Ref
from rollout_operator.api import ApiError
from rollout_operator.budgets import TokenBucket
from rollout_operator.cache import PRIMARY, affected_by, uid_of
from rollout_operator.events import EventRecorder
from rollout_operator.execute import (
    OPERATOR_ERROR,
    Execution,
    NotLeader,
    Throttled,
    is_reportable,
    version_of,
    without_failures,
)
from rollout_operator.metrics import Metrics
from rollout_operator.prune import prune
from rollout_operator.tenant_limits import shortened
from rollout_operator.work_queue import WorkQueue
from rollout_operator.world import Controller, World

log = logging.getLogger(__name__)

UNKNOWN_SECONDS = 5.0
"""Pause before an object is planned whose namespace may not be read. The tenant may have removed the operator's Role."""

STUCK_SECONDS = 300.0
"""Time without progress after which a worker counts as hung. One request takes far less."""

LOG_LINES_PER_SECOND = 5.0
"""Rate of log lines about failing objects. One cause often affects thousands."""


class Loop:
    """Receives objects from the informers and reconciles them with workers, each object with one worker at a time."""

    def __init__(
        self,
        controllers: Iterable[Controller],
        config: OperatorConfig,
        execution: Execution,
        events: EventRecorder,
        metrics: Metrics,
    ) -> None:
        self._controllers = {controller.kind: controller for controller in controllers}
        self._config, self._execution, self._events, self._metrics = config, execution, events, metrics
        self._cache = execution.cache
        execution.operations.on_done = lambda ref: self._wake([ref])
        execution.executors.on_done = lambda ref: self._wake([ref])
        execution.operations.exists = execution.executors.exists = self._exists
        execution.on_progress = lambda ref: self._queues[ref.kind].advance(ref)
        self.may_plan: Callable[[str], bool] = lambda namespace: True
        """Whether all objects of a namespace are in the cache. A plan without some of them would be wrong: a Sandbox whose
        pod is not known counts as one whose pod was deleted.
        """
        self._queues: dict[str, WorkQueue[Ref]] = {
            kind: WorkQueue(time.monotonic, lambda ref: ref.namespace) for kind in self._controllers
        }
        for kind, queue in self._queues.items():
            metrics.watch_queue(kind, queue)
        self._held: set[Ref] = set()
        self._errors: dict[Ref, str] = {}
        self._log_lines = TokenBucket(LOG_LINES_PER_SECOND)
        self._leading = False

    # Informer callbacks

    def seen(self, kind: str, obj: Manifest, listed: bool) -> None:
        new = prune(kind, obj)
        metadata = new["metadata"]
        old = self._cache.get(kind, metadata.get("namespace", ""), metadata["name"])
        if old and uid_of(old) != uid_of(new):
            self.gone(kind, old)
            old = None
        self._cache.put(kind, new)
        if kind == "Sandbox":
            self._metrics.sandbox_seen(new, is_new=old is None and not listed)
        if old is None or _changed(old, new):
            self._wake(affected_by(kind, old, new, self._cache))
        self._saw(kind, new)

    def gone(self, kind: str, obj: Manifest) -> None:
        metadata = obj["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        old = self._cache.get(kind, namespace, name)
        if old is not None and uid_of(old) == metadata["uid"]:
            affected = affected_by(kind, old, None, self._cache)
            self._cache.remove(kind, namespace, name)
            self._wake(affected)
        if kind in PRIMARY:
            self._execution.keys.forget(metadata["uid"])
        if kind == "Pod":
            self._execution.operations.forget(metadata["uid"])
        if kind == "Sandbox":
            self._metrics.sandbox_gone(obj)
            self._execution.executors.forget(metadata["uid"])
        self._saw(kind, obj)

    def _exists(self, ref: Ref, uid: str) -> bool:
        found = self._cache.get(ref.kind, ref.namespace, ref.name)
        return found is not None and uid_of(found) == uid

    def relisted(self, kind: str, namespace: str, present: set[tuple[str, str]]) -> None:
        """A list is complete: remove all cached objects that it lacks."""
        for obj in tuple(self._cache.all(kind)):
            metadata = obj["metadata"]
            where = metadata.get("namespace", "")
            if (not namespace or where == namespace) and (where, metadata["name"]) not in present:
                self.gone(kind, obj)

    def _saw(self, kind: str, obj: Manifest) -> None:
        metadata = obj["metadata"]
        name = (kind, metadata.get("namespace", ""), metadata["name"])
        for ref in self._execution.expectations.saw(name, version_of(obj)):
            if ref in self._held:
                self._held.discard(ref)
                self._wake([ref])

    def _wake(self, refs: Iterable[Ref]) -> None:
        if self._leading:
            for ref in refs:
                if queue := self._queues.get(ref.kind):
                    queue.add(ref)

    # Workers

    def lead(self) -> None:
        """This replica leads from now on: plan all objects."""
        self._leading = True
        for kind in self._queues:
            for obj in self._cache.all(kind):
                self._wake([Ref.of(kind, obj)])

    async def run(self) -> None:
        """Run until cancelled. Rounds in progress are then interrupted, which is safe because writes are independent."""
        async with asyncio.TaskGroup() as group:
            for kind in self._queues:
                group.create_task(self._resync(kind))
                for _ in range(self._config.workers):
                    group.create_task(self._work(kind))

    def stuck(self) -> float:
        """Return the seconds without progress of the slowest worker if it has hung; else 0."""
        longest = max((queue.stalled() for queue in self._queues.values()), default=0.0)
        return longest if longest > STUCK_SECONDS else 0.0

    async def _resync(self, kind: str) -> None:
        while True:
            await asyncio.sleep(self._config.resync_seconds * (0.9 + 0.2 * random.random()))
            if self._leading:
                for obj in tuple(self._cache.all(kind)):
                    # Spread over time, so that a resync is not a burst.
                    self._queues[kind].add_after(Ref.of(kind, obj), random.random() * self._config.resync_seconds / 10)

    async def _work(self, kind: str) -> None:
        queue = self._queues[kind]
        while True:
            ref = await queue.take()
            started = time.monotonic()
            result = "error"
            try:
                result = await self._reconcile(ref, queue)
            except NotLeader:
                # A new leader plans every object. If this replica holds the lease again by now, it goes on.
                self._leading = self._execution.may_write()
                self._wake([ref])
                result = "requeue_after"
            except Exception:  # an error of one object must not stop the others
                log.exception("%s: the failure of its reconciliation could not be reported", ref)
                queue.retry(ref)
            finally:
                queue.done(ref)
                self._metrics.reconciled(kind, result, time.monotonic() - started)

    async def _reconcile(self, ref: Ref, queue: WorkQueue[Ref]) -> str:
        obj = self._cache.get(ref.kind, ref.namespace, ref.name)
        if obj is None:
            self._forget(ref, queue)
            return "success"
        if not self.may_plan(ref.namespace):
            queue.add_after(ref, UNKNOWN_SECONDS)
            return "requeue_after"
        if wait := self._execution.expectations.hold(ref, time.monotonic()):
            self._held.add(ref)
            queue.add_after(ref, wait)
            return "requeue_after"
        controller = self._controllers[ref.kind]
        now = clock.now()
        memory, keys = self._execution.memory, self._execution.keys.known
        reports, executors = self._execution.operations.known, self._execution.executors.known
        world = World(self._cache, self._config, now, memory, keys, self._errors.get(ref), reports, executors)
        try:
            seen = controller.observe(world, without_failures(obj))
            if controller.needs_spec(seen):
                spec = await self._execution.read_spec(ref, uid_of(obj))
                if spec is None:  # The object was deleted or replaced. The watch reports it soon.
                    return "success"
                seen = controller.observe(world, {**without_failures(obj), "spec": spec})
            plan = controller.plan(seen)
            done = await self._execution.carry_out(ref, obj, plan, now)
        except Throttled as throttled:
            queue.add_after(ref, throttled.seconds)
            return "requeue_after"
        except NotLeader:
            raise
        except Exception as error:  # noqa: BLE001 - the author of any manifest must find the error in its status
            failure = error if isinstance(error, ApiError) else self._operator_error(ref, error)
            with contextlib.suppress(ApiError):
                await self._execution.report_failure(ref, obj, failure, now)
            self._failed(ref, obj, [failure], queue)
            return "error"
        for event in plan.events:
            self._events.record(obj, ref.kind, event)
        deadlines = [seconds for seconds in (plan.requeue_seconds, done.wait) if seconds is not None]
        if deadlines:
            queue.add_after(ref, min(deadlines))
        if done.failures:
            self._failed(ref, obj, done.failures, queue)
            return "error"
        self._errors.pop(ref, None)
        queue.forgive(ref)
        if done.again:
            queue.add(ref)
        return "requeue_after" if deadlines else "success"

    def _operator_error(self, ref: Ref, error: Exception) -> ApiError:
        """Return the failure for an unexpected exception. Its traceback is logged once."""
        failure = ApiError(OPERATOR_ERROR, f"the operator failed: {error!r}; its log has the details")
        if self._errors.get(ref) != failure.message:
            log.error("%s: the reconciliation failed", ref, exc_info=error)
        return failure

    def _failed(self, ref: Ref, obj: Manifest, failures: Sequence[ApiError], queue: WorkQueue[Ref]) -> None:
        pause = queue.retry(ref, max(failure.retry_after for failure in failures))
        message = shortened("; ".join(dict.fromkeys(failure.message for failure in failures)))
        level = logging.WARNING if self._log_lines.try_take(time.monotonic()) else logging.DEBUG
        log.log(level, "%s: %s (again in %.1f s)", ref, message, pause)
        self._errors[ref] = message
        if ref.kind in PRIMARY and any(map(is_reportable, failures)):
            self._events.record(obj, ref.kind, Event("Warning", "ReconcileFailed", message))

    def _forget(self, ref: Ref, queue: WorkQueue[Ref]) -> None:
        queue.forgive(ref)
        self._held.discard(ref)
        self._errors.pop(ref, None)
        self._execution.forget(ref)


def _changed(old: Manifest, new: Manifest) -> bool:
    """Whether a cached field other than the resourceVersion differs."""
    if any(old.get(part) != new.get(part) for part in ("spec", "status")):
        return True
    before, after = old["metadata"], new["metadata"]
    return any(before.get(key) != after.get(key) for key in before.keys() | after.keys() if key != "resourceVersion")
