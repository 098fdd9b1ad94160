"""The standalone session proxy, installed by the chart: agents outside of jobs use a model, and every call is recorded."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from kubernetes.client import CoreV1Api
from kubernetes.config import new_client_from_config

from rolloutctl.cluster_access import forwarded_port
from tests.support.cluster import REPOSITORY, STORAGE_SECRET, Cluster, Object
from tests.support.model_server import NAME, Server
from tests.support.release import Release

ADMIN_KEY = "an-admin-key-of-a-test"
PORT = 8080
SESSION = "task-17"


def install(release: Release, **proxy: str) -> list[Object]:
    """Install the proxy with these values below `proxy`. Returns its pods."""
    values = {
        "enabled": "true",
        "adminKey": ADMIN_KEY,
        "output.uri": f"s3://{release.cluster.bucket}/{release.namespace}",
        "output.secretRef": STORAGE_SECRET,
        "resources.requests.cpu": "50m",
        **proxy,
    }
    release.upgrade("replicas=0", *(f"proxy.{name}={value}" for name, value in values.items()))
    return [pod for pod in release.pods() if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "proxy"]


@asynccontextmanager
async def reached(cluster: Cluster, pod: Object) -> AsyncIterator[str]:
    """Forward a port to one replica; yields its URL."""
    core = CoreV1Api(new_client_from_config(str(cluster.kubeconfig)))
    metadata = pod["metadata"]
    async with forwarded_port(core, metadata["namespace"], metadata["name"], PORT) as port:
        yield f"http://127.0.0.1:{port}"


async def admin(method: str, url: str, body: object = None) -> Any:
    """Return the proxy's answer to a request with its admin key."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with aiohttp.request(method, url, json=body, headers=headers) as response:
        assert response.status < 300, await response.text()
        return await response.json()


async def say(url: str, key: str, *messages: str) -> str:
    """Return the model's answer to a conversation, requested by the openai package."""
    roles = ["user", "assistant"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=5) as client:
        completion = await client.chat.completions.create(
            model=NAME,
            max_tokens=8,
            messages=[{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)],  # type: ignore[misc]
        )
    return completion.choices[0].message.content or ""


def test_session_continues_at_another_replica_when_its_owner_is_killed(cluster: Cluster, release: Release) -> None:
    here = {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "proxy"}}}
    server = Server(cluster, release.namespace).apply(replicas=1, clients=[here])
    url = server.wait_ready(1).status["url"]
    owner, other = install(release, **{"endpoint.baseURL": f"{url}/v1", "endpoint.name": NAME})

    async def scenario() -> tuple[str, list[Object]]:
        async with reached(cluster, owner) as first, reached(cluster, other) as second:
            key = (await admin("POST", f"{first}/sessions/{SESSION}", {}))["key"]
            answer = await say(first, key, "What is 2 + 2?")
            await say(second, key, "What is 3 + 3?")  # any replica answers for any session
            name = owner["metadata"]["name"]
            cluster.kubectl("delete", "pod", name, "-n", release.namespace, "--force", "--grace-period=0")
            await say(second, key, "What is 2 + 2?", answer, "And half of it?")
            turns = (await admin("GET", f"{second}/sessions/{SESSION}"))["turns"]
            await admin("POST", f"{second}/sessions/{SESSION}/complete", {})
        return answer, turns

    answer, turns = asyncio.run(scenario())
    asked = [[message["content"] for message in turn["request_messages"]] for turn in turns]
    assert asked == [["What is 2 + 2?"], ["What is 3 + 3?"], ["What is 2 + 2?", answer, "And half of it?"]]
    for turn in turns:
        assert len(turn["completion_token_ids"]) == len(turn["completion_logprobs"]) > 0


@contextmanager
def program(*arguments: str, environ: dict[str, str], log: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a program of this repository, and end it afterwards."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
async def test_a_model_behind_a_nat_serves_agents_by_a_worker_that_connects_out(
    cluster: Cluster, release: Release, tmp_path: Path
) -> None:
    [pod] = install(release, replicas="1", **{"relay.model": NAME})
    async with reached(cluster, pod) as url:
        standin = ("tests.support.vllm_server", "--port", "0", "--print-url", "--model", NAME)
        with program(*standin, environ={}, log=tmp_path / "model.log") as model:
            assert model.stdout is not None
            endpoint = f"{model.stdout.readline().strip()}/v1"
            worker = ("rolloutctl.main", "proxy-worker", "--url", url, "--endpoint", endpoint, "--model", NAME)
            log = tmp_path / "worker.log"
            with program(*worker, environ={"ROLLOUT_PROXY_ADMIN_KEY": ADMIN_KEY}, log=log):
                key = (await admin("POST", f"{url}/sessions/{SESSION}", {}))["key"]
                async with asyncio.timeout(120):
                    await say(url, key, "What is 2 + 2?")
                [turn] = (await admin("GET", f"{url}/sessions/{SESSION}"))["turns"]
    assert len(turn["completion_token_ids"]) == len(turn["completion_logprobs"]) > 0
