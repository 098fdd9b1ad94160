"""Asks executors of SandboxPools for their use, and those of Sandboxes that are parked when idle to become still if they
are idle. This happens outside the control loop; the last report of each is kept.

The executors are in untrusted pods: an answer is limited in size and time, and one that is not understood counts as none.
Reports are not persisted: an operator that has just started asks again.
"""

import asyncio
import json
import logging
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Annotated, Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from rollout_api.cluster import EXECUTOR_PORT, tag_of
from rollout_api.measured_memory import Measured
from rollout_api.nesting import estimated_values, read_json
from rollout_operator import clock
from rollout_operator.actions import AskExecutors, ExecutorRequest, Ref
from rollout_operator.tenant_limits import ByteBudget, pod_session, read_answer

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Time limit for all requests to one executor. A healthy one answers in milliseconds."""
MOST_ANSWER = 2**21
"""Most bytes of an answer. A list of 1,024 workspaces with as many prepared states takes about 1 MB."""
MOST_LISTED = 2**12
"""Most entries of that list: workspaces, those that joined them, and prepared states."""
MOST_LEFT_OVER = 64
"""Most jobs without a RolloutJob that a report keeps. The next report has the others."""
MOST_VALUES = 2**18
"""Most values of an answer, of which each takes memory of the operator."""
MOST_AT_ONCE = 16
"""Most executors of one namespace asked at once. Each namespace has its own limit, so that silent executors of one tenant do
not delay the requests of another.
"""
MOST_WAIT_SECONDS = 2.0
"""Longest wait of a request that destroys workspaces. Later their job may run again."""


@dataclass(frozen=True)
class ExecutorReport:
    """What an executor reported last."""

    at: datetime
    """Time of the last answer, or of the last attempt without one."""
    live: int = 0
    """Workspaces that hold a place."""
    rollouts: int = 0
    """Rollouts that have workspaces, also frozen ones alone."""
    uses: int = 0
    """Workspaces that have held a place since the start."""
    disk_bytes: int = 0
    idle_seconds: float = 0.0
    """Time without a request and a running command, if it has not become still; 0 for Sandboxes of pools."""
    is_still: bool = False
    """Whether it refuses every change, for a parking."""
    parking: int = 0
    """The parking about which it was asked; 0 for Sandboxes of pools."""
    draining: bool = False
    """Whether it refuses further workspaces."""
    measured: Measured = Measured()
    """Memory that its workspaces have used since its start."""
    left_over: frozenset[str] = frozenset()
    """Jobs that had workspaces there, but no RolloutJob when it was asked, as `job_tag`."""
    answered: bool = True
    """Whether the last request was answered."""


Number = Annotated[int, Field(ge=0, le=2**53)]


class _Bytes(BaseModel):
    used: Number = 0


class _Memory(BaseModel):
    measured: Measured = Measured()  # an earlier executor reports none


class _Health(BaseModel):
    """The fields of `GET /v1/health` that matter here."""

    model_config = ConfigDict(strict=True)

    live: Number
    rollouts: Number
    uses: Number
    draining: bool
    memory: Annotated[_Memory, Field(alias="memoryBytes")] = _Memory()
    disk: Annotated[_Bytes, Field(alias="diskBytes")]


class _NotIdle(BaseModel):
    idle_seconds: Annotated[float, Field(alias="idleSeconds", ge=0, le=2**53)]


class _Still(BaseModel):
    """The answer to `PUT /v1/still`, or its refusal."""

    still: bool = False
    error: _NotIdle | None = None


class _Listed(BaseModel):
    attempt: str


class _List(BaseModel):
    workspaces: Annotated[list[_Listed], Field(max_length=MOST_LISTED)]


class ExecutorContact:
    """Runs the requests, and keeps the last report of each executor by the uid of its Sandbox."""

    def __init__(self, budget: ByteBudget | None = None) -> None:
        self._budget = budget or ByteBudget()
        self.known: dict[str, ExecutorReport] = {}
        self.on_done: Callable[[Ref], None] = lambda ref: None
        """Called when the requests for a pool or Sandbox have ended."""
        self.exists: Callable[[Ref, str], bool] = lambda ref, uid: True
        """Whether the Sandbox of that uid exists. `forget` is called when it no longer does."""
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[Ref, asyncio.Task[None]] = {}
        self._at_once: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """By namespace, while requests are in progress."""

    def start(self, ref: Ref, ask: AskExecutors) -> None:
        """Begin the requests, unless earlier ones for the object are in progress: these end with a new plan."""
        if ref in self._tasks:
            return
        task = self._tasks[ref] = asyncio.create_task(self._run(ref, ask))
        task.add_done_callback(lambda _: self._tasks.pop(ref, None))

    def forget(self, sandbox_uid: str) -> None:
        self.known.pop(sandbox_uid, None)

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _run(self, ref: Ref, ask: AskExecutors) -> None:
        if self._session is None:
            self._session = pod_session()
        at_once = self._at_once.setdefault(ref.namespace, asyncio.Semaphore(MOST_AT_ONCE))
        await asyncio.gather(*(self._one(request, at_once) for request in ask.requests))
        self._tasks.pop(ref, None)
        self.on_done(ref)

    async def _one(self, request: ExecutorRequest, at_once: asyncio.Semaphore) -> None:
        asked = asyncio.get_running_loop().time()
        async with at_once:
            if asyncio.get_running_loop().time() - asked > MOST_WAIT_SECONDS:
                # A suspended job may have been resumed meanwhile.
                request = replace(request, forget=frozenset())
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    report = await self._ask(request)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                log.debug("%s does not answer: %r", request.name, error)
                before = self.known.get(request.uid, ExecutorReport(clock.now()))
                report = replace(before, at=clock.now(), answered=False)
                if request.still is not None:
                    report = replace(report, parking=request.still.parking)
            if self.exists(Ref("Sandbox", request.namespace, request.name), request.uid):
                self.known[request.uid] = report

    async def _ask(self, request: ExecutorRequest) -> ExecutorReport:
        if (still := request.still) is not None:
            body = {"still": still.is_still, "parking": still.parking}
            if still.idle_seconds:
                body["ifIdleSeconds"] = still.idle_seconds
            answer = _Still.model_validate(await self._call(request, "PUT", "/still", body, statuses=(200, 409)))
            if answer.error is not None:
                return ExecutorReport(clock.now(), idle_seconds=answer.error.idle_seconds, parking=still.parking)
            if answer.still != still.is_still:
                raise ValueError("PUT /still: the opposite of what was asked, and not in use")
            return ExecutorReport(clock.now(), is_still=answer.still, parking=still.parking)
        for prefix in sorted(request.forget):
            await self._call(request, "DELETE", f"/attempts?prefix={prefix}")
        if request.drain:
            await self._call(request, "PUT", "/drain", {})
        left_over = _left_over(await self._call(request, "GET", "/workspaces"), request.jobs)
        health = _Health.model_validate(await self._call(request, "GET", "/health"))
        return ExecutorReport(
            clock.now(),
            live=health.live,
            rollouts=health.rollouts,
            uses=health.uses,
            disk_bytes=health.disk.used,
            draining=health.draining,
            measured=health.memory.measured,
            left_over=left_over,
        )

    async def _call(
        self, request: ExecutorRequest, method: str, path: str, body: Any = None, statuses: Container[int] = (200,)
    ) -> Any:
        assert self._session is not None
        host = f"[{request.address}]" if ":" in request.address else request.address
        headers = {"Authorization": f"Bearer {request.token}"}
        content = None if body is None else json.dumps(body).encode()
        url = f"http://{host}:{EXECUTOR_PORT}/v1{path}"
        async with (
            self._budget.hold(request.namespace) as held,
            self._session.request(method, url, headers=headers, data=content, allow_redirects=False) as answer,
        ):
            data = await read_answer(answer, MOST_ANSWER, held)
            if answer.status not in statuses or data is None or estimated_values(data) > MOST_VALUES:
                raise ValueError(f"{method} {path}: status {answer.status}, or too large")
            return read_json(data)


def _left_over(listed: Any, jobs: frozenset[str]) -> frozenset[str]:
    """Return the jobs of listed workspaces, as `job_tag`, without `jobs`."""
    tags = {tag_of(workspace.attempt) for workspace in _List.model_validate(listed).workspaces}
    return frozenset(islice(tags - jobs - {""}, MOST_LEFT_OVER))
