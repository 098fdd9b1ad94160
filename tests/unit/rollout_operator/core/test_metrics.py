"""Metrics: what dashboards and alerts use, under the same names, and never a series for each object."""

import asyncio
import contextlib
from typing import Any

import kopf
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import generate_latest

from rollout_operator.actions import Ref
from rollout_operator.api import ApiError, KubeApi
from rollout_operator.cache import Cache
from rollout_operator.metrics import JOB_STATES, SANDBOX_STATES, Metrics, state_of
from rollout_operator.work_queue import WorkQueue


def sandbox(name: str, *conditions: str) -> dict[str, Any]:
    """Return a Sandbox with these true conditions."""
    status = {"conditions": [{"type": condition, "status": "True"} for condition in conditions]}
    return {"kind": "Sandbox", "metadata": {"namespace": "n", "name": name, "uid": name}, "status": status}


def job(name: str, *conditions: str) -> dict[str, Any]:
    """Return a RolloutJob with these true conditions."""
    return {**sandbox(name, *conditions), "kind": "RolloutJob"}


def values(metrics: Metrics) -> dict[str, float]:
    """Return every series of a scrape."""
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_objects_are_counted_by_state_and_outcome() -> None:
    cache = Cache()
    for obj in (sandbox("a"), sandbox("b", "Ready"), sandbox("c", "Ready"), sandbox("d", "Ready", "Finished")):
        cache.put("Sandbox", obj)
    reports = [
        {"index": 0, "outcomes": {"Completed": 3, "InfraFailed": 1}, "rewardSum": 1.5, "rewarded": 3},
        {"index": 1, "outcomes": {"Completed": 1}, "rewardSum": 0.5, "rewarded": 1},
    ]
    for report in reports:
        cache.put("RolloutShard", {**sandbox(f"j-{report['index']}"), "status": report})
    cache.put("RolloutShard", {**sandbox("j-2"), "status": {}})
    cache.put("RolloutJob", job("j", "Progressing"))
    cache.put("RolloutJob", job("k", "Failed"))
    for name, used in (("p", 3), ("q", 4)):
        cache.put("SandboxPool", {**sandbox(name), "status": {"places": {"total": 8, "used": used}}})
    cache.put("SandboxPool", sandbox("r"))
    found = values(Metrics(cache, leading=lambda: True))
    assert [found[f'rollout_sandboxes{{state="{state}"}}'] for state in ("Starting", "Ready", "Finished")] == [1, 2, 1]
    assert (found['rollout_jobs{state="Progressing"}'], found['rollout_jobs{state="Failed"}']) == (1, 1)
    assert (found['rollout_sealed{outcome="Completed"}'], found['rollout_sealed{outcome="InfraFailed"}']) == (4, 1)
    assert found["rollout_mean_reward"] == 0.5
    assert [found[f'rollout_pool_places{{state="{state}"}}'] for state in ("total", "used", "wanted")] == [16, 7, 0]
    assert found["rollout_leader"] == 1


def test_model_servers_are_counted_by_state_and_by_shut_gates() -> None:
    cache = Cache()
    for name, gate, conditions in (
        ("ready", "Open", ["Ready"]),
        ("updates", "Shut", ["Ready"]),
        ("starts", None, []),
        ("wrong", "Shut", ["Ready", "Invalid"]),
    ):
        server = sandbox(name, *conditions)
        cache.put("ModelServer", {**server, "status": {**server["status"], "policy": {"gate": gate} if gate else {}}})
    found = values(Metrics(cache, leading=lambda: True))
    states = [found[f'rollout_model_servers{{state="{state}"}}'] for state in ("Ready", "NotReady", "Invalid")]
    assert states == [2, 1, 1]
    assert found["rollout_model_gates_shut"] == 2


def test_standby_replicas_report_no_counts() -> None:
    cache = Cache()
    cache.put("Sandbox", sandbox("a"))
    metrics = Metrics(cache, leading=lambda: False)
    metrics.sandbox_seen(sandbox("a"), is_new=True, now=0.0)
    metrics.sandbox_seen(sandbox("a", "Ready"), is_new=False, now=1.0)
    found = values(metrics)
    assert found["rollout_leader"] == 0
    assert not any(series.startswith("rollout_sandboxes") for series in found)
    assert found["rollout_sandbox_start_seconds_count"] == 0


