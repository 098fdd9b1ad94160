"""Over HTTP, trainers find the servers of a namespace, and an operator is not ready before its cache is complete."""

import asyncio
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Gauge

from rollout_operator.endpoints import application


def model_server(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "ModelServer",
        "metadata": {"name": "qwen", "namespace": namespace, "uid": "u"},
        "spec": {"model": {"name": "Qwen/Qwen3-8B"}, "engine": {"image": "vllm:1", "version": "0.27.0"}},
        "status": {"servers": [{"name": "qwen-0", "url": "http://10.0.0.7:8000", "uid": "u-0", "ready": True}]},
    }


async def test_trainers_find_only_the_servers_whose_token_they_present() -> None:
    servers = [model_server("lab"), model_server("other")]
    for server in servers:
        server["metadata"]["uid"] = server["metadata"]["namespace"]
    app = application(CollectorRegistry(), list, lambda: servers, {"lab": "of-lab", "other": "of-other"})
    async with TestClient(TestServer(app)) as client:

        async def find(query: str, token: str) -> list[str]:
            answer = await client.get(f"/v1/rl/workers{query}", headers={"Authorization": f"Bearer {token}"})
            body = await answer.json()
            assert (answer.status, body["protocol_version"]) == (200, 1)
            return [worker["namespace"] for worker in body["workers"]]

        assert await find("", "of-lab") == ["lab"]
        assert await find("?namespace=lab", "of-lab") == ["lab"]
        assert await find("?namespace=other", "of-lab") == []
        for token in ("", "-", "wrong"):
            answer = await client.get("/v1/rl/workers", headers={"Authorization": f"Bearer {token}"})
            assert answer.status in (401, 403)
        assert (await client.get("/v1/rl/workers")).status == 401


async def test_workers_are_refused_for_a_token_that_is_not_utf8() -> None:
    app = application(CollectorRegistry(), list, lambda: [model_server("lab")], {"u": "of-lab"})
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /v1/rl/workers HTTP/1.0\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"403"
        writer.close()


async def test_operator_is_ready_when_its_cache_is_complete_and_reports_what_it_waits_for() -> None:
    waiting = ["Sandbox"]
    async with TestClient(TestServer(application(CollectorRegistry(), lambda: waiting, list, {}))) as client:
        answer = await client.get("/readyz")
        assert (answer.status, await answer.text()) == (503, "waiting for ['Sandbox']\n")
        waiting.clear()
        assert (await client.get("/readyz")).status == 200


async def test_metrics_are_in_the_form_that_prometheus_scrapes() -> None:
    registry = CollectorRegistry()
    Gauge("rollout_leader", "help", registry=registry).set(1)
    async with TestClient(TestServer(application(registry, list, list, {}))) as client:
        answer = await client.get("/metrics")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert "rollout_leader 1.0" in await answer.text()
