"""Sandboxes of a SandboxPool: several runners of several jobs share them, and write nothing into the API server."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client

from agent_runtime.kube.api import KubeApi
from agent_runtime.sandboxes.base import Fence, Fenced, SandboxFailure, StoredLayer
from agent_runtime.sandboxes.cluster import fleet, held_sandbox, pool_visits, pools
from agent_runtime.sandboxes.cluster.provider import ClusterProvider
from agent_runtime.sandboxes.cluster.sandbox_object import Reason
from agent_runtime.sandboxes.executor_client.client import ExecutorClient
from rollout_api.cluster import EXECUTOR_PORT, KEY_FILE, POOL_UID_LABEL, executor_token, job_tag
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox_pool import PoolSandbox, pooled_sandbox
from tests.integration.cluster_provider.conftest import acquire, rollout_job, say, spec, until
from tests.integration.cluster_provider.stand_in_api import NAMESPACE
from tests.integration.cluster_provider.stand_in_operator import KEY, StandInOperator

UID = "9001"
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(pools, "READ_SECONDS", 0.2)
    monkeypatch.setattr(pool_visits, "REGAIN_SECONDS", 0.3)
    monkeypatch.setattr(pool_visits, "VISIT_SECONDS", 3.0)


class Cluster:
    """A pool with the name `warm` and some ready sandboxes, and the runners of jobs."""

    def __init__(self, operator: StandInOperator, folder: Path) -> None:
        self.operator, self.folder = operator, folder
        self._opened: list[tuple[ClusterProvider, KubeApi]] = []
        (folder / "warm").mkdir(parents=True)
        (folder / "warm" / KEY_FILE).write_text(KEY)
        self.set_pool()

    def set_pool(self, uid: str = UID, **sandbox: Any) -> None:
        body = {"image": "task", "perSandbox": 3, **sandbox}
        self.described = PoolSandbox.model_validate(body)
        metadata = {"name": "warm", "namespace": NAMESPACE, "uid": uid}
        self.operator.api.pools = [{"metadata": metadata, "spec": {"sandbox": body, "replicas": 2, "maxReplicas": 4}}]

    def add(self, name: str) -> None:
        """Create a sandbox of the pool, as the operator does."""
        metadata = {"name": name, "namespace": NAMESPACE, "labels": {POOL_UID_LABEL: UID}}
        self.operator.api.create({"metadata": metadata, "spec": pooled_sandbox(self.described).wire()})
        self.operator.api.writes.clear()

    async def live(self, name: str) -> list[str]:
        """Return the workspaces that hold places of a sandbox, as its executor lists them."""
        sandbox = self.operator.api.sandboxes[name]
        token = executor_token(KEY, name, sandbox["metadata"]["uid"])
        client = ExecutorClient(f"tcp:{sandbox['status']['podIP']}:{EXECUTOR_PORT}", token)
        try:
            listed = (await client.call("GET", "/workspaces")).json()["workspaces"]
        finally:
            await client.close()
        return [workspace["id"] for workspace in listed if workspace["state"] == "Live"]

    async def runner(self, uid: str = "0000000a-1", index: int = 0, **sandbox: Any) -> ClusterProvider:
        job = rollout_job(places=8, **sandbox)
        job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": uid})})
        return await self.open(job, index)

    async def open(self, job: RolloutJob, index: int = 0) -> ClusterProvider:
        api = KubeApi(client.Configuration(host=f"http://127.0.0.1:{self.operator.api.port}"), NAMESPACE)
        provider = ClusterProvider(job, index, KEY, api, self.folder)
        self._opened.append((provider, api))
        await provider.open()
        return provider

    async def close(self) -> None:
        for provider, api in self._opened:
            await provider.close()
            await api.close()


@pytest.fixture
async def cluster(operator: StandInOperator, tmp_path: Path) -> AsyncIterator[Cluster]:
    one = Cluster(operator, tmp_path / "pools")
    yield one
    await one.close()


async def test_two_jobs_share_a_sandbox_and_write_nothing(cluster: Cluster) -> None:
    cluster.add("warm-1")
    first, second = await cluster.runner("0000000a-1"), await cluster.runner("0000000b-1")
    one, two = await acquire(first, "0-0"), await acquire(second, "0-0")
    assert [await say(each, "cat setup.log") for each in (one, two)] == ["prepared", "prepared"]
    assert {one.handle["sandbox"], two.handle["sandbox"]} == {"warm-1"}
    assert one.handle["workspace"].startswith(job_tag("0000000a-1"))
    assert one.handle["prepared"] != two.handle["prepared"], "the end of one job's group must not end the other's state"
    await say(one, "echo mine > own", "1:own")
    assert await say(two, "ls own 2>&1 || true", "1:ls") != "own"
    assert one.description["pool"] == "warm"
    assert (first.wanted(), second.wanted()) == ({"warm": 1}, {"warm": 1})
    await one.release()
    await first.forget_group("g0")
    assert await say(two, "echo alive", "1:alive") == "alive"
    third = await acquire(second, "1-0")
    assert await say(third, "cat setup.log") == "prepared"
    assert cluster.operator.api.writes == []


async def test_runners_of_one_job_do_not_sweep_each_other(cluster: Cluster) -> None:
    cluster.add("warm-1")
    first, second = await cluster.runner(index=0), await cluster.runner(index=1)
    one, two = await acquire(first, "0-0"), await acquire(second, "1-0")
    await second.sweep(lambda attempt, name: True)
    assert await say(one, "echo alive") == "alive"
    with pytest.raises(Fenced):
        await say(two, "echo swept")


async def test_further_sandboxes_are_used_when_one_is_full_and_then_rollouts_wait(cluster: Cluster) -> None:
    for number in range(2):
        cluster.add(f"warm-{number}")
    other, provider = await cluster.runner("0000000b-1"), await cluster.runner()
    held = [await acquire(other, f"{number}-0", f"g{number}") for number in range(3)]
    mine = [await acquire(provider, f"{number}-0", f"g{number}") for number in range(3)]
    waiting = asyncio.create_task(acquire(provider, "3-0", "g3"))
    await asyncio.sleep(1)
    assert not waiting.done()
    assert provider.wanted() == {"warm": 4}
    assert provider.waits_for() == "SandboxPool warm has no free place: 2 of at most 4 sandboxes are ready"
    await held[0].release()
    assert await say(await waiting, "echo here") == "here"
    assert {one.handle["sandbox"] for one in [*held, *mine]} == {"warm-0", "warm-1"}
    assert cluster.operator.api.writes == []


async def test_a_sandbox_that_becomes_ready_serves_those_who_wait(cluster: Cluster) -> None:
    provider = await cluster.runner()
    waiting = asyncio.create_task(acquire(provider))
    await asyncio.sleep(0.3)
    assert provider.wanted() == {"warm": 1}
    cluster.add("warm-1")
    assert await say(await waiting, "echo here") == "here"


@pytest.mark.parametrize("change", ["another image", "deleted"])
async def test_who_waits_for_a_pool_that_no_longer_fits_gets_an_own_sandbox(cluster: Cluster, change: str) -> None:
    cluster.add("warm-1")
    other, provider = await cluster.runner("0000000b-1"), await cluster.runner()
    held = [await acquire(other, f"{number}-0", f"g{number}") for number in range(3)]
    waiting = asyncio.create_task(acquire(provider, "3-0", "g3"))
    await asyncio.sleep(0.3)
    if change == "deleted":
        cluster.operator.api.pools = []
    else:
        cluster.set_pool(image="other")
        cluster.add("warm-2")
    placed = await waiting
    assert placed.handle["sandbox"].startswith("sums-0-")
    assert await say(placed, "cat setup.log") == "prepared"
    assert provider.wanted() == {}
    assert await say(held[0], "echo alive") == "alive"
    await held[0].release()
    assert (await acquire(other, "4-0", "g4")).handle["sandbox"] != "warm-1", "it is not the pool's present spec"


async def test_a_draining_sandbox_gets_no_further_workspace(cluster: Cluster) -> None:
    cluster.add("warm-1")
    provider = await cluster.runner()
    first = await acquire(provider, "0-0")
    cluster.operator.api.set_spec("warm-1", drain=True)
    cluster.add("warm-2")
    await until(lambda: "warm-2" in cluster.operator.executors)
    second = await acquire(provider, "1-0")
    assert (first.handle["sandbox"], second.handle["sandbox"]) == ("warm-1", "warm-2")
    assert await say(first, "echo alive") == "alive"


async def test_the_next_process_finds_its_workspace_in_the_pool(cluster: Cluster) -> None:
    cluster.add("warm-1")
    first = await cluster.runner()
    one = await acquire(first)
    await say(one, "echo kept > file")
    await first.close(keep=True)
    second = await cluster.runner()
    again = await second.reattach(one.handle, spec=spec(), fence=Fence(2, "second"))
    assert await say(again, "cat file", "2:cat") == "kept"
    await again.release()
    assert cluster.operator.api.writes == []
    assert "warm-1" in cluster.operator.api.sandboxes


async def test_the_end_of_a_job_leaves_the_pools_sandboxes(cluster: Cluster) -> None:
    cluster.add("warm-1")
    provider = await cluster.runner()
    await acquire(provider)
    await provider.close()
    assert "warm-1" in cluster.operator.api.sandboxes
    assert cluster.operator.api.writes == []


async def test_the_loss_of_a_pools_sandbox_is_told_with_its_reason(cluster: Cluster) -> None:
    cluster.add("warm-1")
    provider = await cluster.runner()
    one = await acquire(provider)
    cluster.operator.finish("warm-1", "NodeLost", "its node is not ready")
    with pytest.raises(SandboxFailure) as lost:
        await say(one, "sleep 60")
    assert (lost.value.reason, "its node is not ready" in lost.value.message) == ("NodeLost", True)
    cluster.add("warm-2")
    assert await say(await acquire(provider, "0-1"), "echo here") == "here"


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "None"},
        {"image": "other"},
        {"network": {"agent": "Public"}},
        {"workspaces": {"mode": "Plain"}},
        {"podTemplate": {"spec": {"nodeSelector": {"disk": "fast"}}}},
    ],
)
async def test_a_job_that_does_not_fit_gets_sandboxes_of_its_own(
    cluster: Cluster, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cluster.add("warm-1")
    provider = await cluster.runner(**changes)
    network = changes.get("network", {})
    one = await acquire(provider, image=changes.get("image", "task"), network=network)
    assert one.handle["sandbox"] != "warm-1"
    assert ("create", one.handle["sandbox"]) in cluster.operator.api.writes
    assert provider.wanted() == {}
    assert caplog.text.count("SandboxPool warm is not used: ") == (changes != {"pool": "None"})


async def test_a_named_pool_that_does_not_fit_is_an_error_that_says_why(cluster: Cluster) -> None:
    cluster.add("warm-1")
    provider = await cluster.runner(pool="warm")
    with pytest.raises(SandboxFailure, match=r"SandboxPool warm .* its image is task, and the job needs other"):
        await acquire(provider, image="other")
    provider = await cluster.runner(pool="cold")
    with pytest.raises(SandboxFailure, match=r"SandboxPool cold .* does not exist, or was created after the job"):
        await acquire(provider)


async def test_after_the_pool_was_deleted_a_job_gets_sandboxes_of_its_own(cluster: Cluster) -> None:
    cluster.add("warm-1")
    provider = await cluster.runner()
    one = await acquire(provider)
    cluster.operator.api.pools.clear()
    cluster.operator.api.remove("warm-1")
    with pytest.raises(SandboxFailure, match="SandboxDeleted"):
        await say(one, "sleep 60")
    await asyncio.sleep(0.5)
    again = await acquire(provider, "0-1")
    assert cluster.operator.api.writes == [("create", again.handle["sandbox"])]


async def test_sandboxes_of_an_earlier_spec_are_not_used(cluster: Cluster) -> None:
    cluster.add("warm-1")
    provider = await cluster.runner()
    cluster.set_pool(perSandbox=5)
    await asyncio.sleep(0.5)
    cluster.add("warm-2")
    await until(lambda: "warm-2" in cluster.operator.executors)
    one = await acquire(provider)
    assert one.handle["sandbox"] == "warm-2"


async def test_the_next_process_ends_unwanted_workspaces_in_the_pool(cluster: Cluster) -> None:
    cluster.add("warm-1")
    first, other = await cluster.runner(), await cluster.runner("0000000b-1")
    await acquire(first)
    kept = await acquire(other)
    await first.close(keep=True)
    cluster.operator.api.set_spec("warm-1", drain=True)
    second = await cluster.runner()
    await second.sweep(lambda attempt, name: True)
    assert await cluster.live("warm-1") == [kept.handle["workspace"]]
    assert await say(kept, "echo alive") == "alive"


async def test_a_lost_sandbox_is_used_again_without_the_workspaces_lost_with_it(cluster: Cluster) -> None:
    cluster.add("warm-1")
    provider = await cluster.runner()
    lost = await acquire(provider)
    fleet_of = provider._fleet
    fleet_of._handle_end(fleet_of.held["warm-1"], Reason("SandboxLost", "the network was down"))
    with pytest.raises(SandboxFailure, match="SandboxLost"):
        await say(lost, "echo alive")
    async with asyncio.timeout(20):
        again = await acquire(provider, "0-1")
    assert await cluster.live("warm-1") == [again.handle["workspace"]]


async def test_a_pool_is_used_once_its_new_key_arrives(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_sandbox, "LISTEN_SECONDS", 0.5)
    monkeypatch.setattr(fleet, "OPERATOR_GRACE_SECONDS", 0.0)
    key_file = cluster.folder / "warm" / KEY_FILE
    key_file.write_text("ab" * 32)
    cluster.add("warm-1")
    provider = await cluster.runner()
    with pytest.raises(SandboxFailure):
        await acquire(provider, start_seconds=2)
    key_file.write_text(KEY)
    async with asyncio.timeout(20):
        assert await say(await acquire(provider, "0-1"), "echo here") == "here"


async def test_a_rollout_gives_up_when_no_sandbox_of_the_pool_can_be_reached(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_sandbox, "LISTEN_SECONDS", 0.5)
    monkeypatch.setattr(fleet, "OPERATOR_GRACE_SECONDS", 0.0)
    (cluster.folder / "warm" / KEY_FILE).write_text("ab" * 32)
    cluster.add("warm-1")
    provider = await cluster.runner()
    async with asyncio.timeout(20):
        for attempt in ("0-0", "0-1"):
            with pytest.raises(SandboxFailure):
                await acquire(provider, attempt, start_seconds=2)


@pytest.mark.parametrize("reason", ["", "InvalidSpec"])
async def test_a_pool_that_gets_no_sandboxes_is_not_chosen(cluster: Cluster, reason: str) -> None:
    pool = cluster.operator.api.pools[0]
    if reason:
        ready = {"type": "Ready", "status": "False", "reason": reason, "message": ""}
        pool["status"] = {"conditions": [ready], "newer": 1}
    else:
        pool["spec"].update(replicas=0, maxReplicas=0)
    provider = await cluster.runner()
    one = await acquire(provider)
    assert ("create", one.handle["sandbox"]) in cluster.operator.api.writes


def a_layer(begun: asyncio.Event, proceed: asyncio.Event, *, fails: bool = False) -> StoredLayer:
    """Return a layer whose data stop in the middle until `proceed`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(20):
            info = tarfile.TarInfo(f"opt/layer-{number}")
            info.size = 100_000
            archive.addfile(info, io.BytesIO(bytes([65 + number]) * info.size))
    data = out.getvalue()

    async def load() -> AsyncIterator[bytes]:
        yield data[:500_000]
        begun.set()
        await proceed.wait()
        if fails:
            raise SandboxFailure("LayerUnusable", "the storage is away")
        yield data[500_000:]

    return StoredLayer("d1", len(data), load)


