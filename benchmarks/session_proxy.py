"""The time that the session proxy adds to a model call, and its capacity, compared with LiteLLM's proxy."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from benchmarks.conversation import END_SECONDS, ROOT, SubjectFailed
from benchmarks.http_load import Request, at_rate, in_turns, streams
from benchmarks.instant_model import MODEL_CORE, NAME, TOOL, WORDS, instant_model
from benchmarks.measuring import cpu_seconds, disk_folder, file_system, memory, memory_folder, pin_to_core, quantile
from benchmarks.peers import LITELLM, install
from benchmarks.report import Row, Target, comparison
from benchmarks.slow_link import slow_link
from tests.support.ports import free_port
from tests.support.s3 import serve_s3

RATE = 200.0  # requests a second of the open loop
CALLS = 3000  # in the open loop: 15 s, with 30 calls above the 99th percentile
TURNS = 8
ALONE = 200  # calls one at a time
SIDE_BY_SIDE = 16
SATURATING_CALLS = 4000
PEER_CALLS = 400  # for the peer's saturation, which takes 8 s
STREAMS = 1000
REQUEST_SECONDS = 0.03  # latency of a write to S3 in the same region is 20 to 40 ms
PROXY_CORE = 0
CORES = os.sched_getaffinity(0)  # all cores that benchmarks may use
START_SECONDS = 90.0  # LiteLLM takes 20 s
MOST_P50, MOST_P99 = 0.002, 0.011  # seconds
LEAST_RATIO = 10.0
FLAT = 1.1  # largest allowed ratio of the memory at the end of all streams to that when all had begun

PROXY_KEY = f"sk-{secrets.token_urlsafe(16)}"
"""The admin key of both proxies."""


@dataclass(frozen=True)
class _Proxy:
    """A running proxy."""

    url: str
    pid: int


def measure() -> list[Row]:
    """Return added latency, saturation and memory of streams."""
    with instant_model(TURNS) as model_url, memory_folder() as shm, disk_folder() as disk:
        pin_to_core(MODEL_CORE)
        try:
            return asyncio.run(_measure(model_url, shm, disk))
        finally:
            os.sched_setaffinity(0, CORES)  # for the next benchmarks


@dataclass(frozen=True)
class _Found:
    """Seconds of each call at 200 per second, p50 of sequential calls, calls per second at saturation, and processor
    seconds of a call.
    """

    opened: Sequence[float]
    alone: float
    rate: float
    cpu: float


async def _measure(model_url: str, shm: Path, disk: Path) -> list[Row]:
    direct = [Request(f"{model_url}/chat/completions", body) for body in _bodies()] * (CALLS // TURNS)
    model = await at_rate(direct, RATE)
    model_alone = quantile(await in_turns(direct[:ALONE], 1), 0.5)
    async with _litellm(model_url, shm) as proxy:
        bearer = [f"Authorization: Bearer {PROXY_KEY}"]
        calls = [Request(f"{proxy.url}/v1/chat/completions", request.body, bearer) for request in direct]
        await in_turns(calls[:TURNS], 1)
        peer_alone = quantile(await in_turns(calls[:ALONE], 1), 0.5) - model_alone
        peer_rate, peer_cpu = await _saturation(proxy, calls[:PEER_CALLS])
    async with _ours(model_url, shm, str(shm / "sessions"), {}) as proxy:
        in_memory = await _in_a_folder(proxy)
    async with _ours(model_url, shm, str(disk / "sessions"), {}) as proxy:
        on_disk = await _in_a_folder(proxy)
        stream_rows = await _streams(proxy)
    s3 = await _on_s3(model_url, shm)

    def latency_rows(opened: Sequence[float], where: str, *, judged: bool) -> list[Row]:
        return [
            Row(
                f"added latency at {RATE:g}/s, sessions {where}, p{percent}",
                (quantile(opened, percent / 100) - quantile(model, 0.5)) * 1e3,
                "ms",
                f"the model alone takes {quantile(model, percent / 100) * 1e3:.3g} ms",
                target=Target("at most", most * 1e3) if judged else None,
            )
            for percent, most in ((50, MOST_P50), (99, MOST_P99))
        ]

    def peer_rows(found: _Found, where: str, *, judged: bool) -> list[Row]:
        target = Target("at least", LEAST_RATIO) if judged else None
        alone = found.alone - model_alone
        one = f"added latency one at a time, sessions {where}, p50: LiteLLM's to ours"
        many = f"calls a second of one process, {SIDE_BY_SIDE} at once, sessions {where}: ours to LiteLLM's"
        return [
            comparison(one, alone * 1e3, "ms", "LiteLLM", peer_alone * 1e3, target, inverse=True),
            comparison(many, found.rate, "/s", "LiteLLM", peer_rate, target),
            Row("processor time of a call, then", found.cpu * 1e3, "ms", f"LiteLLM {peer_cpu * 1e3:.3g} ms"),
        ]

    on = f"on the disk ({file_system(disk)})"
    return [
        *latency_rows(on_disk.opened, on, judged=True),
        *peer_rows(on_disk, on, judged=True),
        *latency_rows(in_memory.opened, "in memory", judged=False),
        *peer_rows(in_memory, "in memory", judged=False),
        *latency_rows(s3, f"on S3 at {REQUEST_SECONDS * 1e3:g} ms a request", judged=False),
        *stream_rows,
    ]


async def _in_a_folder(proxy: _Proxy) -> _Found:
    await in_turns(await _conversations(proxy, ALONE), 1)
    alone = quantile(await in_turns(await _conversations(proxy, ALONE), 1), 0.5)
    opened = await at_rate(await _conversations(proxy, CALLS), RATE)
    rate, cpu = await _saturation(proxy, await _conversations(proxy, SATURATING_CALLS))
    return _Found(opened, alone, rate, cpu)


async def _saturation(proxy: _Proxy, calls: Sequence[Request]) -> tuple[float, float]:
    """Return calls a second, and processor seconds of a call."""
    began, cpu = time.perf_counter(), cpu_seconds(proxy.pid)
    await in_turns(calls, SIDE_BY_SIDE)
    return len(calls) / (time.perf_counter() - began), (cpu_seconds(proxy.pid) - cpu) / len(calls)


async def _streams(proxy: _Proxy) -> list[Row]:
    body = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "Say much."}], "stream": True}).encode()
    requests = [Request(f"{url}/chat/completions", body) for url in await _register(proxy, STREAMS)]
    idle, begun = memory("VmRSS", proxy.pid), list[int]()
    cpu = cpu_seconds(proxy.pid)
    first = await streams(requests, lambda: begun.append(memory("VmRSS", proxy.pid)))
    ended = memory("VmRSS", proxy.pid)
    return [
        Row(
            f"memory at the end of {STREAMS} streams at once, to when all had begun",
            ended / 1e6,
            "MB",
            f"{begun[0] / 1e6:.4g} MB; without streams {idle / 1e6:.4g} MB",
            ended / begun[0],
            Target("at most", FLAT),
        ),
        Row(f"first text of {STREAMS} streams begun at once, p50", quantile(first, 0.5) * 1e3, "ms"),
        Row("processor time of a streamed word", (cpu_seconds(proxy.pid) - cpu) / (STREAMS * WORDS) * 1e3, "ms"),
    ]


async def _on_s3(model_url: str, folder: Path) -> list[float]:
    with serve_s3(folder) as server:
        async with (
            slow_link(server.port, REQUEST_SECONDS) as port,
            _ours(model_url, folder, server.uri("sessions"), server.environ(port)) as proxy,
        ):
            return await at_rate(await _conversations(proxy, CALLS), RATE)


def _bodies() -> list[bytes]:
    """Return the bodies of the requests of one conversation; each has the earlier answers and the tools' results."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "Call noop until told otherwise."}]
    bodies = []
    for turn in range(TURNS):
        bodies.append(json.dumps({"model": NAME, "messages": messages}).encode())
        call = {"id": f"c{turn}", "type": "function", "function": {"name": TOOL, "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": "ok"})
    return bodies


