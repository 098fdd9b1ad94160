"""A small fleet of real processes: stand-ins for vLLM behind real gateways, an updater, and runners with open streams."""

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web

from agent_runtime.models.pool.gate import CallSpans, PolicyGate
from agent_runtime.serving.gateway import serve
from agent_runtime.serving.policies import Policies
from rollout_api.cluster import POLICY_VERSION_HEADER
from rollout_api.model_server import Gate, ModelServerStatus, ServerState
from tests.support.policy_updater import MODEL, TOKEN, read_status, write

LONG = 300.0
"""Time limit for what happens on any machine, however busy."""


@dataclass
class Pod:
    name: str
    uid: str
    port: int
    data: str = ""
    control: str = ""
    restarts: int = 0
    up: bool = False
    process: asyncio.subprocess.Process | None = None


@dataclass
class Stream:
    """One call, and its runner's record of it."""

    server: str
    boot: str
    request_id: str
    call: CallSpans
    lost: bool = False
    """The server's engine restarted during the call, or had another version at its start. A runner would repeat such a call
    elsewhere.
    """


class Fleet:
    """`async with Fleet(folder, servers=3) as fleet`."""

    def __init__(
        self,
        folder: Path,
        servers: int = 3,
        mode: str = "Pull",
        runners: int = 2,
        calls: int = 1,
        tokens_per_second: int = 100,
        most_tokens: int = 80,
        hook: str = "",
    ) -> None:
        """
        Args:
            folder: for files that stand for the API server and for a store.
            servers: how many.
            mode: Pull or Push.
            runners: how many.
            calls: of each runner on each server, at any time.
            tokens_per_second: of each call.
            most_tokens: of each call.
            hook: of another trainer than the fleet's own.
        """
        self.folder, self.mode = folder, mode
        _write_weights(folder / "model", 0)
        self.calls, self.tokens_per_second, self.most_tokens = calls, tokens_per_second, most_tokens
        self.pods = [Pod(f"s-{index}", f"uid-{index}", _free_port()) for index in range(servers)]
        self.policy: dict[str, Any] = {"version": 0}
        self.acknowledged: dict[str, int | None] = {f"job/{index}": None for index in range(runners)}
        self.hook = hook
        self.trainer_away = False
        self.asked_hook: list[dict[str, Any]] = []
        self.streams: list[Stream] = []
        self.pods_made = servers
        self.killed_updaters = 0
        self._served: dict[str, dict[str, Any]] = {}
        """What engines that were killed had brought to an end, by request."""
        self.updater: asyncio.subprocess.Process | None = None
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._runners: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        self._stack.push_async_callback(self._stop)
        if not self.hook:
            await self._start_hook()
        for pod in self.pods:
            policies = Policies(self.folder / pod.name, lambda: os.environ)
            engine = f"http://127.0.0.1:{pod.port}"
            data, control = await serve(self._stack, TOKEN, policies, engine, 0, 0)
            pod.data, pod.control = f"http://127.0.0.1:{data}", f"http://127.0.0.1:{control}"
        await asyncio.gather(*(self.start(pod) for pod in self.pods))
        self.tell()
        await self.start_updater()
        self._tasks.append(asyncio.create_task(self._kubelet()))
        for key in self.acknowledged:
            self._runners.append(asyncio.create_task(self._runner(key)))
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._stack.aclose()

    async def _stop(self) -> None:
        await self.end_calls()
        await end(self._tasks)
        for process in [self.updater, *(pod.process for pod in self.pods)]:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    # What the API server would know.

    def tell(self) -> None:
        pods = [
            {"name": p.name, "uid": p.uid, "restarts": p.restarts, "url": p.data, "control": p.control, "up": p.up}
            for p in self.pods
        ]
        write(
            self.folder / "fleet.json",
            {
                "policy": self.policy,
                "mode": self.mode,
                "hook": self.hook,
                "minReady": (len(self.pods) + 1) // 2,
                "pods": pods,
                "runners": self.acknowledged,
            },
        )

    @property
    def status(self) -> ModelServerStatus:
        return read_status(self.folder)

    @property
    def story(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.folder / "story.json").read_bytes())
        return found

    def ask_for(self, version: int, *, exists: bool = True) -> None:
        """Change spec.policy, as kubectl patch does."""
        weights = self.folder / "store" / str(version)
        if exists:
            _write_weights(weights, version)
        self.policy = {"version": version, "uri": weights.as_uri()}
        self.tell()

    async def until_failed(self, version: int) -> ModelServerStatus:
        """Wait until all servers have returned from this version, and the gate is open."""
        async with asyncio.timeout(LONG):
            while True:
                self._assert_well()
                status = self.status
                if status.policy.failed == version and status.policy.gate is Gate.OPEN:
                    return status
                await asyncio.sleep(0.02)

    async def until_open(self, version: int, least: int | None = None) -> ModelServerStatus:
        """Wait until the gate is open with this version, and this many servers are ready; all of them when left out."""
        wanted = len(self.pods) if least is None else least
        try:
            async with asyncio.timeout(LONG):
                while True:
                    self._assert_well()
                    status = self.status
                    alive = {(pod.uid, pod.restarts) for pod in self.pods if _runs(pod)}
                    ready = sum(entry.ready and (entry.uid, entry.restarts) in alive for entry in status.servers)
                    if status.policy.step is None and status.policy.current == version and ready >= wanted:
                        return status
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never at {version}: {self.status}\n{self.story}") from None

    async def until_answering(self) -> None:
        """Wait until every call of the runners has its first token."""
        async with asyncio.timeout(LONG):
            while sum(stream.call.tokens > 0 for stream in self.streams) < self.calls * len(self._runners) * len(
                self.pods
            ):
                self._assert_well()
                await asyncio.sleep(0.02)

    def _assert_well(self) -> None:
        """Raise a failure of the stand-ins for kubelet and runners."""
        for task in [*self._tasks, *self._runners]:
            if task.done() and not task.cancelled():
                task.result()

    # Processes.

    async def start(self, pod: Pod) -> None:
        pod.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.support.vllm_server", "--port", str(pod.port), "--print-url", "--model", MODEL),
            *("--tokens-per-second", str(self.tokens_per_second), "--load-seconds", "0.05"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--scheduling-policy", "priority"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert pod.process.stdout is not None
        # Nothing: it was killed before it served.
        pod.up = bool(await pod.process.stdout.readline())

    async def kill(self, pod: Pod) -> None:
        """SIGKILL it; the kubelet detects that."""
        assert pod.process is not None
        if pod.process.returncode is None:
            if pod.up:
                ended = await self._served_by(pod)
                self._served |= {request: record for request, record in ended.items() if record["finish"]}
            pod.process.kill()
            await pod.process.wait()

    async def start_updater(self) -> None:
        self.updater = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.policy_updater", str(self.folder)
        )

    async def kill_updater(self) -> None:
        """SIGKILL it, and start another one."""
        assert self.updater is not None
        self.killed_updaters += 1
        self.updater.kill()
        await self.updater.wait()
        await self.start_updater()

    async def _kubelet(self) -> None:
        while True:
            gone = {entry.uid for entry in self.status.servers if entry.state is ServerState.EVICTED}
            for pod in self.pods:
                assert pod.process is not None
                if pod.uid in gone:
                    await self.kill(pod)
                    await pod.process.wait()
                    self.pods_made += 1
                    pod.uid, pod.restarts, pod.up = f"uid-{self.pods_made}", 0, False
                    self.tell()
                    await self.start(pod)
                    self.tell()
                elif pod.process.returncode is not None:
                    pod.up = False
                    self.tell()
                    # A restart takes longer than the runners need to learn of the end (docs/policy-updates.md, Limits).
                    if any(entry.ready and entry.name == pod.name for entry in self.status.servers):
                        continue
                    await self.start(pod)
                    pod.restarts += 1
                    self.tell()
            await asyncio.sleep(0.05)

    # The trainer.

    async def _start_hook(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            question = await request.json()
            if self.trainer_away:
                return web.json_response({"error": "the trainer is busy"}, status=503)
            self.asked_hook.append(question)
            for server in question["servers"]:
                pod = next(pod for pod in self.pods if pod.name == server["name"])
                url = f"http://127.0.0.1:{pod.port}/_standin/tensors"
                with contextlib.suppress(aiohttp.ClientError):  # just killed; the others receive theirs
                    async with self.http.post(url, json={"version": question["policy"]["version"]}):
                        pass
            update = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]}
            return web.json_response({"initInfo": {"master_address": "127.0.0.1"}, "updates": [update]})

        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.hook = "http://{}:{}/".format(*runner.addresses[0][:2])

    # Runners.

    async def _runner(self, key: str) -> None:
        """Keep a stream to every ready server, recorded as by a real runner."""
        loop = asyncio.get_running_loop()
        gate = PolicyGate(key)
        mine: dict[tuple[str, int], tuple[Stream, asyncio.Task[None]]] = {}
        count = 0
        try:
            while True:
                await asyncio.sleep(0.02)
                as_of = loop.time()
                status = self.status
                gate.see(status.policy, as_of)
                if gate.acknowledges(loop.time()):
                    self.acknowledged[key] = gate.acknowledged
                    self.tell()
                for place in [place for place, (_, task) in mine.items() if task.done()]:
                    gate.end(mine.pop(place)[0].call)
                if not gate.is_open:
                    continue
                open_to_us = {entry.name: entry for entry in status.servers if entry.ready}
                for stream, task in mine.values():
                    entry = open_to_us.get(stream.server)
                    if entry is None or f"{entry.uid}/{entry.restarts}" != stream.boot:
                        stream.lost = True
                        task.cancel()
                for name, entry in open_to_us.items():
                    for number in range(self.calls):
                        if (name, number) not in mine:
                            count += 1
                            boot = f"{entry.uid}/{entry.restarts}"
                            request_id = f"{key.replace('/', '-')}-{count}"
                            stream = Stream(name, boot, request_id, gate.begin(streamed=True))
                            self.streams.append(stream)
                            mine[name, number] = stream, asyncio.create_task(self._call(entry.url, stream, gate))
        finally:
            for stream, task in mine.values():
                task.cancel()
                gate.end(stream.call)
            await asyncio.gather(*(task for _, task in mine.values()), return_exceptions=True)

    async def _call(self, url: str, stream: Stream, gate: PolicyGate) -> None:
        body = {
            "model": MODEL,
            "token_ids": [5, 6, 7],
            "stream": True,
            "sampling_params": {"max_tokens": self.most_tokens, "ignore_eos": True},
        }
        headers = {"X-Request-Id": stream.request_id}
        try:
            async with self.http.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response:
                if response.headers.get(POLICY_VERSION_HEADER) != str(stream.call.began):
                    stream.lost = True
                    return
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        tokens = sum(len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"])
                        gate.arrived(stream.call, tokens, asyncio.get_running_loop().time())
        except (aiohttp.ClientError, OSError):
            stream.lost = True

    async def until_all_have_tokens(self) -> None:
        """Wait until every running call has received further tokens."""
        before = [(stream, stream.call.tokens) for stream in self.streams]
        async with asyncio.timeout(LONG):
            while not all(stream.call.tokens > tokens or stream.lost for stream, tokens in before):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def end_calls(self) -> None:
        """End the runners and their calls."""
        await end(self._runners)

    async def served(self) -> dict[str, dict[str, Any]]:
        """Return what engines really did, by request; for killed ones, what they had finished."""
        found = dict(self._served)
        for pod in self.pods:
            found |= await self._served_by(pod)
        return found

    async def _served_by(self, pod: Pod) -> dict[str, dict[str, Any]]:
        try:
            async with self.http.get(f"http://127.0.0.1:{pod.port}/_standin/served") as response:
                return {record["external_id"] or record["id"]: record for record in await response.json()}
        except aiohttp.ClientError:
            return {}  # it ended just now

    async def really_loaded(self) -> list[int]:
        """Return the version of each engine's real weights, whatever it reports."""
        found = []
        for pod in self.pods:
            async with self.http.get(f"http://127.0.0.1:{pod.port}/_standin/state") as response:
                found.append((await response.json())["version"])
        return found

    async def fault(self, pod: Pod, **faults: Any) -> None:
        async with self.http.post(f"http://127.0.0.1:{pod.port}/_standin/faults", json=faults) as response:
            assert response.status == 200


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and return when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _write_weights(folder: Path, version: int) -> None:
    folder.mkdir(parents=True)
    (folder / "version.json").write_text(json.dumps({"version": version}))


def _runs(pod: Pod) -> bool:
    return pod.up and pod.process is not None and pod.process.returncode is None


def _free_port() -> int:
    """Return a port below those of outgoing connections, so that no other program takes it while its engine is down."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
