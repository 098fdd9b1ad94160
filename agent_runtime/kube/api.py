"""Calls of a runner to the Kubernetes API, retried until an API server has restarted.

Authentication, TLS and token renewal are those of the official client. Objects stay plain JSON, because only a few
fields of most are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from rollout_api.base import API_GROUP, API_VERSION
from rollout_api.nesting import read_json
from rollout_api.server_side_apply import APPLY_TYPE, apply_body

JsonObject = dict[str, Any]

# An API server that is restarted answers again after 20 to 60 s.
PATIENCE_SECONDS = 120.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
# Longer than a healthy API server takes. On a connection that drops packets, only one attempt is lost.
REQUEST_SECONDS = 15.0
# The API server ends a watch after this time, and a connection that is silent for longer is dead. So a connection that
# drops packets is detected within 90 s, without bookmarks.
WATCH_SECONDS, WATCH_GRACE_SECONDS = 60, 15.0
# Sandboxes in one response of a search through all of the namespace.
PAGE = 100
# How long a denied create is retried: a starting API server denies requests until it has read the roles.
DENIAL_PATIENCE_SECONDS = 5.0
TRANSIENT_STATUSES = frozenset({429, 500, 502, 503, 504})
SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
JSON_TYPE = "application/json"
# Without a parameter the client would serialize the body once more.
SERIALIZED_TYPE = f"{APPLY_TYPE}; charset=utf-8"


class ApiError(Exception):
    """The API server refused a call. `status` is the HTTP status, 0 without a response; `reason` is its one-word
    reason.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class KubeApi:
    """Client of the API server for a runner in one namespace. All calls raise ApiError."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self.namespace = namespace
        self._client = client.ApiClient(configuration)
        self._group = f"/apis/{API_VERSION}/namespaces/{namespace}"

    @classmethod
    async def connect(cls, namespace: str) -> KubeApi:
        """Connect with the pod's service account, or outside a cluster with the kubeconfig of KUBECONFIG."""
        configuration = client.Configuration()
        try:
            if SERVICE_ACCOUNT_TOKEN.exists():
                config.load_incluster_config(client_configuration=configuration)
            else:
                await config.load_kube_config(
                    config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration
                )
        except config.ConfigException as error:
            raise ApiError(
                0,
                "NotConfigured",
                f"there is no {SERVICE_ACCOUNT_TOKEN} here, and the kubeconfig cannot be used ({error}); set "
                "KUBECONFIG",
            ) from error
        return cls(configuration, namespace)

    async def close(self) -> None:
        await self._client.close()

    async def get_job(self, name: str, *, patience_seconds: float = PATIENCE_SECONDS) -> JsonObject:
        return await self._call("GET", f"/rolloutjobs/{name}", patience_seconds=patience_seconds)

    async def get_shard(self, name: str, *, patience_seconds: float = PATIENCE_SECONDS) -> JsonObject:
        return await self._call("GET", f"/rolloutshards/{name}", patience_seconds=patience_seconds)

    async def apply_report(
        self, name: str, report: Mapping[str, Any], *, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Server-side apply the whole status of a RolloutShard. ApiError 404 if it does not exist."""
        query = [("fieldManager", "runner"), ("force", "true")]
        metadata = {"name": name, "namespace": self.namespace}
        body = {"apiVersion": API_VERSION, "kind": "RolloutShard", "metadata": metadata, "status": report}
        path = f"/rolloutshards/{name}/status"
        await self._call("PATCH", path, query, apply_body(body), SERIALIZED_TYPE, patience_seconds=patience_seconds)

    async def get_model_server(self, name: str, *, patience_seconds: float = PATIENCE_SECONDS) -> JsonObject:
        return await self._call("GET", f"/modelservers/{name}", patience_seconds=patience_seconds)

    def watch_model_server(
        self, name: str, resource_version: str
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[JsonObject]]:
        """Like `watch_sandboxes`, for the ModelServer of that name."""
        return self._watch("/modelservers", ("fieldSelector", f"metadata.name={name}"), resource_version)

    async def create_sandbox(self, sandbox: JsonObject, *, patience_seconds: float = PATIENCE_SECONDS) -> JsonObject:
        """Create a Sandbox with a random name. An existing one of the same name and owner comes from an earlier attempt
        of this call whose response was lost: it is returned.
        """
        name = sandbox["metadata"]["name"]
        try:
            return await self._call("POST", "/sandboxes", body=sandbox, patience_seconds=patience_seconds)
        except ApiError as error:
            if error.status != 409:
                raise
            there = await self.get_sandbox(name, patience_seconds=patience_seconds)
            if owner_uid(there) != owner_uid(sandbox):
                raise
            return there

    async def get_sandbox(self, name: str, *, patience_seconds: float = PATIENCE_SECONDS) -> JsonObject:
        """Return a Sandbox. ApiError 404 if it does not exist."""
        return await self._call("GET", f"/sandboxes/{name}", patience_seconds=patience_seconds)

    async def delete_sandbox(self, name: str) -> None:
        """Delete a Sandbox if it exists; garbage collection deletes its pod."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", f"/sandboxes/{name}", body=body, patience_seconds=PATIENCE_SECONDS)
        except ApiError as error:
            if error.status != 404:
                raise

    async def list_sandboxes(self, selector: str) -> tuple[list[JsonObject], str]:
        """Return the Sandboxes with these labels, and the resource version to watch from."""
        found = await self._call("GET", "/sandboxes", [("labelSelector", selector)], patience_seconds=PATIENCE_SECONDS)
        return found["items"], found["metadata"]["resourceVersion"]

    async def has_sandbox(self, holds: Callable[[JsonObject], bool]) -> bool:
        """Whether the namespace has such a Sandbox. Reads only as many as needed. Not retried."""
        page = ""
        while True:
            query = [("limit", str(PAGE)), *([("continue", page)] if page else [])]
            found = await self._call("GET", "/sandboxes", query, patience_seconds=0.0)
            if any(map(holds, found["items"])):
                return True
            page = found["metadata"].get("continue") or ""
            if not page:
                return False

    async def list_sandbox_pools(self) -> list[JsonObject]:
        found = await self._call("GET", "/sandboxpools", patience_seconds=PATIENCE_SECONDS)
        items: list[JsonObject] = found["items"]
        return items

    def watch_sandboxes(
        self, selector: str, resource_version: str
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[JsonObject]]:
        """Yield watch events from a resource version, bookmarks included, until the API server ends the watch. Not
        retried.

        ApiError 410, here or later, if that version is too old: list again.
        """
        return self._watch("/sandboxes", ("labelSelector", selector), resource_version)

    @contextlib.asynccontextmanager
    async def _watch(
        self, path: str, selector: tuple[str, str], resource_version: str
    ) -> AsyncIterator[AsyncIterator[JsonObject]]:
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            selector,
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(WATCH_SECONDS)),
        ]
        silence = aiohttp.ClientTimeout(
            total=None, sock_connect=REQUEST_SECONDS, sock_read=WATCH_SECONDS + WATCH_GRACE_SECONDS
        )
        try:
            response = await self._send("GET", path, query, timeout=silence)
            try:
                if response.status >= 400:
                    raise _api_error(response.status, await response.read())
                yield _events(response)
            finally:
                response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unanswered(error) from error

    async def _call(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: JsonObject | bytes | None = None,
        content_type: str = JSON_TYPE,
        *,
        patience_seconds: float,
    ) -> JsonObject:
        started = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        tries = 0
        while True:
            asked = 0.0
            try:
                response = await self._send(method, path, query or [], body, content_type, timeout=timeout)
                reply = await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as cause:
                error, patience = _unanswered(cause), patience_seconds
            else:
                if response.status < 400:
                    found: JsonObject = read_json(reply)
                    return found
                error = _api_error(response.status, reply)
                patience = _patience(method, error, patience_seconds)
                with contextlib.suppress(ValueError):
                    asked = min(float(response.headers.get("Retry-After", "0")), LONGEST_PAUSE_SECONDS)
            pause = max(asked, retry_pause(tries, random.random()))
            if time.monotonic() - started + pause > patience:
                raise error
            await asyncio.sleep(pause)
            tries += 1

    async def _send(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        body: JsonObject | bytes | None = None,
        content_type: str = JSON_TYPE,
        *,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": JSON_TYPE, "Content-Type": content_type}
        _, url, headers, sent, _ = await self._client.param_serialize(
            method, self._group + path, None, query, headers, body, auth_settings=["BearerToken"]
        )
        answer = await self._client.call_api(method, url, headers, sent, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        return response


def retry_pause(tries: int, luck: float) -> float:
    """Return the seconds before the next attempt: doubling, minus up to half by `luck` in [0, 1), so that runners
    spread.
    """
    full = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(tries, 10))
    return full * (1 - luck / 2)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[JsonObject]:
    async for line in response.content:
        if not line.endswith(b"\n"):
            # The connection broke within an event; the next watch yields it again.
            return
        try:
            event: JsonObject = read_json(line)
        except ValueError as error:  # A proxy ended the response with its own error page.
            raise _unanswered(error) from error
        if event["type"] == "ERROR":
            status = event["object"]
            raise ApiError(status.get("code", 500), status.get("reason", "Unknown"), status.get("message", ""))
        yield event


def _api_error(status: int, body: bytes) -> ApiError:
    """Return the error in a Status object, or in any other response."""
    try:
        answered = json.loads(body)
        return ApiError(status, answered.get("reason") or "Unknown", answered.get("message") or f"status {status}")
    except (ValueError, AttributeError):
        return ApiError(status, "Unknown", f"status {status}: {body[:200].decode(errors='replace')}")


def _unanswered(error: Exception) -> ApiError:
    return ApiError(0, "Unreachable", f"the API server does not answer ({type(error).__name__} {error})")


def _patience(method: str, error: ApiError, patience_seconds: float) -> float:
    """Return for how long to retry the call after this response."""
    if error.status in TRANSIENT_STATUSES or _is_of_quota(error):
        return patience_seconds
    return DENIAL_PATIENCE_SECONDS if method == "POST" and is_denied_role(error) else 0.0


def _is_of_quota(error: ApiError) -> bool:
    """Whether a quota is the cause. That ends when objects of the namespace are deleted, a new ResourceQuota has been
    counted, or concurrent updates of its count have ended.
    """
    quota = ("exceeded quota:", "status unknown for quota:", "cannot be fulfilled on resourcequotas")
    return error.status in (403, 409) and any(words in error.message for words in quota)


def is_denied_role(error: ApiError) -> bool:
    """Whether a missing role is the cause, and not a quota, a policy or a namespace in deletion."""
    return error.status == 401 or (error.status == 403 and " cannot " in error.message and API_GROUP in error.message)


def owner_uid(sandbox: Mapping[str, Any]) -> str | None:
    owners: Sequence[Mapping[str, Any]] = sandbox["metadata"].get("ownerReferences") or []
    return next((owner["uid"] for owner in owners if owner.get("kind") == "RolloutJob"), None)