async def test_a_failed_restore_of_one_job_does_not_fail_those_that_wait_for_it(cluster: Cluster) -> None:
    cluster.add("warm-1")
    failing, proceed = asyncio.Event(), asyncio.Event()
    free = asyncio.Event()
    free.set()
    first, second = await cluster.runner("0000000a-1"), await cluster.runner("0000000b-1")
    one = asyncio.create_task(acquire(first, layers=[a_layer(failing, proceed, fails=True)]))
    await failing.wait()
    two = asyncio.create_task(acquire(second, layers=[a_layer(asyncio.Event(), free)]))
    await asyncio.sleep(0.5)
    proceed.set()
    with pytest.raises(SandboxFailure, match="the storage is away"):
        await one
    assert await say(await two, "cat /opt/layer-* | wc -c") == "2000000"


async def test_the_next_process_finds_workspaces_whose_handles_were_not_recorded(cluster: Cluster) -> None:
    cluster.add("warm-1")
    first = await cluster.runner()
    for number in range(3):
        await acquire(first, f"{number}-0", f"g{number}")
    await first.close(keep=True)
    second = await cluster.runner()
    await second.sweep(lambda attempt, name: False)
    async with asyncio.timeout(20):
        again = await asyncio.gather(
            *(
                second.acquire(spec(f"g{number}"), attempt=f"{number}-0", fence=Fence(2, "second"), name="agent")
                for number in range(3)
            )
        )
    assert {one.handle["sandbox"] for one in again} == {"warm-1"}


