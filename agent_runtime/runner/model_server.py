"""The model of a job with a ModelServer. It follows the ModelServer's state at the API server, and calls its servers."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from agent_runtime.kube.api import ApiError, retry_pause
from agent_runtime.models.base import ModelConfigError, ModelError
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.pool.fleet import CONFIRM_SECONDS, View
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.runner.start import Start
from rollout_api.cluster import own_model_server_name
from rollout_api.inference.description import EngineType
from rollout_api.model_server import ModelServerStatus
from rollout_api.rollout_job import RolloutJob

CREATED_SECONDS = 60.0
"""Time for the operator to create the job's own ModelServer, which it does before the runners."""
SAMPLES_A_SECOND = 10
"""Readings per second of one server's metrics, by all runners of the job together."""
SERVER_FIELDS = ("name", "url", "uid", "ready", "state", "restarts", "adapters")
POLICY_FIELDS = ("current", "gate", "update", "paused", "mixed")
ADAPTER_FIELDS = ("current",)


class ModelServerApi(Protocol):
    """KubeApi's calls for ModelServers."""

    async def get_model_server(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        """The ModelServer."""

    def watch_model_server(
        self, name: str, resource_version: str
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """Yield its watch events."""


def model_server_name(job: RolloutJob) -> str | None:
    """Return the name of the job's ModelServer; None for another kind of model."""
    model = job.spec.model
    if model is None:
        return None
    return own_model_server_name(job.metadata.name) if model.server is not None else model.server_ref


async def open_served_model(start: Start, name: str, api: ModelServerApi) -> ServedModel:
    """Return the model of that ModelServer. Raises ModelError if it does not exist."""
    model = start.job.spec.model
    spec = await _spec(name, "server" if model and model.server else "serverRef", api)
    served = str(spec["model"]["name"])
    adapter = model.adapter if model else None
    if adapter is not None and adapter not in spec.get("adapters", {}):
        known = ", ".join(spec.get("adapters", {})) or "none"
        raise ModelConfigError(
            "NoAdapter",
            f"model.adapter: ModelServer {name} has no adapter {adapter} (it has: {known}); add it to its spec.adapters, at "
            "version 0 if it has no weights yet",
        )
    # An operator from before SGLang leaves the type out.
    engine = EngineType(spec["engine"].get("type", EngineType.VLLM))

    def connect(url: str) -> InferenceClient:
        # Calls have no individual time limit: ServedModel decides when to give up a call.
        called = adapter or served
        return InferenceClient(
            f"{url}/v1",
            called,
            headers={},
            key_origin="",
            call_seconds=math.inf,
            engine=engine,
            experts=None if model is None else model.routed_experts,
        )

    return ServedModel(
        adapter or served,
        ModelServerDirectory(api, name),
        connect,
        me=f"{start.job.metadata.uid}/{start.shard.index}",
        sample_seconds=max(1.0, start.shard.count / SAMPLES_A_SECOND),
        adapter=adapter,
    )


class ModelServerDirectory:
    """A `Directory`: reads the ModelServer every few seconds, and at once when a watch reports a change.

    Requests are needed because a watch may be delayed without limit: only for a requested object it is known when it
    was current.
    """

    def __init__(self, api: ModelServerApi, name: str) -> None:
        self._api, self._name = api, name
        self._uid = self._version = ""
        self._changed = asyncio.Event()

    async def changes(self) -> AsyncIterator[View]:
        """See `Directory`. A deleted ModelServer has no servers, also if another one with its name replaced it."""
        loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self._changed.clear()
                asked = loop.time()
                with contextlib.suppress(ApiError, TimeoutError):
                    async with asyncio.timeout(CONFIRM_SECONDS):
                        statuses = await self._statuses()
                    for status in statuses:
                        yield View(status, asked)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), CONFIRM_SECONDS)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _statuses(self) -> list[ModelServerStatus]:
        try:
            found = await self._api.get_model_server(self._name, patience_seconds=0.0)
        except ApiError as error:
            if error.status != 404:
                raise
            return [ModelServerStatus()]
        earlier, self._uid = self._uid, found["metadata"]["uid"]
        self._version = found["metadata"]["resourceVersion"]
        status = read_status(found.get("status") or {})
        # Another ModelServer counts its updates from 0 again, and may have reached the number of the earlier one.
        return [status] if earlier in ("", self._uid) else [ModelServerStatus(), status]

    async def _watch(self) -> None:
        failures = 0
        while True:
            with contextlib.suppress(ApiError):
                async with self._api.watch_model_server(self._name, self._version) as events:
                    async for event in events:
                        failures = 0
                        if event["type"] != "BOOKMARK":
                            self._changed.set()
            failures += 1
            await asyncio.sleep(retry_pause(failures, random.random()))


async def _spec(name: str, field: str, api: ModelServerApi) -> Mapping[str, Any]:
    loop = asyncio.get_running_loop()
    deadline, tries = loop.time() + CREATED_SECONDS, 0
    while True:
        try:
            found = await api.get_model_server(name, patience_seconds=CREATED_SECONDS)
            spec: Mapping[str, Any] = found["spec"]
            return spec
        except ApiError as error:
            if error.status != 404:
                raise ModelError("NoModelServer", f"ModelServer {name} cannot be read: {error}") from error
        if loop.time() > deadline:
            raise ModelConfigError(
                "NoModelServer",
                f"model.{field}: there is no ModelServer {name} in this namespace; apply one with that name",
            )
        await asyncio.sleep(retry_pause(tries, random.random()))
        tries += 1


def read_status(status: Mapping[str, Any]) -> ModelServerStatus:
    """Parse the fields of a status that a runner needs: a newer operator may send more."""
    servers, policy = status.get("servers") or [], status.get("policy") or {}
    adapters = status.get("adapters") or {}
    return ModelServerStatus.model_validate(
        {
            "servers": [_some(server, SERVER_FIELDS) for server in servers],
            "policy": _some(policy, POLICY_FIELDS),
            "adapters": {name: _some(adapter, ADAPTER_FIELDS) for name, adapter in adapters.items()},
        }
    )


def _some(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in names and value is not None}
