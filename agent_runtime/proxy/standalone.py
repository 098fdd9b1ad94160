"""The session proxy as a server of its own: sessions in object storage, shared with other replicas."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from agent_runtime.models.base import Model
from agent_runtime.proxy.admin import Admin
from agent_runtime.proxy.app import serving
from agent_runtime.proxy.handler import Handler
from agent_runtime.proxy.metrics import open_meter
from agent_runtime.proxy.ownership import StoredSessions
from agent_runtime.proxy.peers import Peers
from agent_runtime.proxy.relay.hub import Hub
from agent_runtime.proxy.store import SessionStore
from agent_runtime.recording.store import Store


@dataclass(frozen=True)
class Standalone:
    """A proxy that serves."""

    sessions: StoredSessions
    address: str
    """URL at which other replicas reach it."""
    port: int


@contextlib.asynccontextmanager
async def standalone_proxy(
    store: Store,
    model: Model,
    admin_key: str | None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    address: str | None = None,
) -> AsyncIterator[Standalone]:
    """Serve sessions below `store` until the context ends; without an admin key requests need no key.

    `address` is `http://HOST:PORT` where nothing else is given; replicas in pods give the pod's own. Where the model is a
    relay's hub, its workers connect here.
    """
    hub = model if isinstance(model, Hub) else None
    meter, peers = open_meter(), Peers()
    sessions = StoredSessions(SessionStore(store), model, address or f"http://{host}:{port}", peers, meter)
    handler = Handler(sessions, admin=Admin(sessions, admin_key, lambda: hub.workers if hub else 0), meter=meter)
    runner, listening = await serving(handler, host, port, hub, admin_key)
    if address is None:
        sessions.address = f"http://{host}:{listening}"
    sweeping = asyncio.ensure_future(sessions.sweep())
    try:
        yield Standalone(sessions, sessions.address, listening)
    finally:
        sweeping.cancel()
        await runner.cleanup()
        await sessions.close()
        await peers.close()