async def _conversations(proxy: _Proxy, calls: int) -> list[Request]:
    """Return the calls of new sessions with one conversation each, ordered so that no session has two calls at once."""
    bodies, at_work = _bodies(), 4 * SIDE_BY_SIDE
    urls = await _register(proxy, -(-calls // TURNS))
    requests = []
    for start in range(0, len(urls), at_work):
        for body in bodies:
            requests += [Request(f"{url}/chat/completions", body) for url in urls[start : start + at_work]]
    return requests[:calls]


async def _register(proxy: _Proxy, sessions: int) -> list[str]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {PROXY_KEY}"}) as client:
        some = asyncio.Semaphore(SIDE_BY_SIDE)

        async def register() -> str:
            async with some, client.post(f"{proxy.url}/sessions/{secrets.token_hex(8)}") as reply:
                reply.raise_for_status()
                return f"{proxy.url}{(await reply.json())['base_path']}"

        return await asyncio.gather(*(register() for _ in range(sessions)))


@contextlib.asynccontextmanager
async def _ours(model_url: str, folder: Path, store: str, environ: Mapping[str, str]) -> AsyncIterator[_Proxy]:
    port = free_port()
    settings = {"store": store, "port": port, "endpoint": {"baseURL": model_url, "name": NAME}}
    path = folder / "proxy.yaml"
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "agent_runtime.proxy", str(path)]
    async with _process(command, port, {**environ, "ROLLOUT_PROXY_ADMIN_KEY": PROXY_KEY}, "/health") as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def _litellm(model_url: str, folder: Path) -> AsyncIterator[_Proxy]:
    port = free_port()
    model = {"model": f"openai/{NAME}", "api_base": model_url, "api_key": "none"}
    path = folder / "litellm.yaml"
    path.write_text(yaml.safe_dump({"model_list": [{"model_name": NAME, "litellm_params": model}]}))
    program = install(LITELLM).parent / "litellm"
    command = [str(program), "--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    # It takes the prices from its package, and downloads none.
    environ = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": PROXY_KEY}
    async with _process(command, port, environ, "/health/liveliness") as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def _process(command: Sequence[str], port: int, environ: Mapping[str, str], health: str) -> AsyncIterator[_Proxy]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: ASYNC220 no other task runs
            command,
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=log,
            stderr=log,
            preexec_fn=lambda: _alone_on(PROXY_CORE),
        )
        proxy = _Proxy(f"http://127.0.0.1:{port}", process.pid)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not await _answers(proxy.url + health):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SubjectFailed(f"{command[0]} did not start: {log.read()[-3000:].decode(errors='replace')}")
                await asyncio.sleep(0.2)
            yield proxy
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _alone_on(core: int) -> None:
    os.sched_setaffinity(0, CORES)  # the parent process uses only the second core
    pin_to_core(core)


async def _answers(url: str) -> bool:
    async with aiohttp.ClientSession() as client:
        try:
            async with client.get(url) as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False
