"""The viewer, installed by the chart: the runs of a bucket in a browser, behind the cluster's ingress."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
from kubernetes.client import CoreV1Api
from kubernetes.config import new_client_from_config

from rolloutctl.cluster_access import forwarded_port
from tests.support.cluster import STORAGE_SECRET, Cluster, Job, Object, small_job
from tests.support.release import Release


def test_runs_of_a_bucket_are_shown(cluster: Cluster, release: Release, new_job: Callable[[Object], Job]) -> None:
    job = new_job(small_job("shown")).apply()
    job.wait("Succeeded")
    place, _, folder = job.store().uri.rpartition("/")
    values = {
        "enabled": "true",
        "output.uri": place,
        "output.secretRef": STORAGE_SECRET,
        "resources.requests.cpu": "50m",
    }
    release.upgrade(*(f"viewer.{name}={value}" for name, value in values.items()))
    (pod,) = (pod for pod in release.pods() if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "viewer")
    core = CoreV1Api(new_client_from_config(str(cluster.kubeconfig)))

    async def read() -> tuple[Any, Any, Any]:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        async with (
            forwarded_port(core, namespace, name, 8080) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            page = await (await http.get("/")).text()
            runs = await (await http.get("/api/runs")).json()
            rollout = await (await http.get("/api/rollout", params={"run": folder, "index": "0"})).json()
        return page, runs, rollout

    page, runs, rollout = asyncio.run(read())
    assert '<div id="app">' in page
    assert [(run["folder"], run["state"]) for run in runs["runs"]] == [(folder, "finished")]
    assert rollout["result"]["reward"] == job.results()[0]["reward"]
    assert rollout["verdict"]["passed"]
