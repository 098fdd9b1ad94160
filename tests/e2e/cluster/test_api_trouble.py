"""Failing calls of a runner to a real API server: no object is created twice, and no event is missed."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from agent_runtime.kube.api import ApiError, KubeApi
from agent_runtime.sandboxes.cluster.sandbox_object import SandboxView, new_name, sandbox_object, selector
from agent_runtime.sandboxes.cluster.watch import SandboxWatch
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import SandboxSpec
from tests.support.api_proxy import ApiProxy
from tests.support.cluster import Cluster, Job, Object, small_job

RUNNER = 7
"""Index of a runner that the operator does not start."""
IMAGE = "127.0.0.1:1/nothing:here"
"""Image of the containers, which never run."""


@pytest.fixture
def job(new_job: Callable[[Object], Job]) -> Job:
    """A job whose own runner never starts, so that all its Sandboxes are those of the test."""
    job = new_job(small_job("owner"))
    job.manifest["spec"]["output"]["secretRef"] = "not-there"
    return job.apply()


@pytest.fixture
def proxy(cluster: Cluster) -> ApiProxy:
    return ApiProxy(cluster)


@pytest.fixture
async def api(proxy: ApiProxy, namespace: str) -> AsyncIterator[KubeApi]:
    """The runner's client of the API server."""
    async with proxy.serve(namespace) as made:
        yield made


def new_sandbox(job: Job) -> Object:
    """Return a Sandbox as a runner creates it."""
    owner = RolloutJob.model_validate(job.object)
    return sandbox_object(owner, RUNNER, new_name(job.name, RUNNER), SandboxSpec(image=IMAGE))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 (the condition is whatever a test says)
            await asyncio.sleep(0.02)


async def test_a_create_whose_reply_is_lost_makes_one_sandbox(api: KubeApi, proxy: ApiProxy, job: Job) -> None:
    async def meet(request: web.Request) -> web.Response:
        await proxy.pass_on(request)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    proxy.trouble = [("POST", meet)]
    made = await api.create_sandbox(new_sandbox(job))
    created = [answer for answer in proxy.seen if answer.startswith("POST")]
    assert created == ["POST sandboxes 201", "POST sandboxes 409"]
    assert [found["metadata"]["uid"] for found in job.sandboxes()] == [made["metadata"]["uid"]]


async def test_sandbox_of_another_owner_is_not_adopted(api: KubeApi, job: Job) -> None:
    sandbox = new_sandbox(job)
    await api.create_sandbox(sandbox)
    sandbox["metadata"]["ownerReferences"][0]["uid"] = "another"
    with pytest.raises(ApiError, match="AlreadyExists"):
        await api.create_sandbox(sandbox)


async def test_changes_during_an_api_server_outage_are_noticed_afterwards(
    api: KubeApi, proxy: ApiProxy, job: Job
) -> None:
    known: dict[str, SandboxView | None] = {}
    watch = SandboxWatch(api, selector(job.uid, RUNNER), known.__setitem__)
    delete = lambda name: job.cluster.kubectl("delete", "sandbox", name, "-n", job.namespace)  # noqa: E731
    await watch.start()
    lost, kept = [(await api.create_sandbox(new_sandbox(job)))["metadata"]["name"] for _ in range(2)]
    await until(lambda: known.keys() == {lost, kept})

    async def delete_first(request: web.Request) -> web.Response:
        await asyncio.to_thread(delete, lost)
        return await proxy.pass_on(request)

    # The next watch starts at a version that the API server no longer has, so only a new list shows the deletion.
    proxy.forgotten, proxy.trouble = 1, [("GET", delete_first)]
    proxy.break_watches()
    await until(lambda: known[lost] is None)
    assert "WATCH sandboxes ERROR" in proxy.seen
    assert proxy.seen.count("GET sandboxes 200") == 2
    await asyncio.to_thread(delete, kept)
    await until(lambda: known[kept] is None)
    assert proxy.seen.count("GET sandboxes 200") == 2, "the watch after the list goes on"
    await watch.stop()