async def test_the_next_process_finds_unrecorded_workspaces_in_every_sandbox(cluster: Cluster) -> None:
    for number in range(2):
        cluster.add(f"warm-{number}")
    first = await cluster.runner()
    left = [await acquire(first, f"{number}-0", f"g{number}") for number in range(6)]
    await left[0].release()
    await first.close(keep=True)
    second = await cluster.runner()
    await second.sweep(lambda attempt, name: False)
    again = await second.acquire(spec("g5"), attempt="5-0", fence=Fence(2, "second"), name="agent")
    assert again.handle["sandbox"] == left[5].handle["sandbox"] != left[0].handle["sandbox"]


async def test_the_next_process_finds_workspaces_in_own_sandboxes_although_a_pool_fits_now(cluster: Cluster) -> None:
    cluster.set_pool(image="another")
    first = await cluster.runner()
    alive, ended = [await acquire(first, rollout) for rollout in ("0-0", "1-0")]
    await first.close(keep=True)
    cluster.set_pool()
    cluster.add("warm-1")
    second = await cluster.runner()
    again = await second.reattach(alive.handle, spec=spec("0-0"), fence=Fence(2, "second"))
    assert await say(again, "echo alive", "9:alive") == "alive"
    await again.release()
    name = str(ended.handle["sandbox"])
    cluster.operator.api.remove(name)

    async def is_lost() -> bool:
        try:
            await second.reattach(ended.handle, spec=spec("1-0"), fence=Fence(2, "second"))
        except SandboxFailure:
            return True
        return False

    async with asyncio.timeout(60):
        while not await is_lost():  # noqa: ASYNC110 the watch tells it
            await asyncio.sleep(0.02)
    in_pool = await acquire(second, "2-0")
    assert in_pool.description["pool"] == "warm"


async def test_a_named_pool_that_does_not_fit_any_more_does_not_keep_the_next_process_from_starting(
    cluster: Cluster,
) -> None:
    cluster.add("warm-1")
    first = await cluster.runner(pool="warm")
    alone = await acquire(first, "0-0", alone=True)
    await first.close(keep=True)
    cluster.set_pool(image="another")
    second = await cluster.runner(pool="warm")
    again = await second.reattach(alone.handle, spec=spec("0-0"), fence=Fence(2, "second"))
    assert await say(again, "echo alive", "9:alive") == "alive"
