"""Requests to executors of pools: what is read of their answers, and that hostile ones cost little."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rollout_api.measured_memory import Measured
from rollout_operator import executor_contact
from rollout_operator.actions import AskExecutors, ExecutorRequest, Ref, Still
from rollout_operator.executor_contact import MOST_LEFT_OVER, MOST_LISTED, ExecutorContact, ExecutorReport
from rollout_operator.tenant_limits import ByteBudget

REF = Ref("SandboxPool", "lab", "warm")
HEALTH = {
    "live": 2,
    "rollouts": 1,
    "uses": 7,
    "draining": False,
    "diskBytes": {"used": 30, "limit": None},
    "version": "1",
}
WORKSPACES = {
    "workspaces": [
        {"id": "0123abcd-0-1-0.agent", "attempt": "0123abcd-0-1-0.agent", "state": "Live"},
        {"id": "layers-77", "attempt": "layers-77", "state": "Frozen"},
    ]
}


class Executor:
    """An executor that answers as told, at an address of its own."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.health: Any = HEALTH
        self.workspaces: Any = WORKSPACES
        self.still: tuple[int, Any] = 200, {}
        self.asked_still: Any = None
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        self.calls.append(f"{request.method} {request.rel_url}")
        if request.path == "/v1/drain":
            assert await request.json() == {}
            self.health = {**HEALTH, "draining": True}
        if request.path == "/v1/still":
            self.asked_still = await request.json()
            return web.json_response(self.still[1], status=self.still[0])
        bodies = {"/v1/health": self.health, "/v1/workspaces": self.workspaces}
        body = bodies.get(request.path, {})
        if body == "silence":
            await asyncio.sleep(60)
        if body == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await response.write(b" " * 2**16)
            return response
        return web.Response(body=body) if isinstance(body, bytes) else web.json_response(body)


@pytest.fixture
async def executor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Executor]:
    one = Executor()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", one.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    one.port = runner.addresses[0][1]
    monkeypatch.setattr(executor_contact, "EXECUTOR_PORT", one.port)
    yield one
    await runner.cleanup()


async def asked(budget: ByteBudget | None = None, **changes: Any) -> ExecutorReport:
    contact, done = ExecutorContact(budget), asyncio.Event()
    contact.on_done = lambda ref: done.set()
    request = ExecutorRequest("lab", "warm-1", "uid-1", "127.0.0.1", "secret", **changes)
    contact.start(REF, AskExecutors((request,)))
    async with asyncio.timeout(20):
        await done.wait()
    await contact.close()
    return contact.known["uid-1"]


async def test_use_and_jobs_are_read(executor: Executor) -> None:
    report = await asked()
    assert (report.live, report.uses, report.disk_bytes, report.draining) == (2, 7, 30, False)
    assert report.left_over == {"0123abcd-"}
    assert report.answered
    assert report.measured == Measured(), "an earlier executor reports none"
    assert executor.calls == ["GET /v1/workspaces", "GET /v1/health"]


async def test_sandbox_without_a_pool_is_asked_to_become_still_if_it_is_idle(executor: Executor) -> None:
    still = Still(3, idle_seconds=900)
    executor.still = 409, {"error": {"code": "Conflict", "message": "in use", "idleSeconds": 12.5}}
    report = await asked(still=still)
    assert (report.idle_seconds, report.is_still, report.answered) == (12.5, False, True)
    executor.still = 200, {"still": True}
    assert (await asked(still=still)).is_still
    for wrong in ((409, {"error": {"code": "Conflict", "message": "parking 3 is over"}}), (200, {}), (500, {})):
        executor.still = wrong
        report = await asked(still=still)
        assert (report.is_still, report.answered) == (False, False)
    assert executor.calls == ["PUT /v1/still"] * 5
    assert executor.asked_still == {"still": True, "parking": 3, "ifIdleSeconds": 900}


async def test_executor_is_made_still_for_a_parking_and_used_again(executor: Executor) -> None:
    for is_still in (True, False):
        executor.still = 200, {"still": is_still}
        report = await asked(still=Still(3, is_still=is_still))
        assert (report.is_still, report.answered) == (is_still, True)
        assert executor.asked_still == {"still": is_still, "parking": 3}
        executor.still = 200, {"still": not is_still}
        assert not (await asked(still=Still(3, is_still=is_still))).answered


async def test_measured_memory_is_read(executor: Executor) -> None:
    measured = {"seconds": 10.5, "byteSeconds": 3, "squareSeconds": 1e20}
    executor.health = {**HEALTH, "memoryBytes": {"used": 1, "limit": None, "measured": measured}}
    assert (await asked()).measured == Measured(seconds=10.5, byte_seconds=3, square_seconds=1e20)


async def test_what_is_left_over_ends_before_the_executor_is_counted(executor: Executor) -> None:
    report = await asked(drain=True, forget=frozenset({"0123abcd-"}))
    assert report.draining
    assert executor.calls[:2] == ["DELETE /v1/attempts?prefix=0123abcd-", "PUT /v1/drain"]