def test_a_start_is_timed_from_appearance_to_ready_and_failed_ones_do_not_count() -> None:
    metrics = Metrics(Cache(), leading=lambda: True)
    for name in ("quick", "failed", "deleted", "old"):
        metrics.sandbox_seen(sandbox(name), is_new=name != "old", now=10.0)
    metrics.sandbox_seen(sandbox("quick", "Ready"), is_new=False, now=10.004)
    metrics.sandbox_seen(sandbox("quick", "Ready"), is_new=False, now=30.0)
    metrics.sandbox_seen(sandbox("failed", "Finished"), is_new=False, now=11.0)
    metrics.sandbox_gone(sandbox("deleted"))
    metrics.sandbox_seen(sandbox("old", "Ready"), is_new=False, now=12.0)
    found = values(metrics)
    assert found["rollout_sandbox_start_seconds_count"] == 1
    assert found['rollout_sandbox_start_seconds_bucket{le="0.005"}'] == 1
    assert found['rollout_sandbox_start_seconds_bucket{le="0.002"}'] == 0


def test_queues_report_under_the_names_of_controller_runtime() -> None:
    now = [0.0]
    queue: WorkQueue[Ref] = WorkQueue(lambda: now[0])
    metrics = Metrics(Cache(), leading=lambda: True)
    metrics.watch_queue("Sandbox", queue)
    for name in ("a", "b"):
        queue.add(Ref("Sandbox", "n", name))
    now[0] = 3.0
    taken = queue.take_ready()
    assert taken is not None
    queue.retry(taken)
    now[0] = 5.0
    found = values(metrics)
    assert found['rollout_workqueue_depth{name="Sandbox"}'] == 1
    assert found['rollout_workqueue_adds_total{name="Sandbox"}'] == 2
    assert found['rollout_workqueue_retries_total{name="Sandbox"}'] == 1
    assert found['rollout_workqueue_queue_duration_seconds_sum{name="Sandbox"}'] == 3
    assert found['rollout_workqueue_unfinished_work_seconds{name="Sandbox"}'] == 2
    assert found['rollout_controller_active_workers{controller="Sandbox"}'] == 1
    metrics.reconciled("Sandbox", "error", 0.5)
    found = values(metrics)
    assert found['rollout_controller_reconcile_total{controller="Sandbox",result="error"}'] == 1
    assert found['rollout_controller_reconcile_errors_total{controller="Sandbox"}'] == 1
    assert found['rollout_controller_reconcile_time_seconds_sum{controller="Sandbox"}'] == 0.5


def test_writes_are_counted_and_timed_by_response_code() -> None:
    metrics = Metrics(Cache(), leading=lambda: True)
    answers = iter((201, 403))

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"message": "m"}, status=next(answers))

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        async with TestServer(app) as server:
            api = KubeApi(lambda: kopf.ConnectionInfo(server=str(server.make_url(""))))
            api.on_write = metrics.wrote
            for number in range(3):
                if number == 2:
                    await server.close()
                with contextlib.suppress(ApiError):
                    await api.create({"kind": "Pod", "metadata": {"namespace": "n"}})
            await api.close()

    asyncio.run(run())
    found = values(metrics)
    series = 'rollout_api_write_seconds_count{{code="{}",kind="Pod",verb="create"}}'
    assert [found[series.format(code)] for code in ("2xx", "403", "none")] == [1, 1, 1]


def test_no_series_carries_the_name_of_an_object() -> None:
    cache = Cache()
    cache.put("Sandbox", sandbox("secret-project"))
    cache.put("RolloutJob", job("secret-project"))
    metrics = Metrics(cache, leading=lambda: True)
    metrics.sandbox_seen(sandbox("secret-project", "Ready"), is_new=True)
    assert "secret-project" not in generate_latest(metrics.registry).decode()


def test_the_most_final_condition_names_the_state() -> None:
    assert state_of(sandbox("s", "Scheduled", "Ready", "Finished"), SANDBOX_STATES) == "Finished"
    assert state_of(job("j", "Succeeded", "Suspended"), JOB_STATES) == "Succeeded"
    assert state_of(job("j", "Invalid"), JOB_STATES) == "Invalid"
    assert state_of(job("j"), JOB_STATES) == "Progressing"
