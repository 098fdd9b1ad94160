"""An API server in memory with the interface of `KubeApi`, and the operator's loop on it, with real queues and caches."""

import asyncio
import base64
import contextlib
import copy
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from rollout_api.on_cluster.operator_config import Budgets, Images, LeaseSettings, OperatorConfig
from rollout_operator import model_server, rollout_job, sandbox, sandbox_pool
from rollout_operator.api import ApiError, KubeApi
from rollout_operator.cache import Cache
from rollout_operator.events import EventRecorder
from rollout_operator.execute import Execution
from rollout_operator.executor_contact import ExecutorContact
from rollout_operator.keys import KeyRing
from rollout_operator.loop import Loop
from rollout_operator.metrics import Metrics
from rollout_operator.model_server.operations import ServerOperations
from rollout_operator.world import Memory
from tests.support.virtual_time import virtual_time

Json = dict[str, Any]
Refuse = Callable[[str, str, Mapping[str, Any]], tuple[int, str] | None]
"""(verb, kind, body) -> status and message of a refusal."""
CONFIG = OperatorConfig(images=Images(runtime="r", executor="e"), lease=LeaseSettings(namespace="x"))


class MemoryApi:
    """Objects by kind, namespace and name. `sink` gets every change at once, as from a watch."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.writes: list[str] = []
        self.refuse: Refuse = lambda verb, kind, body: None
        self.admit: Callable[[Json], Json] = lambda body: body
        """What becomes of an object that is created."""
        self.seconds = 0.0
        """Time of one write."""
        self.most_at_once = self._at_once = 0
        """Writes under way at the same time."""
        self.sink: Any = None
        self._version = 0

    def put(self, kind: str, obj: Json) -> Json:
        """Store an object unchanged, and notify the sink."""
        self._version += 1
        metadata = obj["metadata"]
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        metadata["resourceVersion"] = str(self._version)
        if strings := obj.pop("stringData", None):
            obj["data"] = {field: base64.b64encode(text.encode()).decode() for field, text in strings.items()}
        self.objects[kind, metadata.get("namespace", ""), metadata["name"]] = obj
        if self.sink:
            self.sink.seen(kind, copy.deepcopy(obj), listed=False)
        return copy.deepcopy(obj)

    def of(self, kind: str) -> list[Json]:
        """Return all objects of a kind."""
        return [obj for (found, _, _), obj in self.objects.items() if found == kind]

    async def find(self, kind: str, namespace: str, name: str) -> Json | None:
        await asyncio.sleep(0)
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    async def create(self, body: Mapping[str, Any], *, dry_run: bool = False) -> Json:
        if dry_run:
            return self.admit(copy.deepcopy(dict(body)))
        await self._write("create", body["kind"], body)
        if (body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"]) in self.objects:
            raise ApiError(409, "exists")
        return self.put(body["kind"], self.admit(copy.deepcopy(dict(body))))

    async def replace(self, body: Mapping[str, Any]) -> Json:
        await self._write("replace", body["kind"], body)
        return self.put(body["kind"], copy.deepcopy(dict(body)))

    async def merge(self, kind: str, namespace: str, name: str, change: Mapping[str, Any]) -> Json:
        await self._write("merge", kind, change)
        return self.put(kind, _merged(self._get(kind, namespace, name), change))

    async def set_pod_condition(self, namespace: str, name: str, uid: str, condition: Mapping[str, Any]) -> Json:
        await self._write("condition", "Pod", condition)
        pod = self._get("Pod", namespace, name)
        return self.put("Pod", {**pod, "status": {**pod.get("status", {}), "conditions": [dict(condition)]}})

    async def apply_status(self, obj: Mapping[str, Any], kind: str, status: Mapping[str, Any], manager: str) -> Json:
        await self._write("status", kind, status)
        found = self._get(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        if found["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            raise ApiError(409, "please apply your changes to the latest version and try again")
        return self.put(kind, {**found, "status": copy.deepcopy(dict(status))})

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        uid: str,
        grace_seconds: int | None = None,
        *,
        foreground: bool = False,
    ) -> Mapping[str, Any]:
        await self._write("delete", kind, {})
        obj = self._get(kind, namespace, name)
        del self.objects[kind, namespace, name]
        self.sink.gone(kind, obj)
        return {"kind": "Status", "metadata": {}}

    async def _write(self, verb: str, kind: str, body: Mapping[str, Any]) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(self.seconds)
        self._at_once -= 1
        self.writes.append(f"{verb} {kind}")
        if no := self.refuse(verb, kind, body):
            raise ApiError(*no)

    def _get(self, kind: str, namespace: str, name: str) -> Json:
        if (kind, namespace, name) not in self.objects:
            raise ApiError(404, f"{kind} {name} not found")
        return copy.deepcopy(self.objects[kind, namespace, name])


@contextlib.asynccontextmanager
async def operator_on(
    api: MemoryApi,
    config: OperatorConfig = CONFIG,
    may_write: Callable[[], bool] = lambda: True,
    writes_in_flight: int = 16,
) -> AsyncIterator[Loop]:
    """Run the operator's loop on all stored objects and on every change, in virtual time."""
    with virtual_time():
        kube = cast("KubeApi", api)
        cache, memory, keys = Cache(), Memory(), KeyRing(kube)
        operations = ServerOperations(cast("Any", None), may_ask=lambda: False)
        limits = Budgets(creates_per_second=10_000, deletes_per_second=10_000, writes_in_flight=writes_in_flight)
        execution = Execution(kube, cache, memory, keys, operations, ExecutorContact(), limits, may_write)
        metrics = Metrics(cache, lambda: True)
        controllers = [rollout_job.CONTROLLER, sandbox.CONTROLLER, sandbox_pool.CONTROLLER, model_server.CONTROLLER]
        events = EventRecorder(kube)
        loop = Loop(controllers, config, execution, events, metrics)
        for (kind, _, _), obj in api.objects.items():
            loop.seen(kind, copy.deepcopy(obj), listed=True)
        api.sink = loop
        work = asyncio.create_task(loop.run())
        loop.lead()
        try:
            yield loop
        finally:
            work.cancel()
            await asyncio.wait([work])


async def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Return the condition's first true value."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):  # noqa: ASYNC110 - objects change without telling anybody
            await asyncio.sleep(0.01)
    assert found, what
    return found


def _merged(obj: Json, change: Mapping[str, Any]) -> Json:
    for key, value in change.items():
        if value is None:
            obj.pop(key, None)
        elif isinstance(value, Mapping):
            obj[key] = _merged(dict(obj.get(key) or {}), value)
        else:
            obj[key] = value
    return obj