@pytest.mark.parametrize(
    "health",
    [
        [],
        {},
        b"\xff",
        b"[" * 100_000,
        {**HEALTH, "live": -1},
        {**HEALTH, "live": "2"},
        {**HEALTH, "uses": 2**60},
        {**HEALTH, "draining": "yes"},
        {**HEALTH, "diskBytes": None},
        {**HEALTH, "memoryBytes": {"measured": {"seconds": -1}}},
        {**HEALTH, "memoryBytes": {"measured": {"seconds": "Infinity"}}},
        json.dumps({**HEALTH, "memoryBytes": {"measured": {"seconds": float("inf")}}}).encode(),
        b'{"live": ' + b"9" * 100_000 + b"}",
        json.dumps({"live": [0] * 300_000}).encode(),
        "endless",
        {**HEALTH, "more": "x" * 2**21},
    ],
)
async def test_an_answer_that_is_not_understood_counts_as_none(executor: Executor, health: Any) -> None:
    executor.health = health
    assert not (await asked()).answered


async def test_a_list_of_more_workspaces_than_can_exist_is_not_kept(executor: Executor) -> None:
    executor.workspaces = {"workspaces": [{"attempt": f"{number:08x}-"} for number in range(MOST_LISTED + 1)]}
    report = await asked()
    assert not report.answered
    assert not report.left_over


async def test_a_report_keeps_a_few_jobs_that_are_left_over(executor: Executor) -> None:
    tags = [f"{number:08x}-" for number in range(1000)]
    executor.workspaces = {"workspaces": [{"attempt": f"{tag}0-1-0.agent"} for tag in tags]}
    assert len((await asked()).left_over) == MOST_LEFT_OVER
    assert (await asked(jobs=frozenset(tags[1:]))).left_over == {tags[0]}


async def test_large_lists_are_read_within_the_memory_of_all_tenants(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ByteBudget(total=1_300_000)
    executor.workspaces = {"workspaces": [{"attempt": "0123abcd-", "more": "x" * 200_000}]}
    async with budget.hold("another") as held:
        await held.grow(433_000)
        with monkeypatch.context() as short:
            short.setattr(executor_contact, "ANSWER_SECONDS", 0.3)
            assert not (await asked(budget)).answered, "the answer waits for room"
    assert (await asked(budget)).answered
    assert budget.has_room("lab", 433_000), "nothing is held any more"


async def test_report_of_a_sandbox_that_was_deleted_during_the_request_is_not_kept(executor: Executor) -> None:
    contact, done = ExecutorContact(), asyncio.Event()
    contact.on_done = lambda ref: done.set()
    contact.exists = lambda ref, uid: (ref.kind, ref.namespace, ref.name, uid) != ("Sandbox", "lab", "warm-1", "uid-1")
    requests = [
        ExecutorRequest("lab", name, uid, "127.0.0.1", "secret")
        for name, uid in (("warm-1", "uid-1"), ("warm-1", "uid-2"))
    ]
    contact.start(REF, AskExecutors(tuple(requests)))
    await done.wait()
    await contact.close()
    assert list(contact.known) == ["uid-2"]


async def test_a_silent_executor_is_given_up(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_contact, "ANSWER_SECONDS", 0.2)
    executor.workspaces = "silence"
    assert not (await asked()).answered


async def test_without_an_executor_the_request_ends() -> None:
    assert not (await asked()).answered


async def test_a_request_that_waited_long_destroys_nothing(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended job may run again by then."""
    monkeypatch.setattr(executor_contact, "MOST_WAIT_SECONDS", 0.0)
    report = await asked(forget=frozenset({"0123abcd-"}))
    assert report.answered
    assert executor.calls == ["GET /v1/workspaces", "GET /v1/health"]


async def test_silent_executors_of_another_namespace_delay_no_request(executor: Executor) -> None:
    contact, done = ExecutorContact(), asyncio.Event()
    contact.on_done = lambda ref: done.set() if ref == REF else None

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(stay_silent, "127.0.0.2", executor.port):
        for number in range(8):
            silent = (
                ExecutorRequest("hostile", f"{number}-{one}", f"{number}-{one}", "127.0.0.2", "other")
                for one in range(40)
            )
            contact.start(Ref("SandboxPool", "hostile", f"pool-{number}"), AskExecutors(tuple(silent)))
        await asyncio.sleep(0.1)
        request = ExecutorRequest("lab", "warm-1", "uid-1", "127.0.0.1", "secret", forget=frozenset({"0123abcd-"}))
        contact.start(REF, AskExecutors((request,)))
        async with asyncio.timeout(2):
            await done.wait()
        await contact.close()
    assert contact.known["uid-1"].answered
    assert executor.calls[0] == "DELETE /v1/attempts?prefix=0123abcd-"
