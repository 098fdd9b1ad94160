"""Forward a local port to a port of a pod through the API server, like `kubectl port-forward`."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from kubernetes.client import CoreV1Api
from kubernetes.stream import portforward

PIECE_BYTES = 1 << 16


@contextlib.asynccontextmanager
async def forwarded_port(core: CoreV1Api, namespace: str, pod: str, port: int) -> AsyncIterator[int]:
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


def _open(core: CoreV1Api, namespace: str, pod: str, port: int) -> Any:
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
