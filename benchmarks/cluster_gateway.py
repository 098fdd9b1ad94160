"""How many prompt tokens servers find in their prefix caches if runners choose the servers, compared with a Gateway in
front of them: Envoy and the endpoint picker of the Gateway API Inference Extension, with its defaults.

Servers, Gateway and picker run on this machine. The cluster only has the objects that the picker reads: an InferencePool,
and one pod whose ports are the servers.
"""

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from agent_runtime.models.base import Model, ModelRequest
from benchmarks.measuring import quantile
from benchmarks.on_cluster import harness_cluster, new_namespace
from benchmarks.report import Row, Target, comparison
from rollout_api.model import Sampling
from rollout_api.records import Message
from tests.integration.served.fleet import MODEL, Fleet, StandIn
from tests.support.cluster import Cluster
from tests.support.gateway import envoy_config, envoy_program, picker_arguments, picker_program
from tests.support.ports import free_ports

SERVERS = 4
GROUPS, MEMBERS, TURNS = 16, 6, 8
PROMPT_WORDS, RESULT_WORDS, ANSWER_TOKENS = 400, 60, 48
TOOL_SECONDS = 0.3
TOKENS_PER_SECOND = 60.0
LARGE_BLOCKS = 8192  # blocks of 16 tokens of each server; all conversations have about 6,700 for each in the end
SMALL_BLOCKS = 2048
AS_MANY = Target("at least", 1)
GATEWAY = "a Gateway"
START_SECONDS = 60.0


@dataclass
class _Found:
    """What one way to the servers gave."""

    cached: float
    """Percentage of prompt tokens that were in the server's cache."""
    busiest: float
    """Prompt tokens of the busiest server, relative to the mean of all."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each call."""


def measure() -> list[Row]:
    """Return the share of cached prompt tokens with caches that hold all conversations, and with smaller ones."""
    cluster = harness_cluster()
    cluster.node_process("addon", "start", "inference-pools")
    rows: list[Row] = []
    with new_namespace(cluster) as namespace:
        for name, blocks, target in (("large caches", LARGE_BLOCKS, None), ("full caches", SMALL_BLOCKS, AS_MANY)):
            ours, theirs = asyncio.run(_compare(cluster, namespace, blocks))
            p50 = [quantile(found.seconds, 0.5) for found in (ours, theirs)]
            rows += [
                comparison(f"{name}: cached prompt tokens", ours.cached, "%", GATEWAY, theirs.cached, target),
                comparison(f"{name}: busiest server, of the mean", ours.busiest, "×", GATEWAY, theirs.busiest),
                comparison(f"{name}: a call, p50", p50[0], "s", GATEWAY, p50[1]),
            ]
    return rows


async def _compare(cluster: Cluster, namespace: str, blocks: int) -> tuple[_Found, _Found]:
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        try:
            arguments = ("--tokens-per-second", str(TOKENS_PER_SECOND), "--kv-blocks", str(blocks))
            await fleet.start(SERVERS, *arguments)
            await fleet.model.check()
            ours = await _run(fleet, fleet.model)
            for server in fleet.servers:
                await server.post("/reset_prefix_cache")
            ports = [int(server.url.rpartition(":")[2]) for server in fleet.servers]
            async with _gateway(cluster, namespace, ports, Path(folder)) as url:
                client = fleet.connect(url)
                theirs = await _run(fleet, client)
                await client.close()
        finally:
            await fleet.close()
    return ours, theirs


@contextlib.asynccontextmanager
async def _gateway(cluster: Cluster, namespace: str, ports: Sequence[int], folder: Path) -> AsyncIterator[str]:
    """Yield the URL of a Gateway in front of the servers at these ports."""
    metadata = {"name": "servers", "namespace": namespace}
    await asyncio.to_thread(_describe_servers, cluster, metadata, ports)
    port, picker_port, health_port, metrics_port = free_ports(4)
    config = folder / "envoy.json"
    config.write_text(json.dumps(envoy_config(port=port, picker_port=picker_port)))
    picker = [str(picker_program())]
    picker += picker_arguments(
        "servers", namespace, port=picker_port, health_port=health_port, metrics_port=metrics_port
    )
    commands = ([str(envoy_program()), "-c", str(config), "--use-dynamic-base-id", "-l", "error"], picker)
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
    processes = []
    try:
        for command in commands:
            with (folder / Path(command[0]).name).open("wb") as log:
                processes.append(
                    await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment)
                )
        async with asyncio.timeout(START_SECONDS):
            while not await _answers(f"http://127.0.0.1:{port}"):  # noqa: ASYNC110 the state is in another process
                await asyncio.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in processes:
            process.kill()
            await process.wait()
        cluster.kubectl("delete", "inferencepool,pod", "servers", "-n", namespace, "--force", "--ignore-not-found")


async def _answers(url: str) -> bool:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    try:
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _describe_servers(cluster: Cluster, metadata: Mapping[str, str], ports: Sequence[int]) -> None:
    """Create the objects that the picker reads. No node runs the pod; its status is written here."""
    label = {"app": "servers"}
    spec = {
        "selector": {"matchLabels": label},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    pod = {"nodeSelector": {"none": "such"}, "containers": [{"name": "main", "image": "none"}]}
    cluster.apply(
        {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": metadata, "spec": spec},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "labels": label}, "spec": pod},
    )
    status = {
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    where = ["pod", "servers", "-n", metadata["namespace"], "--subresource=status"]
    cluster.kubectl("patch", *where, "-p", json.dumps({"status": {"phase": "Running", **status}}))


async def _run(fleet: Fleet, model: Model) -> _Found:
    """Run all conversations against empty caches."""
    before = [await _counters(server) for server in fleet.servers]
    seconds: list[float] = []
    await asyncio.gather(
        *(_conversation(model, group, member, seconds) for group in range(GROUPS) for member in range(MEMBERS))
    )
    after = [await _counters(server) for server in fleet.servers]
    asked, found = (
        [new[name] - old[name] for old, new in zip(before, after, strict=True)]
        for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    )
    return _Found(100 * sum(found) / sum(asked), max(asked) * SERVERS / sum(asked), seconds)


async def _conversation(model: Model, group: int, member: int, seconds: list[float]) -> None:
    clock = random.Random(f"{group} {member}")
    messages: list[Message] = [{"role": "user", "content": _words(random.Random(group), PROMPT_WORDS)}]
    for turn in range(TURNS):
        began = time.monotonic()
        reply = await model.complete(
            ModelRequest(
                messages=list(messages),
                tools=[],
                sampling=Sampling(max_tokens=ANSWER_TOKENS, extra={"ignore_eos": True}),
                seed=group * MEMBERS + member,
                session=f"rollout-{group}-{member}",
                task=f"task-{group}",
                member=member,
                turn=turn,
                group=f"group-{group}",
            )
        )
        seconds.append(time.monotonic() - began)
        result = {"role": "user", "content": _words(clock, RESULT_WORDS)}
        messages += [{"role": "assistant", "content": reply.text}, result]
        await asyncio.sleep(clock.expovariate(1 / TOOL_SECONDS))


def _words(clock: random.Random, count: int) -> str:
    return " ".join(str(clock.randrange(1000, 10_000)) for _ in range(count))


async def _counters(server: StandIn) -> dict[str, float]:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {sample.name: sample.value for family in families for sample in family.samples}
