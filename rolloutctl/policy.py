"""For trainers: change the policy of a ModelServer and wait until it is served.

    async with ServedPolicy.connect("qwen") as policy:
        await policy.update(7, "s3://bucket/step-7")

Needs the extra `cluster`. docs/policy-updates.md describes what happens during an update.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Self

from rollout_api.base import API_VERSION
from rollout_api.cluster import own_model_server_name
from rolloutctl.cluster_access import connect, refusal

CHECK_SECONDS: Final = 0.5
"""Interval between two reads of the ModelServer. An update takes seconds."""

PATIENCE_SECONDS: Final = 1800.0
"""Time limit for an update or the start of servers. It covers the operator's two attempts to load (720 s each) and a fetch.
"""

JsonObject = Mapping[str, Any]


class PolicyNotServed(Exception):
    """The servers do not serve the version, or do not sleep. The message has the operator's reason."""


class ServedPolicy:
    """The policy of ModelServer `name`, or one of its adapters. `objects` is a `kubernetes.aio.client.CustomObjectsApi`."""

    def __init__(
        self,
        objects: Any,
        namespace: str,
        name: str,
        *,
        adapter: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.name, self.adapter = name, adapter
        self._objects, self._patience = objects, patience_seconds
        self._where = (*API_VERSION.split("/"), namespace, "modelservers", name)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        server: str | None = None,
        *,
        job: str | None = None,
        adapter: str | None = None,
        namespace: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> AsyncIterator[Self]:
        """Connect to the ModelServer `server`, or to the own one of `job` (`model.server`), by kubeconfig or from within a
        pod. With `adapter`, versions are those of that entry of `spec.adapters`.

        Raises CommandError if no cluster is configured or the Kubernetes client is not installed.
        """
        if (server is None) == (job is None):
            raise ValueError("give exactly one of server and job")
        place = connect()
        from kubernetes.aio import client, config

        await config.load_config()
        async with client.ApiClient() as api:
            objects = client.CustomObjectsApi(api)
            name = server or own_model_server_name(job or "")
            yield cls(objects, namespace or place, name, adapter=adapter, patience_seconds=patience_seconds)

    async def update(self, version: int, uri: str | None = None, digest: str | None = None) -> None:
        """Set a version for all servers and wait until it is served. Versions must grow; mode `Pull` needs `uri`.

        A repeated call with the same values, as after a crash, only continues to wait. Servers that sleep wake up for it,
        but not for an adapter. Raises PolicyNotServed.
        """
        # None removes the values of the previous version.
        new = {"version": version, "uri": uri, "digest": digest}
        adapter = self.adapter
        await self._change({"policy": new, "asleep": None} if adapter is None else {"adapters": {adapter: new}})
        await self.served(version)

    async def served(self, version: int) -> None:
        """Wait until a version is served, for example 0 after the start of servers. Raises PolicyNotServed."""
        what = f"version {version}" if self.adapter is None else f"version {version} of adapter {self.adapter}"
        await self._wait(f"{what} is not served", lambda found: is_served(found, version, self.adapter))

    async def sleep(self) -> None:
        """Wait until all servers have released their accelerators' memory, which the caller may use then.

        Running calls wait until `wake` or `update`. The ModelServer needs `sleep: true`. Raises PolicyNotServed.
        """
        await self._change({"asleep": True})
        await self._wait("not all servers have released their memory", is_asleep)

    async def wake(self) -> None:
        """Let the servers continue with the version that they had, or load the one that was set meanwhile. Release the
        memory before. Raises PolicyNotServed.
        """
        found = await self._change({"asleep": None})
        version, status = _wanted(found, self.adapter), _status(found, self.adapter)
        if status.get("failed") == version:
            # It failed before the servers slept, so they continue with the version before it.
            await self._wait("calls do not continue", lambda found: _serves(found, status["current"], self.adapter))
        else:
            await self.served(version)

    async def _change(self, spec: JsonObject) -> JsonObject:
        change = partial(
            self._objects.patch_namespaced_custom_object,
            *self._where,
            {"spec": spec},
            _content_type="application/merge-patch+json",
        )
        changed: JsonObject = await self._with_retries(change, time.monotonic() + self._patience)
        return changed

    async def _wait(self, trouble: str, is_over: Callable[[JsonObject], bool]) -> None:
        deadline = time.monotonic() + self._patience
        read = partial(self._objects.get_namespaced_custom_object, *self._where)
        while not is_over(found := await self._with_retries(read, deadline)):
            if time.monotonic() > deadline:
                raise PolicyNotServed(
                    f"ModelServer {self.name}: {trouble} after {self._patience:g} s: {_progress(found)}"
                )
            await asyncio.sleep(CHECK_SECONDS)

    async def _with_retries(self, request: Callable[[], Awaitable[Any]], deadline: float) -> Any:
        """Return the API server's response to a request. Temporary errors are retried until the deadline."""
        from aiohttp import ClientError
        from kubernetes.aio.client import ApiException

        while True:
            try:
                return await request()
            except (ApiException, ClientError, OSError) as error:
                is_temporary = (
                    not isinstance(error, ApiException) or error.status == 429 or (error.status or 500) >= 500
                )
                if not is_temporary or time.monotonic() > deadline:
                    words = (
                        refusal(error) if isinstance(error, ApiException) else f"the cluster does not respond: {error}"
                    )
                    raise PolicyNotServed(f"ModelServer {self.name}: {words}") from error
            await asyncio.sleep(CHECK_SECONDS)


def is_served(found: JsonObject, version: int, adapter: str | None = None) -> bool:
    """Whether a ModelServer, as read from the API server, serves a version, of an adapter if one is named. Raises
    PolicyNotServed if it cannot any more.
    """
    name, wanted = found["metadata"]["name"], _wanted(found, adapter)
    policy = _status(found, adapter)
    if wanted > version:
        raise PolicyNotServed(
            f"ModelServer {name}: version {wanted} was requested in the meantime, instead of {version}"
        )
    if policy.get("failed") == version:
        why = policy.get("failedBecause") or _progress(found)
        raise PolicyNotServed(
            f"ModelServer {name}: version {version} failed: {why}; give a higher version to try again"
        )
    return _serves(found, version, adapter)


def _serves(found: JsonObject, version: int, adapter: str | None) -> bool:
    """Whether calls get a version now, whichever one is wanted. Raises PolicyNotServed for an Invalid ModelServer."""
    _refuse_invalid(found)
    status = found.get("status", {})
    ready = [server for server in status.get("servers", []) if server.get("ready")]
    if adapter is not None:
        ready = [server for server in ready if server.get("adapters", {}).get(adapter) == version]
    is_open = status.get("policy", {}).get("gate") == "Open"
    return bool(ready) and is_open and _status(found, adapter).get("current") == version


def is_asleep(found: JsonObject) -> bool:
    """Whether all servers of a ModelServer have released their memory. Raises PolicyNotServed if they cannot."""
    _refuse_invalid(found)
    return bool(found["spec"].get("asleep")) and found.get("status", {}).get("policy", {}).get("step") == "Asleep"


def _refuse_invalid(found: JsonObject) -> None:
    invalid = _condition(found.get("status", {}), "Invalid")
    if invalid.get("status") == "True" and invalid.get("observedGeneration") == found["metadata"].get("generation"):
        raise PolicyNotServed(f"ModelServer {found['metadata']['name']}: {invalid.get('message')}")


def _wanted(found: JsonObject, adapter: str | None) -> int:
    spec = found["spec"]
    policy = spec.get("policy", {}) if adapter is None else spec.get("adapters", {}).get(adapter, {})
    return int(policy.get("version", 0))


def _status(found: JsonObject, adapter: str | None) -> JsonObject:
    """Return the status of the policy, or of an adapter."""
    status = found.get("status", {})
    policy: JsonObject = status.get("policy", {}) if adapter is None else status.get("adapters", {}).get(adapter, {})
    return policy


def _condition(status: JsonObject, kind: str) -> JsonObject:
    return next((found for found in status.get("conditions", []) if found["type"] == kind), {})


def _progress(found: JsonObject) -> str:
    """Return reasons and messages of a ModelServer's conditions, which show its progress."""
    conditions = [_condition(found.get("status", {}), kind) for kind in ("PolicyLoaded", "Ready")]
    return (
        "; ".join(f"{one['reason']}: {one['message']}" for one in conditions if one)
        or "the operator has not processed it yet"
    )
