"""A stand-in for the API server in tests without a cluster: list, watch, create, get and delete of Sandboxes.

The end-to-end tests run the same provider on a real API server. This stand-in can lose a reply, throttle, forget old
versions, drop watches and be unavailable exactly when a test needs it.
"""

import asyncio
import copy
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

COLLECTION = "/apis/rollout.dev/v1alpha1/namespaces/{namespace}/sandboxes"
NAMESPACE = "team"


def status_body(code: int, reason: str, message: str) -> dict[str, Any]:
    """A Kubernetes Status object."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def refuse(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(status_body(code, reason, message), status=code, headers=headers)


class StandInApi:
    """Sandboxes of one namespace. `changed(type, sandbox)` notifies the stand-in operator."""

    def __init__(self, changed: Callable[[str, dict[str, Any]], None]) -> None:
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.pools: list[dict[str, Any]] = []
        """SandboxPools of the namespace."""
        self.writes: list[tuple[str, str]] = []
        """(verb, name) of each write that a runner asked for."""
        self.trouble: list[Callable[[web.Request], Awaitable[web.Response | None]]] = []
        """Each meets one create, get, list or delete and may answer it in the server's place."""
        self.lists = self.watches = 0
        self._changed = changed
        self._version = 100
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._oldest = 0
        self._watchers: set[asyncio.Queue[dict[str, Any] | bytes | None]] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen; on the same port as before an outage."""
        application = web.Application()
        application.router.add_get(COLLECTION, self._list_or_watch)
        application.router.add_get(COLLECTION.replace("sandboxes", "sandboxpools"), self._list_pools)
        application.router.add_post(COLLECTION, self._create)
        application.router.add_get(COLLECTION + "/{name}", self._get)
        application.router.add_delete(COLLECTION + "/{name}", self._delete)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop answering; the objects are kept."""
        self.drop_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def drop_watches(self) -> None:
        """End the watches, as the real API server does with slow watchers."""
        for queue in list(self._watchers):
            queue.put_nowait(None)

    def garble_watches(self) -> bool:
        """End the watches with an error page, as a proxy may do. Return whether there was a watch."""
        watchers = list(self._watchers)
        for queue in watchers:
            queue.put_nowait(b"<html>502 Bad Gateway</html>\n")
            queue.put_nowait(None)
        return bool(watchers)

    def silence_watches(self) -> None:
        """Send nothing more over the watches, and keep their connections open."""
        self._watchers.clear()

    def forget_history(self) -> None:
        """Answer 410 Gone to watches from older versions, as after a compaction."""
        self._oldest = self._version
        self._history.clear()

    def set_status(self, name: str, status: dict[str, Any]) -> None:
        """Write a status, as the operator does."""
        sandbox = self.sandboxes[name]
        sandbox["status"] = status
        self._record("MODIFIED", sandbox)

    def set_spec(self, name: str, **changes: Any) -> None:
        """Change fields of a spec, as the operator does."""
        sandbox = self.sandboxes[name]
        sandbox["spec"] = {**sandbox["spec"], **changes}
        self._record("MODIFIED", sandbox)

    def remove(self, name: str) -> None:
        """Delete a Sandbox, as a person or garbage collection does."""
        sandbox = self.sandboxes.pop(name)
        self._record("DELETED", sandbox)

    def _record(self, kind: str, sandbox: dict[str, Any]) -> None:
        self._version += 1
        sandbox["metadata"]["resourceVersion"] = str(self._version)
        event = {"type": kind, "object": copy.deepcopy(sandbox)}
        self._history.append((self._version, event))
        for queue in self._watchers:
            queue.put_nowait(event)
        self._changed(kind, sandbox)

    async def _meet_trouble(self, request: web.Request) -> web.Response | None:
        return await self.trouble.pop(0)(request) if self.trouble else None

    async def _create(self, request: web.Request) -> web.StreamResponse:
        sandbox = await request.json()
        name = sandbox["metadata"]["name"]
        if (answer := await self._meet_trouble(request)) is not None:
            return answer
        if name in self.sandboxes:
            return refuse(409, "AlreadyExists", f'sandboxes.rollout.dev "{name}" already exists')
        self.create(sandbox)
        return web.json_response(sandbox, status=201)

    def create(self, sandbox: dict[str, Any]) -> None:
        """Store a Sandbox, as a create does whose reply may be lost."""
        self.writes.append(("create", sandbox["metadata"]["name"]))
        sandbox["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"}
        self.sandboxes[sandbox["metadata"]["name"]] = sandbox
        self._record("ADDED", sandbox)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if (answer := await self._meet_trouble(request)) is not None:
            return answer
        name = request.match_info["name"]
        if name not in self.sandboxes:
            return refuse(404, "NotFound", f'sandboxes.rollout.dev "{name}" not found')
        return web.json_response(self.sandboxes[name])

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        if (answer := await self._meet_trouble(request)) is not None:
            return answer
        name = request.match_info["name"]
        if name not in self.sandboxes:
            return refuse(404, "NotFound", f'sandboxes.rollout.dev "{name}" not found')
        self.writes.append(("delete", name))
        self.remove(name)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _matches(self, request: web.Request, sandbox: dict[str, Any]) -> bool:
        wanted = [term.split("=") for term in request.query.get("labelSelector", "").split(",") if term]
        return all(sandbox["metadata"]["labels"].get(key) == value for key, value in wanted)

    async def _list_pools(self, request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": self.pools})

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request)
        if (answer := await self._meet_trouble(request)) is not None:
            return answer
        self.lists += 1
        items = [sandbox for sandbox in self.sandboxes.values() if self._matches(request, sandbox)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self._oldest:
            gone = status_body(410, "Expired", f"too old resource version: {since} ({self._oldest})")
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        queue: asyncio.Queue[dict[str, Any] | bytes | None] = asyncio.Queue()
        for version, past in self._history:
            if version > since:
                queue.put_nowait(past)
        self._watchers.add(queue)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "60"))):
                while (event := await queue.get()) is not None:
                    if isinstance(event, bytes):
                        await response.write(event)
                    elif self._matches(request, event["object"]):
                        await response.write(json.dumps(event).encode() + b"\n")
                    elif request.query.get("allowWatchBookmarks") == "true":
                        bookmark = {"kind": "Sandbox", "metadata": {"resourceVersion": str(self._version)}}
                        await response.write(json.dumps({"type": "BOOKMARK", "object": bookmark}).encode() + b"\n")
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watchers.discard(queue)
        return response
