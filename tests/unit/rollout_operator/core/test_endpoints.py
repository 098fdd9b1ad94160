"""Over HTTP, trainers find the servers of a namespace, and nobody counts on an operator whose cache is not complete."""

from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Gauge

from rollout_operator.endpoints import application


def model_server(namespace: str) -> dict[str, object]:
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "ModelServer",
        "metadata": {"name": "qwen", "namespace": namespace, "uid": "u"},
        "spec": {"model": {"name": "Qwen/Qwen3-8B"}, "engine": {"image": "vllm:1", "version": "0.26.0"}},
        "status": {"servers": [{"name": "qwen-0", "url": "http://10.0.0.7:8000", "uid": "u-0", "ready": True}]},
    }


async def test_trainers_find_all_servers_or_those_of_one_namespace() -> None:
    app = application(CollectorRegistry(), list, lambda: [model_server("lab"), model_server("other")])
    async with TestClient(TestServer(app)) as client:
        for query, name, found in (("", "*", ["lab", "other"]), ("?namespace=lab", "lab", ["lab"])):
            answer = await client.get(f"/v1/rl/workers{query}")
            body = await answer.json()
            assert (answer.status, body["protocol_version"], body["namespace"]) == (200, 1, name)
            assert [worker["namespace"] for worker in body["workers"]] == found


async def test_an_operator_is_ready_when_its_cache_is_complete_and_says_what_it_waits_for() -> None:
    waiting = ["Sandbox"]
    async with TestClient(TestServer(application(CollectorRegistry(), lambda: waiting, list))) as client:
        answer = await client.get("/readyz")
        assert (answer.status, await answer.text()) == (503, "waiting for ['Sandbox']\n")
        waiting.clear()
        assert (await client.get("/readyz")).status == 200


async def test_metrics_are_in_the_form_that_prometheus_scrapes() -> None:
    registry = CollectorRegistry()
    Gauge("rollout_leader", "help", registry=registry).set(1)
    async with TestClient(TestServer(application(registry, list, list))) as client:
        answer = await client.get("/metrics")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert "rollout_leader 1.0" in await answer.text()
