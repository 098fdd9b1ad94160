"""The sandboxes of one runner: opened on demand, watched, deleted. `packing` decides; this module executes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent_runtime.extensions import described
from agent_runtime.kube.api import ApiError, KubeApi, is_denied_role
from agent_runtime.sandboxes.base import ACCESS_DENIED, NETWORK_LOST, Evidence, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.cluster.held_sandbox import HeldSandbox, ReasonOfEnd, unexplained
from agent_runtime.sandboxes.cluster.kinds import Kind, MemoryRecords, Waiter, pool_key
from agent_runtime.sandboxes.cluster.lack_of_room import UseOfRoom, is_lack_of_room, seconds_left
from agent_runtime.sandboxes.cluster.packing import Bounds, Request, plan_packing
from agent_runtime.sandboxes.cluster.pool_visits import PoolVisits
from agent_runtime.sandboxes.cluster.pools import Pool, Pools, order
from agent_runtime.sandboxes.cluster.sandbox_object import (
    Reason,
    SandboxView,
    deleted,
    found_spec,
    kind_of,
    new_name,
    sandbox_object,
    sandbox_spec,
    sandbox_view,
    selector,
)
from agent_runtime.sandboxes.cluster.watch import SandboxWatch
from agent_runtime.sandboxes.executor_client.sandbox import no_place
from agent_runtime.sandboxes.prepare import prepared_id
from agent_runtime.shared_tasks import repeat
from rollout_api.measured_memory import KEPT_SECONDS, set_request
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import SandboxSpec, Security, WorkspaceMode

# How long to keep an empty sandbox for the next group, which usually starts within a few model calls.
KEEP_EMPTY_SECONDS = 30.0
# The operator ends a start that takes too long, and gives the reason. Wait for it before giving up.
OPERATOR_GRACE_SECONDS = 5.0
# After this many starts were lost to evictions and similar causes, the caller gets an error.
START_LOSSES = 3
# The operator learns of a pod's end within a second or two; a restarting API server reports it up to a minute later.
REASON_SECONDS, REASON_OUTAGE_SECONDS, REASON_POLL_SECONDS = 10.0, 80.0, 0.25
# Kubernetes reports a node's failure after 50 s (node-monitor-grace-period), and the operator 30 s later. Without the
# report, the failure would be attributed to the running tool call.
NODE_REASON_SECONDS = 120.0
# Reasons of sandbox ends that a network outage can cause.
CAUSED_BY_NETWORK = frozenset({"SandboxLost", "Idle"})
# Interval of checks for empty sandboxes, and for places in use by unknown workspaces.
TICK_SECONDS = 1.0
CLOSE_SECONDS = 20.0
# Later runs start from what is measured then; they can do without it.
LAST_MEASURE_SECONDS = 5.0

log = logging.getLogger(__name__)


class Fleet:
    """Sandboxes by name. `on_started` gets the duration of each start, from the request to a ready executor."""

    def __init__(
        self,
        job: RolloutJob,
        runner: int,
        key: str,
        api: KubeApi,
        on_started: Callable[[float], None],
        tenant: str,
        pools_folder: Path,
        memory: MemoryRecords | None = None,
    ) -> None:
        if job.metadata.uid is None:
            raise ValueError("metadata.uid of the job is missing; expected a RolloutJob read from the API server")
        self._job, self._runner, self._key, self._api = job, runner, key, api
        self._on_started, self._tenant, self._memory = on_started, tenant, memory
        self._pools = Pools(job, api, self._changed, pools_folder)
        self._visits = PoolVisits(self._pools, partial(self._held_sandbox, kind="", reason_of_end=unexplained))
        self._watch = SandboxWatch(api, selector(job.metadata.uid, runner), self._changed)
        self._kinds: dict[str, Kind] = {}
        self.held: dict[str, HeldSandbox] = {}
        """All that are starting or ready."""
        self._gone: dict[str, Reason] = {}
        self._asked: dict[str, set[str]] = {}
        """Attempts that requested a place, by prepared state."""
        self._prepared: dict[str, set[str]] = {}
        """Prepared states by group."""
        self._told: set[str] = set()
        """Problems of starts that were logged already; each is logged once for all sandboxes."""
        self._use_of_room = UseOfRoom(api)
        self._noting: asyncio.Task[None] | None = None
        self._number = 0
        self._is_open = False
        self._work: set[asyncio.Task[None]] = set()
        self._going: set[asyncio.Task[None]] = set()
        """Sandboxes that are being closed and deleted."""

    @property
    def waits_for(self) -> str:
        """Return why requested sandboxes do not start; empty if no problem is known."""
        views = [held.view for held in self.held.values() if held.sandbox is None and held.view is not None]
        problems = [view.problem for view in views if view.problem is not None]
        if not problems:
            full = [kind.pool.full for kind in self._kinds.values() if kind.pool is not None and kind.waiting]
            return full[0] if full else ""
        waiting = "1 sandbox does not start" if len(problems) == 1 else f"{len(problems)} sandboxes do not start"
        return f"{waiting}: {problems[0].word}: {problems[0].message}"

    async def open(self) -> None:
        """Find the Sandboxes that an earlier process left. Raises ApiError if the API server does not respond."""
        await self._watch.start()
        await self._pools.open()
        self._is_open = True
        for view in list(self._watch.views.values()):
            if view.ending is None:
                self._adopt(view)
            else:
                self._gone[view.name] = view.ending
        found = [held.connected() for held in self.held.values() if held.connection is not None]
        await asyncio.gather(*found, return_exceptions=True)
        self._spawn(repeat(self._tick, TICK_SECONDS))

    async def close(self, *, keep: bool) -> None:
        """Release all of them; without `keep` they are deleted."""
        self._is_open = False
        await self._watch.stop()
        await self._pools.close()
        for kind in self._kinds.values():
            for waiter in kind.waiting:
                waiter.placed.set_exception(SandboxFailure("ProviderUnavailable", "the cluster provider was closed"))
            kind.waiting.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_MEASURE_SECONDS):
                await asyncio.gather(*map(self._measure_for_later_runs, self._kinds.values()))
        for held in self.held.values():
            self._release(held, delete=not keep)
        self.held.clear()
        if self._going:
            await asyncio.wait(self._going, timeout=CLOSE_SECONDS)
        ending = self._work | self._going
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def place(self, spec: WorkspaceSpec, *, attempt: str, identity: str) -> HeldSandbox:
        """Reserve a place for that workspace and return its sandbox. Raises SandboxFailure."""
        prepared = prepared_id(spec)
        for held in self.held.values():
            if held.has(identity):
                held.take(identity, prepared)
                await held.connected()
                return held
        self._prepared.setdefault(spec.group, set()).add(prepared)
        wanted = sandbox_spec(self._job, spec)
        kind = self._kind(wanted, is_alone=spec.alone)
        if not spec.is_single:
            self._asked.setdefault(prepared, set()).add(attempt)
            kind.groups.add(spec.group)
        self._number += 1
        placed: asyncio.Future[HeldSandbox] = asyncio.get_running_loop().create_future()
        waiter = Waiter(self._number, identity, prepared, wanted, kind.key, placed)
        kind.waiting.append(waiter)
        self._plan(kind)
        try:
            started, left = time.monotonic(), spec.start_seconds + OPERATOR_GRACE_SECONDS
            while left > 0:
                await asyncio.wait({waiter.placed}, timeout=left)
                if waiter.placed.done():
                    return waiter.placed.result()
                kind = self._kinds[waiter.kind]
                patience, waited = spec.start_seconds + OPERATOR_GRACE_SECONDS, time.monotonic() - started
                left = seconds_left(patience, waited=waited, unused=kind.unused)
            self._stop_waiting(waiter)
            raise self._timeout_failure(kind, identity, spec.start_seconds)
        except asyncio.CancelledError:
            self._stop_waiting(waiter)
            raise

    def leave(self, held: HeldSandbox, identity: str) -> None:
        """Free the place of a workspace that was destroyed or never created. A `Plain` sandbox is used up."""
        if held.has(identity):
            held.leave(identity)
            if not held.is_reusable:
                self._give_back(held)
            self._plan(self._kinds[held.kind])

    async def find(self, name: str, uid: str) -> HeldSandbox:
        """Return the sandbox of an earlier process. Raises SandboxFailure with the reason of its end if it no longer
        exists.
        """
        held = self.held.get(name)
        if held is None and (found := self._pools.view(name)) is not None:
            pool, view = found
            held = self._use(self._pool_kind(pool, found_spec(view.spec) or pool.spec), view)
        if held is None or held.uid != uid:
            gone = self._gone.get(name) or deleted(name)
            raise SandboxFailure(gone.word, gone.message)
        await held.connected()
        return held

    async def forget_group(self, group: str) -> None:
        for prepared in self._prepared.pop(group, set()):
            self._asked.pop(prepared, None)
            for held in self.held.values():
                held.groups.discard(prepared)
        ready = [held.sandbox for held in self.held.values() if held.sandbox is not None]
        await asyncio.gather(*(sandbox.forget_group(group) for sandbox in ready), return_exceptions=True)

    async def recount(self, held: HeldSandbox) -> None:
        """Query an executor which places are used by workspaces unknown here.

        A `Plain` sandbox that was used and is empty now is given back.
        """
        with contextlib.suppress(SandboxFailure):
            await held.recount()
        if held.is_used_up:
            self._give_back(held)
        self._plan(self._kinds[held.kind])

    def _stop_waiting(self, waiter: Waiter) -> None:
        """Remove a waiter; a place that it got at the same moment is freed."""
        kind = self._kinds[waiter.kind]
        if waiter in kind.waiting:
            kind.waiting.remove(waiter)
            waiter.placed.cancel()
        elif waiter.placed.exception() is None:
            self.leave(waiter.placed.result(), waiter.identity)

    # The following methods decide without waiting.

    def _lacks_room(self, kind: Kind) -> bool:
        """Whether its requests wait for room: for a place in its pool, or for another sandbox that does not fit now."""
        problems: Iterable[Reason | None]
        if kind.pool is not None:
            if any(not self._visits.is_lost(view) for view in kind.pool.usable):
                return True
            problems = kind.pool.problems
        else:
            starting = [one for one in self.held.values() if one.kind == kind.key and one.sandbox is None]
            problems = (one.view.problem for one in starting if one.view is not None)
        return any(problem is not None and is_lack_of_room(problem.message) for problem in problems)

    def wanted(self) -> dict[str, int]:
        """Return the places that this runner wants in each pool, used ones included."""
        counts: Counter[str] = Counter()
        for kind in self._kinds.values():
            if kind.pool is not None:
                counts[kind.pool.name] += len(kind.waiting)
        for held in self.held.values():
            if held.pool is not None:
                counts[held.pool] += len(held.taken)
        return +counts

    def _plan(self, kind: Kind) -> None:
        if not self._is_open:
            return
        held = [one for one in self.held.values() if one.kind == kind.key]
        for waiter in list(kind.waiting):
            # An earlier process may have made its workspace and not recorded it; it uses a place already.
            if (left := next((one for one in held if waiter.identity in one.foreign), None)) is not None:
                self._give_place(kind, waiter, left)
        rooms = [one.room(kind.places, self._to_come) for one in held]
        requests = [Request(w.number, w.group, self._to_come(w.group)) for w in kind.waiting]
        plan = plan_packing(requests, rooms, self._bounds(kind))
        for waiter in [one for one in kind.waiting if one.number in plan.placed]:
            self._give_place(kind, waiter, self.held[plan.placed[waiter.number]])
        if kind.pool is not None:
            if not kind.is_outdated:
                self._use_more(kind, kind.pool, plan.opened)
        else:
            for _ in range(plan.opened):
                self._open(kind)
        for name in plan.given_back:
            self._spawn(self._give_back_if_empty(self.held[name]))

    def _give_place(self, kind: Kind, waiter: Waiter, held: HeldSandbox) -> None:
        kind.waiting.remove(waiter)
        held.take(waiter.identity, waiter.group)
        waiter.placed.set_result(held)

    def _bounds(self, kind: Kind) -> Bounds:
        busy = sum(len(one.taken) for one in self.held.values()) + sum(len(k.waiting) for k in self._kinds.values())
        # The trainer of a stream job may submit further groups at any time.
        stays_open = self._job.spec.tasks.stream is not None
        keep_seconds = self._job.spec.sandbox.idle_seconds if stays_open else KEEP_EMPTY_SECONDS
        return Bounds(
            places=kind.places,
            may_come=self._job.spec.runners.concurrency - busy,
            keep_seconds=0.0 if kind.is_alone else keep_seconds,
            is_reusable=kind.is_reusable,
            opens_ahead=not kind.is_alone,
            is_shared=len(kind.groups) > 1,
        )

    def _to_come(self, group: str) -> int:
        asked = self._asked.get(group)
        return 0 if asked is None else max(0, self._job.spec.group_size - len(asked))

    def _kind(self, spec: SandboxSpec, *, is_alone: bool = False) -> Kind:
        if not is_alone and (pool := self._pools.fitting(spec)) is not None:
            return self._pool_kind(pool, pool.spec)
        return self._own_kind(spec, is_alone=is_alone)

    def _own_kind(self, spec: SandboxSpec, *, is_alone: bool = False) -> Kind:
        """Return the kind of sandboxes that this job creates itself, also where a pool fits by now."""
        is_plain = spec.workspaces.mode is WorkspaceMode.PLAIN
        key = f"{kind_of(spec)}{'-alone' if is_alone else ''}"
        places = spec.workspaces.per_sandbox or 1
        fresh = Kind(key, spec, places, is_reusable=not (is_plain or is_alone), is_alone=is_alone)
        return self._kinds.setdefault(key, fresh)

    def _pool_kind(self, pool: Pool, spec: SandboxSpec) -> Kind:
        """Return the kind of a pool's sandboxes with that spec, which need not be the pool's present one."""
        key = pool_key(pool, spec)
        return self._kinds.setdefault(
            key, Kind(key, spec, spec.workspaces.per_sandbox or 1, is_reusable=True, pool=pool)
        )

    def _move_waiting(self, kind: Kind) -> None:
        """Place those anew who wait for sandboxes of a pool that was deleted or has another spec now. Its sandboxes may have
        another image than they need.
        """
        waiting, kind.waiting = kind.waiting, []
        for waiter in waiting:
            try:
                other = self._kind(waiter.spec)
            except SandboxFailure as failure:
                waiter.placed.set_exception(failure)
                continue
            waiter.kind = other.key
            other.groups |= kind.groups
            other.waiting.append(waiter)

    def _use_more(self, kind: Kind, pool: Pool, count: int) -> None:
        """Connect to so many further sandboxes of a pool, if it has them."""
        views = {
            view.name: view for view in pool.usable if view.name not in self.held and not self._visits.is_lost(view)
        }
        for name in order(views, self._tenant)[:count]:
            self._use(kind, views[name])

    def _use(self, kind: Kind, view: SandboxView) -> HeldSandbox:
        assert kind.pool is not None
        held = self._add_sandbox(view.name, kind.key, kind.pool)
        self._changed(view.name, view)
        return held

    def _open(self, kind: Kind) -> None:
        held = self._add_sandbox(new_name(self._job.metadata.name, self._runner), kind.key)
        held.is_single_use = kind.is_alone
        body = sandbox_object(self._job, self._runner, held.name, kind.spec)
        held.creation = self._spawn(self._create(held, kind, body), held)

    async def _create(self, held: HeldSandbox, kind: Kind, body: dict[str, Any]) -> None:
        try:
            set_request(body, await self._measured_request(kind))
            created = await self._api.create_sandbox(body, patience_seconds=kind.spec.start_seconds)
        except ApiError as error:
            word, words = error.reason, f"Sandbox {held.name} could not be created: {error.message}"
            if is_denied_role(error):
                word = ACCESS_DENIED
                words += "; check that the runner's ServiceAccount, Role and RoleBinding exist"
            if is_lack_of_room(words):
                await self._note_use_of_room([kind])
            self._handle_end(held, Reason(word, words))
            return
        self._changed(held.name, sandbox_view(created))

    async def _measured_request(self, kind: Kind) -> int | None:
        """Return the bytes of memory to request for each workspace, if these follow measured use and enough is known."""
        if kind.spec.resources.measured_limit is None:
            return None
        if kind.measuring is None or kind.measuring.done():
            kind.measuring = self._spawn(self._measure(kind))
        await asyncio.wait({kind.measuring})
        return kind.measured_request

    async def _measure(self, kind: Kind, *only: HeldSandbox) -> None:
        """Ask the ready sandboxes of a kind, or only these, for what their workspaces have used of memory."""
        limit = kind.spec.resources.measured_limit
        if limit is None or kind.pool is not None:
            return
        if kind.earlier is None and self._memory is not None:
            kind.earlier = (await self._memory.read(kind.key)).believed(limit, KEPT_SECONDS)
        asked = only or [one for one in self.held.values() if one.kind == kind.key and one.sandbox is not None]
        for held, found in zip(asked, await asyncio.gather(*(one.measured() for one in asked)), strict=True):
            if found is not None:
                kind.measured[held.name] = found.believed(limit, kind.age_of(held) * held.places)

    async def _measure_for_later_runs(self, kind: Kind, *only: HeldSandbox) -> None:
        """Measure, and store what later runs are to know. No sandbox waits for this."""
        await self._measure(kind, *only)
        if self._memory is not None and kind.measured:
            await self._memory.write(kind.key, kind.measured_in_all)

    def _adopt(self, view: SandboxView) -> None:
        """Adopt a Sandbox of an earlier process: its workspaces may be reattached, its free places used."""
        spec = found_spec(view.spec)
        if spec is None:
            return
        held = self._add_sandbox(view.name, self._own_kind(spec).key)
        held.is_adopted = True
        self._changed(view.name, view)

    def _add_sandbox(self, name: str, kind: str, pool: Pool | None = None) -> HeldSandbox:
        held = self.held[name] = self._held_sandbox(name, pool, kind=kind, reason_of_end=self._reason_of_end)
        return held

    def _held_sandbox(self, name: str, pool: Pool | None, *, kind: str, reason_of_end: ReasonOfEnd) -> HeldSandbox:
        return HeldSandbox(
            name,
            kind,
            self._api,
            self._key if pool is None else pool.key,
            self._job.spec.sandbox.idle_seconds,
            reason_of_end,
            tenant=self._tenant,
            pool=None if pool is None else pool.name,
        )

    def _changed(self, name: str, view: SandboxView | None) -> None:
        held = self.held.get(name)
        if held is None:
            # A sandbox of a pool may be ready now.
            for kind in [one for one in self._kinds.values() if one.pool is not None and one.waiting]:
                self._plan(kind)
            return
        if view is None:
            # It was created after the list was read.
            if held.uid is not None:
                self._handle_end(held, deleted(name))
            return
        is_starting = held.sandbox is None and view.ending is None
        if is_starting and view.problem is not None and view.problem.word not in self._told:
            self._told.add(view.problem.word)
            log.warning("sandbox %s does not start: %s: %s", name, view.problem.word, view.problem.message)
        held.uid, held.view = view.uid, view
        if held.creation is not None and held.creation is not asyncio.current_task():
            # The Sandbox may exist although the reply was lost. A full quota would then refuse all retries.
            held.creation.cancel()
        if view.ending is not None:
            self._handle_end(held, Reason(view.ending.word, f"Sandbox {name}: {view.ending.message}"))
        elif held.sandbox is None and view.pod_ip != held.pod_ip:
            # The first pod, or its replacement after the trial of Overlay failed.
            held.forget_pod()
            if view.can_be_reached:
                held.pod_ip = view.pod_ip
                held.connection = self._spawn(self._connect(held, view), held)

    async def _connect(self, held: HeldSandbox, view: SandboxView) -> None:
        try:
            await held.connect(view)
        except SandboxFailure as failure:
            is_isolated = await self._is_isolated(held)
            if held.connection is asyncio.current_task():  # Otherwise another pod has just replaced this one.
                reason = Reason(failure.reason, f"Sandbox {held.name}: {failure.message}")
                self._handle_end(held, reason, delete=not is_isolated)
            return
        kind = self._kinds[held.kind]
        if kind.is_reusable and not held.is_reusable:
            log.warning("sandbox %s is Plain, one workspace each: %s", held.name, view.overlay and view.overlay.message)
        kind.places, kind.is_reusable = held.places, held.is_reusable
        if not held.is_adopted and held.pool is None:
            self._on_started(held.seconds())
        elif held.is_used_up:
            self._give_back(held)
        self._plan(kind)

    def _handle_end(self, held: HeldSandbox, reason: Reason, *, delete: bool = True) -> None:
        """Handle the end of a sandbox: its workspaces, and the requests that waited for its start."""
        if self.held.get(held.name) is not held:
            return
        if reason.word in CAUSED_BY_NETWORK and self._is_cut_off(held):
            reason = Reason(NETWORK_LOST, f"the network to the sandbox is down: {reason.message}")
        del self.held[held.name]
        self._gone[held.name] = reason
        if held.pool is not None and held.view is not None and held.view.ending is None:
            self._visits.lose(held.view, held.taken)
            self._spawn(self._visits.regain(held.view))
        log.info("sandbox %s is lost: %s: %s", held.name, reason.word, reason.message)
        kind = self._kinds[held.kind]
        waits = is_lack_of_room(reason.message) and (
            seconds_left(kind.spec.start_seconds, waited=math.inf, unused=kind.unused) > 0
        )
        if held.sandbox is None and not waits:
            failure = SandboxFailure(reason.word, reason.message)
            for waiter in kind.waiting[: kind.places]:
                waiter.lost_starts += 1
                if failure.evidence is not Evidence.OUTSIDE or waiter.lost_starts >= START_LOSSES:
                    kind.waiting.remove(waiter)
                    waiter.placed.set_exception(SandboxFailure(reason.word, reason.message))
        held.end(reason)
        self._release(held, delete=delete)
        self._plan(kind)

    async def sweep_pools(self, unwanted: Callable[[str, str], bool]) -> None:
        """Destroy unwanted workspaces of an earlier process in the sandboxes of pools that are not held here. Those with
        others of its workspaces are held from then on, so that attempts find them again.
        """
        swept = await self._visits.sweep(unwanted, but=self.held)
        found = [
            self._use(self._pool_kind(pool, found_spec(view.spec) or pool.spec), view)
            for pool, view, left in swept
            if view.name not in self.held and any(name.startswith(self._tenant) for name in left)
        ]
        await asyncio.gather(*(held.connected() for held in found), return_exceptions=True)

    async def _give_back_if_empty(self, held: HeldSandbox) -> None:
        # Recount first: a runner that was frozen and replaced must not delete its successor's sandbox.
        with contextlib.suppress(SandboxFailure):
            await held.recount()
        await self._measure_for_later_runs(self._kinds[held.kind], held)
        if not held.taken and (not held.foreign or held.pool is not None):
            self._give_back(held)

    def _give_back(self, held: HeldSandbox) -> None:
        if self.held.get(held.name) is held:
            del self.held[held.name]
            held.end(Reason("SandboxLost", f"Sandbox {held.name} was deleted because it was empty"))
            self._release(held, delete=True)

    def _release(self, held: HeldSandbox, *, delete: bool) -> None:
        task = asyncio.create_task(held.close(delete=delete))
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    async def _reason_of_end(self, held: HeldSandbox, failure: SandboxFailure) -> SandboxFailure | None:
        """Return why the Sandbox of a broken connection has ended. None if it has not ended and responds again."""
        if not await held.answers():
            if held.inquiry is None:
                held.inquiry = self._spawn(self._inquire(held, failure), held)
            await asyncio.wait({held.inquiry})
        return None if held.ended is None else SandboxFailure(held.ended.word, held.ended.message)

    async def _inquire(self, held: HeldSandbox, failure: SandboxFailure) -> None:
        await self._wait_for_end(held, REASON_SECONDS)
        # Check this only now: a failing node may refuse connections before it drops packets.
        if held.ended is None and await held.is_cut_off():
            await self._wait_for_end(held, NODE_REASON_SECONDS - REASON_SECONDS)
        is_isolated = await self._is_isolated(held)
        if not await held.answers():  # If it answers, the network was down.
            reason = Reason(failure.reason, f"Sandbox {held.name}: {failure.message}")
            self._handle_end(held, reason, delete=not is_isolated)
        held.inquiry = None

    async def _is_isolated(self, held: HeldSandbox) -> bool:
        """Read a Sandbox that does not answer, because a watch with a dead connection reports nothing. Return whether the
        API server does not answer either: then another pod may run this shard, and use the sandbox.
        """
        try:
            found = await self._api.get_sandbox(held.name, patience_seconds=REASON_SECONDS)
        except ApiError as error:
            return error.status == 0
        self._changed(held.name, sandbox_view(found))
        return False

    def _is_cut_off(self, held: HeldSandbox) -> bool:
        """Whether the network is the cause. Never for sandboxes with their own kernel (gVisor, Kata) or extra rights,
        where the probe is not reliable.
        """
        spec = self._job.spec
        is_nodes_kernel = spec.sandbox.runtime_class_name is None and spec.security is Security.STANDARD
        return is_nodes_kernel and held.probe is not None and held.probe.is_cut_off

    async def _wait_for_end(self, held: HeldSandbox, patience: float) -> None:
        """Wait until the watch reports the end, or for a time limit, extended within bounds by an outage of the API
        server.
        """
        waited = listened = 0.0
        while held.ended is None and listened < patience and waited < patience + REASON_OUTAGE_SECONDS:
            await asyncio.sleep(REASON_POLL_SECONDS)
            waited += REASON_POLL_SECONDS
            listened += REASON_POLL_SECONDS if self._watch.is_current else 0.0

    def _timeout_failure(self, kind: Kind, identity: str, seconds: float) -> SandboxFailure:
        """Return the failure of a request that timed out, and give up starts that are as old."""
        starting = [one for one in self.held.values() if one.kind == kind.key and one.sandbox is None]
        if not starting:
            return no_place(identity, seconds)
        failure = starting[0].why_not_ready(seconds)
        for one in starting:
            if one.seconds() >= seconds:
                self._give_back(one)
        return failure

    async def _tick(self) -> None:
        for held in list(self.held.values()):
            if held.foreign and self._kinds[held.kind].waiting:
                await self.recount(held)
        for kind in [one for one in self._kinds.values() if one.is_outdated]:
            self._move_waiting(kind)
        for kind in self._kinds.values():
            self._plan(kind)
        lacking = [kind for kind in self._kinds.values() if kind.waiting and self._lacks_room(kind)]
        if lacking and (self._noting is None or self._noting.done()):
            self._noting = self._spawn(self._note_use_of_room(lacking))

    async def _note_use_of_room(self, lacking: Sequence[Kind]) -> None:
        """Record for these kinds, whose requests lack room, that other sandboxes use it, if they do."""
        if any(one.sandbox is not None for one in self.held.values()) or await self._use_of_room.read():
            for kind in lacking:
                kind.room_used_at = time.monotonic()

    def _spawn(self, work: Coroutine[Any, Any, None], held: HeldSandbox | None = None) -> asyncio.Task[None]:
        """Start background work. If it raises, `held` ends, so that nothing waits forever for that sandbox."""
        task = asyncio.create_task(self._contained(work, held))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _contained(self, work: Coroutine[Any, Any, None], held: HeldSandbox | None) -> None:
        try:
            await work
        except Exception as error:
            log.exception("an internal error in the background work of this runner's sandboxes")
            if held is not None:
                self._handle_end(held, Reason("InternalError", f"Sandbox {held.name}: {described(error)}"))
