"""Failures of the API server that nothing that runs notices."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from agent_runtime.kube import api as kube_api
from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.cluster.held_sandbox import HeldSandbox
from tests.integration.cluster_provider.conftest import Opened, acquire, rollout_job, say, until
from tests.integration.cluster_provider.stand_in_api import StandInApi, refuse
from tests.integration.cluster_provider.stand_in_operator import StandInOperator

Trouble = Callable[[web.Request], Awaitable[web.Response | None]]


def lost_reply(api: StandInApi) -> Trouble:
    """Store the object, and break the connection before the reply."""

    async def trouble(request: web.Request) -> None:
        api.create(await request.json())
        assert request.transport is not None
        request.transport.abort()

    return trouble


def late_504(api: StandInApi) -> Trouble:
    """Store the object, and answer 504 like a proxy that gives up."""

    async def trouble(request: web.Request) -> web.Response:
        api.create(await request.json())
        return refuse(504, "Timeout", "request did not complete within the allotted timeout")

    return trouble


def throttled(api: StandInApi) -> Trouble:
    async def trouble(request: web.Request) -> web.Response:
        return refuse(429, "TooManyRequests", "too many requests", {"Retry-After": "1"})

    return trouble


def starting_up(api: StandInApi) -> Trouble:
    """An API server that has not read its roles yet."""

    async def trouble(request: web.Request) -> web.Response:
        words = (
            'sandboxes.rollout.dev is forbidden: User "r" cannot create resource "sandboxes" in API group "rollout.dev"'
        )
        return refuse(403, "Forbidden", words)

    return trouble


def full_quota(api: StandInApi) -> Trouble:
    async def trouble(request: web.Request) -> web.Response:
        return refuse(
            403, "Forbidden", 'sandboxes.rollout.dev "s" is forbidden: exceeded quota: count/sandboxes.rollout.dev'
        )

    return trouble


def counted_at_once(api: StandInApi) -> Trouble:
    """Two API servers update the count of one ResourceQuota."""

    async def trouble(request: web.Request) -> web.Response:
        return refuse(
            409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
        )

    return trouble


@pytest.mark.parametrize("trouble", [lost_reply, late_504, throttled, starting_up, full_quota, counted_at_once])
async def test_a_create_whose_request_or_reply_fails_makes_one_sandbox(
    opened: Opened, operator: StandInOperator, trouble: Callable[[StandInApi], Trouble]
) -> None:
    provider = await opened()
    operator.api.trouble = [trouble(operator.api)]
    workspace = await acquire(provider)
    assert await say(workspace, "echo here") == "here"
    assert operator.api.writes == [("create", workspace.handle["sandbox"])]
    assert not operator.api.trouble


async def test_sandbox_stays_when_the_reply_of_its_create_is_lost_and_the_quota_is_full(
    opened: Opened, operator: StandInOperator
) -> None:
    async def full(request: web.Request) -> web.Response | None:
        if request.method != "POST":
            return None
        operator.api.trouble.append(full)
        return await full_quota(operator.api)(request)

    provider = await opened(rollout_job(startSeconds=2))
    operator.api.trouble = [lost_reply(operator.api), full]
    workspace = await acquire(provider, start_seconds=2)
    assert await say(workspace, "sleep 4; echo here") == "here"


async def test_refused_create_quotes_the_api_server(opened: Opened, operator: StandInOperator) -> None:
    async def denied(request: web.Request) -> web.Response:
        return refuse(403, "Forbidden", "ValidatingAdmissionPolicy 'images' denied request: unsigned image")

    provider = await opened()
    operator.api.trouble = [denied]
    with pytest.raises(SandboxFailure, match="unsigned image"):
        await acquire(provider)
    assert await say(await acquire(provider, "0-1"), "echo here") == "here"


async def test_runner_without_its_role_ends_with_the_reason(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(request: web.Request) -> web.Response | None:
        operator.api.trouble.append(denied)
        return await starting_up(operator.api)(request) if request.method == "POST" else None

    monkeypatch.setattr(kube_api, "DENIAL_PATIENCE_SECONDS", 0.5)
    provider = await opened()
    operator.api.trouble = [denied]
    with pytest.raises(SandboxFailure, match="RoleBinding") as failure:
        await acquire(provider)
    assert failure.value.reason == "AccessDenied"


async def test_an_api_server_that_is_away_stops_no_running_workspace_and_delays_a_new_one(
    opened: Opened, operator: StandInOperator
) -> None:
    provider = await opened()
    workspace = await acquire(provider)
    await operator.api.stop()
    under_way = asyncio.create_task(say(workspace, "sleep 1; echo done", "1:slow"))
    waiting = asyncio.create_task(acquire(provider, "9-0", image="another"))
    assert await say(await acquire(provider, "1-0"), "echo beside") == "beside"
    await asyncio.sleep(1)
    assert not waiting.done()
    await operator.api.start()
    assert await under_way == "done"
    assert await say(await waiting, "echo late") == "late"


async def test_an_end_during_a_dropped_watch_is_noticed(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    workspace = await acquire(provider)
    operator.api.drop_watches()
    operator.finish(workspace.handle["sandbox"], "Evicted", "node pressure")
    with pytest.raises(SandboxFailure, match="node pressure"):
        await say(workspace, "sleep 60")
    assert operator.api.lists == 1


async def test_watch_is_resumed_after_a_page_of_a_proxy(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    await until(operator.api.garble_watches)
    assert await say(await acquire(provider, start_seconds=20), "echo here") == "here"


async def test_deletion_missed_by_a_watch_is_found_by_a_new_list(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    workspace = await acquire(provider)
    survivor = await acquire(provider, "9-0", image="another")
    under_way = asyncio.create_task(say(workspace, "sleep 60"))
    await asyncio.sleep(0.1)
    await operator.api.stop()
    operator.api.remove(workspace.handle["sandbox"])
    operator.api.forget_history()
    await operator.api.start()
    with pytest.raises(SandboxFailure) as failure:
        await under_way
    assert failure.value.reason == "SandboxDeleted"
    assert operator.api.lists >= 2
    assert await say(survivor, "echo here") == "here"
    watches = operator.api.watches
    operator.finish(survivor.handle["sandbox"], "Evicted", "after all that")
    with pytest.raises(SandboxFailure, match="after all that"):
        await say(survivor, "sleep 60", "1:later")
    assert operator.api.watches - watches <= 2


async def test_sandboxes_of_other_runners_are_ignored(opened: Opened, operator: StandInOperator) -> None:
    one, other = await opened(runner=0), await opened(runner=1)
    mine, theirs = await acquire(one), await acquire(other, "1-0")
    assert mine.handle["sandbox"] != theirs.handle["sandbox"]
    await other.close()
    await until(lambda: set(operator.api.sandboxes) == {mine.handle["sandbox"]})
    assert await say(mine, "echo here") == "here"


async def test_a_status_that_cannot_be_read_does_not_hide_the_end_of_a_sandbox(
    opened: Opened, operator: StandInOperator
) -> None:
    provider = await opened()
    workspace = await acquire(provider)
    waiting = asyncio.create_task(say(workspace, "sleep 60", "1:slow"))
    name = workspace.handle["sandbox"]
    known = operator.api.sandboxes[name]["status"]
    operator.api.set_status(name, {"conditions": [{}]})
    await asyncio.sleep(0.5)
    operator.api.set_status(name, known)
    operator.finish(name, "Evicted")
    with pytest.raises(SandboxFailure, match="Evicted"):
        await asyncio.wait_for(waiting, 20)


async def test_an_internal_error_at_a_connection_fails_the_requests_for_that_sandbox_only(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: HeldSandbox, view: object) -> None:
        raise ValueError("an odd answer")

    provider = await opened()
    with monkeypatch.context() as broken:
        broken.setattr(HeldSandbox, "connect", fail)
        with pytest.raises(SandboxFailure, match="odd answer") as failure:
            await asyncio.wait_for(acquire(provider), 20)
    assert failure.value.reason == "InternalError"
    assert await say(await acquire(provider, "0-1"), "echo here") == "here"
