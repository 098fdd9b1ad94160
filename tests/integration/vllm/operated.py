"""A ModelServer of one server without a cluster: its gateway, the operator's decisions, and a runner's model."""

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp

from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.pool.fleet import CONFIRM_SECONDS, View
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.serving.gateway import serve
from agent_runtime.serving.policies import Policies
from rollout_api.model_server import AdapterStatus, Gate, ModelServerStatus, PolicyStatus, PolicyStep
from tests.integration.vllm.conftest import MODEL, REPOSITORY, InferenceServer
from tests.integration.vllm.recorder import Recorder
from tests.support.policy_updater import TOKEN, read_status, write

ME = "job/0"
SETTLED_SECONDS = 180.0
"""Time limit of an update, also on a busy machine."""


class Operated:
    """`async with Operated(server, folder) as served`. Its runner calls the server through a recorder."""

    def __init__(self, server: InferenceServer, folder: Path, adapters: Sequence[str] = (), hook: str = "") -> None:
        """`hook`: of a trainer, for mode Push."""
        self._server, self._folder, self._hook = server, folder, hook
        self._is_up, self._restarts = True, 0
        self._policy: dict[str, Any] = {"version": 0}
        self._adapters: dict[str, Any] = {name: {"version": 0} for name in adapters}
        self._asleep = False
        self._stack = AsyncExitStack()
        self._acknowledged: int | None = None
        self.mixed = False
        """An update did not wait for this runner, because the machine was too busy or the runner was cut off."""
        self.is_cut_off = False
        """Whether the runner learns nothing of the ModelServer, and acknowledges nothing."""

    async def __aenter__(self) -> Self:
        (self._folder / "model").symlink_to(self._server.checkpoint(0))
        engine = self._server.engine
        checked = not engine.updates.survives_bad_weights
        policies = Policies(self._folder / "policies", lambda: os.environ, checked=checked)
        ports = await serve(self._stack, TOKEN, policies, self._server.url, 0, 0, engine)
        data, self._control = (f"http://127.0.0.1:{port}" for port in ports)
        self.recorder = await self._stack.enter_async_context(Recorder(data).serve())
        self._tell()
        command = (sys.executable, "-m", "tests.support.policy_updater", str(self._folder))
        updater = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY)
        self._stack.push_async_callback(updater.wait)
        self._stack.callback(updater.kill)
        self.model = self._model(None)
        self.adapted = {name: self._model(name) for name in self._adapters}
        await self.until(0)
        for model in (self.model, *self.adapted.values()):
            await model.check()
        return self

    def _model(self, adapter: str | None) -> ServedModel:
        """Return the model of a job, or the adapter of one."""
        name = adapter or MODEL

        def connect(url: str) -> InferenceClient:
            engine = self._server.engine.type
            # As a runner does: on a busy machine, a call with a limit would be sent again.
            return InferenceClient(f"{url}/v1", name, headers={}, key_origin="", call_seconds=math.inf, engine=engine)

        model = ServedModel(name, self, connect, me=ME, sample_seconds=0.2, adapter=adapter)
        self._stack.push_async_callback(model.close)
        return model

    async def __aexit__(self, *details: object) -> None:
        await self._stack.aclose()

    @property
    def status(self) -> ModelServerStatus:
        return read_status(self._folder)

    def patch(self, version: int, uri: str | None = None) -> None:
        """Change `spec.policy`."""
        self._policy = {"version": version} | ({} if uri is None else {"uri": uri})
        self._tell()

    def patch_adapter(self, name: str, version: int, uri: str | None = None) -> None:
        """Change one entry of `spec.adapters`."""
        self._adapters[name] = {"version": version} | ({} if uri is None else {"uri": uri})
        self._tell()

    async def until_adapter(self, name: str, reached: Callable[[AdapterStatus], bool]) -> None:
        """Return when the adapter's status is reached, and each server's entry has its current version."""

        def is_reached(status: ModelServerStatus) -> bool:
            found = status.adapters.get(name)
            return (
                found is not None
                and reached(found)
                and all(server.adapters.get(name) == found.current for server in status.servers)
            )

        await self._until_whole(is_reached)

    def lend_memory(self, asleep: bool) -> None:
        """Change `spec.asleep`, together with the next patch if that follows at once."""
        self._asleep = asleep
        self._tell()

    async def restart(self) -> None:
        """Kill the server and start it again with the weights of its start, as the kubelet does."""
        self._is_up = False
        self._tell()
        self._server.kill()
        await self._until_whole(lambda status: not any(one.ready for one in status.servers))
        await self._server.start()
        self._is_up, self._restarts = True, self._restarts + 1
        self._tell()

    async def until_asleep(self) -> None:
        """Return when all memory is released."""
        await self._until_status(lambda policy: policy.step is PolicyStep.ASLEEP)

    async def until(self, version: int) -> None:
        """Return when the version is served and the gate is open."""
        await self._until(lambda policy: policy.current == version)

    async def until_failed(self, version: int) -> None:
        """Return when the version was given up, and the gate is open."""
        await self._until(lambda policy: policy.failed == version)

    async def _until(self, reached: Callable[[PolicyStatus], bool]) -> None:
        await self._until_status(lambda policy: policy.gate is Gate.OPEN and policy.step is None and reached(policy))

    async def _until_status(self, reached: Callable[[PolicyStatus], bool]) -> None:
        await self._until_whole(lambda status: reached(status.policy) and any(one.ready for one in status.servers))

    async def _until_whole(self, reached: Callable[[ModelServerStatus], bool]) -> None:
        try:
            async with asyncio.timeout(SETTLED_SECONDS):
                while True:
                    if reached(self.status):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{self.status}\n{(self._folder / 'story.json').read_text()}") from None

    async def control(self, method: str, path: str) -> Any:
        """Return the control port's answer to the operator."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, self._control + path, headers=headers) as response,
        ):
            assert response.status == 200, await response.text()
            return await response.json() if response.content_type == "application/json" else None

    async def changes(self) -> AsyncIterator[View]:
        """See Directory. Also reports what the runner acknowledges."""
        loop = asyncio.get_running_loop()
        last, told = None, 0.0
        while True:
            self.mixed = self.mixed or ME in self.status.policy.mixed
            if self.is_cut_off:
                await asyncio.sleep(0.02)
                continue
            if self._acknowledged != self.model.acknowledged:
                self._acknowledged = self.model.acknowledged
                self._tell()
            asked, status = loop.time(), self.status
            if status != last or asked - told > CONFIRM_SECONDS:
                last, told = status, asked
                yield View(status, asked)
            await asyncio.sleep(0.02)

    def _tell(self) -> None:
        pod = {
            "name": "s-0",
            "uid": "uid-0",
            "restarts": self._restarts,
            "url": self.recorder.url,
            "control": self._control,
            "up": self._is_up,
        }
        may_sleep = {"asleep": self._asleep} if self._server.engine.updates.sleep is not None else {}
        write(
            self._folder / "fleet.json",
            {
                **may_sleep,
                "policy": self._policy,
                "adapters": self._adapters,
                "mode": "Push" if self._hook else "Pull",
                "engine": self._server.engine.type,
                "hook": self._hook,
                "minReady": 1,
                "pods": [pod],
                "runners": {ME: self._acknowledged},
            },
        )
