"""Later sandboxes of a run request the memory that workspaces in earlier ones have used."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client

from agent_runtime.kube.api import KubeApi
from agent_runtime.recording.memory_use import MemoryUse
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.cluster import fleet, pools
from agent_runtime.sandboxes.cluster.provider import ClusterProvider
from rollout_api import measured_memory
from rollout_api.base import quantity_value
from rollout_api.cluster import KEY_FILE, POOL_UID_LABEL
from rollout_api.measured_memory import set_request
from rollout_api.sandbox import Resources
from rollout_api.sandbox_pool import PoolSandbox, pooled_sandbox
from tests.integration.cluster_provider.conftest import Opened, acquire, rollout_job, say, until
from tests.integration.cluster_provider.stand_in_api import NAMESPACE
from tests.integration.cluster_provider.stand_in_operator import KEY, StandInOperator

MEASURED = Resources(memory="2Gi", memory_request="Measured")
HOLD = "python3 -c \"import time; a = b'x' * 100_000_000; time.sleep(2)\"; echo done"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_memory, "LEAST_SECONDS", 2.0)
    monkeypatch.setattr(fleet, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(pools, "READ_SECONDS", 0.2)


def requested(operator: StandInOperator, name: str) -> str:
    return str(operator.api.sandboxes[name]["spec"]["resources"]["memoryRequest"])


async def held(provider: ClusterProvider, *attempts: str, group: str = "g0") -> list[Any]:
    """Return workspaces that have held 100 MB each for two seconds."""
    workspaces = await asyncio.gather(*(acquire(provider, one, group, resources=MEASURED) for one in attempts))
    assert await asyncio.gather(*(say(one, HOLD) for one in workspaces)) == ["done"] * len(attempts)
    return list(workspaces)


async def test_later_sandboxes_of_a_run_request_what_earlier_ones_used(
    opened: Opened, operator: StandInOperator
) -> None:
    job = rollout_job(places=2, group_size=2)
    first = await opened(job)
    one, _ = await held(first, "0-0", "1-0")
    assert requested(operator, one.handle["sandbox"]) == "Measured"
    later = await acquire(first, "2-0", "g1", resources=MEASURED)
    assert later.handle["sandbox"] != one.handle["sandbox"]
    request = requested(operator, later.handle["sandbox"])
    assert 16 << 20 <= quantity_value(request) < 400 << 20
    await first.close(keep=True)
    # The next process knows that it is of the same kind, and uses its free place.
    second = await opened(job)
    writes = list(operator.api.writes)
    again = await acquire(second, "3-0", "g1", resources=MEASURED)
    assert again.handle["sandbox"] == later.handle["sandbox"]
    assert operator.api.writes == writes


async def test_sandboxes_of_a_later_run_request_what_those_of_earlier_runs_used(
    opened: Opened, operator: StandInOperator, tmp_path: Path
) -> None:
    output = str(tmp_path / "output")
    first = await opened(rollout_job(places=2), memory=MemoryUse(Store.open(output, {})))
    await held(first, "0-0", "1-0")
    await first.close(keep=False)
    job = rollout_job(places=2)
    later = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "77aa"})})
    second = await opened(later, memory=MemoryUse(Store.open(output, {})))
    begun = await acquire(second, "0-0", resources=MEASURED)
    assert 16 << 20 <= quantity_value(requested(operator, begun.handle["sandbox"])) < 400 << 20
    other = await acquire(second, "1-0", "g1", resources=Resources(memory="3Gi", memory_request="Measured"))
    assert requested(operator, other.handle["sandbox"]) == "Measured", "it is of another kind"


async def test_use_of_a_sandbox_that_was_given_back_counts(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "KEEP_EMPTY_SECONDS", 0.2)
    provider = await opened(rollout_job(places=2, group_size=2))
    for one in await held(provider, "0-0", "1-0"):
        await one.release()
    await provider.forget_group("g0")
    await until(lambda: not operator.api.sandboxes)
    later = await acquire(provider, "2-0", "g1", resources=MEASURED)
    assert requested(operator, later.handle["sandbox"]) != "Measured"


async def test_pools_sandboxes_with_a_measured_request_are_used(operator: StandInOperator, tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / KEY_FILE).write_text(KEY)
    sandbox = {"image": "task", "perSandbox": 3, "resources": MEASURED.wire()}
    metadata = {"name": "warm", "namespace": NAMESPACE, "uid": "9001"}
    operator.api.pools = [{"metadata": metadata, "spec": {"sandbox": sandbox, "replicas": 1}}]
    body: dict[str, Any] = {
        "metadata": {"name": "warm-1", "namespace": NAMESPACE, "labels": {POOL_UID_LABEL: "9001"}},
        "spec": pooled_sandbox(PoolSandbox.model_validate(sandbox)).wire(),
    }
    set_request(body, 77 << 20)
    operator.api.create(body)
    api = KubeApi(client.Configuration(host=f"http://127.0.0.1:{operator.api.port}"), NAMESPACE)
    provider = ClusterProvider(rollout_job(places=8), 0, KEY, api, tmp_path)
    await provider.open()
    try:
        assert requested(operator, "warm-1") == "77Mi"
        assert (await acquire(provider, resources=MEASURED)).handle["sandbox"] == "warm-1"
    finally:
        await provider.close()
        await api.close()
