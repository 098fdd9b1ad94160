"""Access to a cluster as the current user, by kubeconfig or from within a pod, and forwarded ports of pods, like those of
`kubectl port-forward`.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutctl.errors import CommandError

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

_NAMESPACE_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect() -> str:
    """Configure the clients of the kubernetes package for the user's cluster. Returns the user's namespace.

    Raises CommandError if the package is missing or no cluster is configured.
    """
    try:
        from kubernetes import config  # imported here because it takes a second
    except ImportError as error:
        raise CommandError(
            f"the Kubernetes client is not installed: {error}", hint="pip install 'agent-rollouts[cluster]'"
        ) from error
    try:
        config.load_config()
    except config.ConfigException as error:
        raise CommandError(
            f"no cluster is configured: {error}", hint="Set KUBECONFIG, or run this in a pod."
        ) from error
    with contextlib.suppress(config.ConfigException):
        _, active = config.list_kube_config_contexts()
        return str(active["context"].get("namespace", "default"))
    return _NAMESPACE_OF_POD.read_text() if _NAMESPACE_OF_POD.exists() else "default"


def refusal(error: Any) -> str:
    """Return an API server's message from a `kubernetes.client.ApiException`."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.reason} ({error.status})"


PIECE_BYTES = 1 << 16


@contextlib.asynccontextmanager
async def forwarded_port(core: "CoreV1Api", namespace: str, pod: str, port: int) -> AsyncIterator[int]:
    """Yield a port on 127.0.0.1 whose connections are forwarded to that port of the pod, each over its own stream."""
    connections: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(_carry(lambda: _open(core, namespace, pod, port), port, reader, writer))
        connections.add(connection)
        connection.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def _open(core: "CoreV1Api", namespace: str, pod: str, port: int) -> Any:
    from kubernetes.stream import portforward

    return portforward(core.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port))


async def _carry(
    open_stream: Callable[[], Any], port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        stream = await asyncio.to_thread(open_stream)
        # The library wraps its socket in an own type. This takes the real socket out of it.
        far = socket.socket(fileno=stream.socket(port).detach())
        far_reader, far_writer = await asyncio.open_connection(sock=far)
    except Exception:  # noqa: BLE001 whatever the error, the caller's connection is closed
        writer.close()
        return
    try:
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    finally:
        for end in (writer, far_writer):
            end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
