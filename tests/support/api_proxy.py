"""A proxy in front of a real API server, so that a call can fail exactly when a test needs it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from kubernetes.aio import client

from agent_runtime.kube.api import KubeApi
from tests.support.cluster import Cluster
from tests.support.s3 import serving

Trouble = Callable[[web.Request], Awaitable[web.Response]]
"""Handles one call instead of the API server. It may forward the call, and return another answer."""


@dataclass
class ApiProxy:
    """Forwards all calls that meet no trouble, with the credentials of the cluster's kubeconfig."""

    cluster: Cluster
    trouble: list[tuple[str, Trouble]] = field(default_factory=list)
    """Troubles by method. Each one handles the next call of its method that is not a watch."""
    forgotten: int = 0
    """Number of next watches that request a version that the API server no longer has."""
    seen: list[str] = field(default_factory=list)
    """Answers of the API server, as `POST sandboxes 409`, and each event of a watch, as `WATCH sandboxes MODIFIED`."""
    _watches: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def serve(self, namespace: str) -> AsyncIterator[KubeApi]:
        """Yield a runner's client in the namespace, which uses this proxy."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        async with (
            _kubectl_proxy(self.cluster) as self._upstream,
            aiohttp.ClientSession() as self._session,
            serving(application) as port,
        ):
            api = KubeApi(client.Configuration(host=f"http://127.0.0.1:{port}"), namespace)
            yield api
            await api.close()
            self.break_watches()

    def break_watches(self) -> None:
        """Cut off all open watches, in the middle of their events."""
        for watch in self._watches:
            watch.cancel()

    async def pass_on(self, request: web.Request) -> web.Response:
        """Return the API server's answer."""
        method, url = request.method, f"{self._upstream}{request.raw_path}"
        headers = {"Content-Type": request.headers.get("Content-Type", "")}
        async with self._session.request(method, url, data=await request.read(), headers=headers) as answer:
            self.seen.append(f"{method} {_plural(request)} {answer.status}")
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        for met in self.trouble:
            if met[0] == request.method:
                self.trouble.remove(met)
                return await met[1](request)
        return await self.pass_on(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        if self.forgotten:
            self.forgotten -= 1
            query["resourceVersion"] = "1"
        response = web.StreamResponse()
        async with self._session.get(f"{self._upstream}{request.path}", params=query) as answer:
            response.set_status(answer.status)
            await response.prepare(request)

            async def copy() -> None:
                async for line in answer.content:
                    self.seen.append(f"WATCH {_plural(request)} {json.loads(line)['type']}")
                    await response.write(line)

            copying = asyncio.create_task(copy())
            self._watches.add(copying)
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await copying
            self._watches.discard(copying)
        if request.transport is not None:
            request.transport.close()
        return response


def _plural(request: web.Request) -> str:
    parts = request.path.split("/")
    return "/".join(parts[parts.index("namespaces") + 2 :][::2])


@contextlib.asynccontextmanager
async def _kubectl_proxy(cluster: Cluster) -> AsyncIterator[str]:
    """Run the API server's proxy on loopback, which needs no credentials."""
    command = (cluster.program("kubectl"), "--kubeconfig", str(cluster.kubeconfig), "proxy", "--port=0")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        said = (await process.stdout.readline()).decode()  # Starting to serve on 127.0.0.1:PORT
        yield f"http://{said.split()[-1]}"
    finally:
        process.kill()
        await process.wait()
