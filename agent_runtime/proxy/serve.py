"""The session proxy as a server: settings, sessions in object storage, start, and shutdown by SIGTERM."""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator
from yarl import URL

from agent_runtime.models.base import Model
from agent_runtime.models.factory import open_model
from agent_runtime.proxy.admin import Admin
from agent_runtime.proxy.app import serving
from agent_runtime.proxy.handler import Handler
from agent_runtime.proxy.metrics import open_meter
from agent_runtime.proxy.ownership import SessionStore, StoredSessions
from agent_runtime.proxy.peers import Peers
from agent_runtime.proxy.relay.hub import Hub
from agent_runtime.proxy.relay.worker import Worker
from agent_runtime.recording.store import Store
from agent_runtime.shared_tasks import until_stopped
from rollout_api.base import ApiModel, ShortText
from rollout_api.model import Endpoint, ModelSpec


@dataclass(frozen=True)
class Standalone:
    """A running proxy."""

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

    `address` is `http://HOST:PORT` by default; replicas in pods pass the pod's own. If the model is a relay's hub, its
    workers connect here.
    """
    hub = model if isinstance(model, Hub) else None
    session_store, meter = SessionStore(store), open_meter()
    peers = Peers(await session_store.replica_secret())
    sessions = StoredSessions(session_store, model, address or f"http://{host}:{port}", peers, meter)
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


ADMIN_KEY_VARIABLE = "ROLLOUT_PROXY_ADMIN_KEY"
"""Environment variable with the key for registering sessions and connecting workers."""

POD_IP_VARIABLE = "POD_IP"
"""Environment variable with the address at which other replicas reach this one; in a pod its own IP."""

LEAST_KEY = 16
"""Fewest characters of an admin key: a shorter one can be guessed."""

_GARBAGE_OBJECTS = 20_000
"""New objects between two garbage collections. Sessions keep many objects and create few cycles. With Python's default
of 700, collections took a quarter of a call's processor time (`python -m benchmarks session_proxy`).
"""

_LOG = logging.getLogger(__name__)


class Relay(ApiModel):
    """A model behind workers that connect to this proxy."""

    model: ShortText
    """Name of the model. Workers with another one are refused."""


class ProxySettings(ApiModel):
    """Settings of a standalone proxy. The model is exactly one of endpoint and relay."""

    store: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    """Where sessions are stored: a URI, or a folder."""
    endpoint: Endpoint | None = None
    """A model served by an existing endpoint."""
    relay: Relay | None = None
    """A model whose workers connect to this proxy."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Port to listen on; the default is PR #83's. 0: any free one."""
    keyless: bool = False
    """Every client that reaches the proxy may register sessions, read them, act in them and answer for the model."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.endpoint is None) == (self.relay is None):
            raise ValueError("give exactly one of endpoint and relay")
        return self


class BadKey(OSError):
    """The admin key is missing or invalid."""


def admin_key(file: Path | None, environ: Mapping[str, str], variable: str = ADMIN_KEY_VARIABLE) -> str:
    """Return the key from a file, or else from the environment. Raises BadKey."""
    if file is None:
        key, where = environ.get(variable, "").strip(), f"environment variable {variable}"
    else:
        try:
            key, where = file.read_text().strip(), str(file)
        except OSError as error:
            raise BadKey(f"{file}: {error.strerror}") from error
    if len(key) < LEAST_KEY or not key.isprintable() or " " in key:
        raise BadKey(
            f"{where}: expected a key of at least {LEAST_KEY} characters without spaces, got {len(key)} characters; "
            'create one with: python3 -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return key


async def serve_proxy(settings: ProxySettings, key: str | None, environ: Mapping[str, str]) -> None:
    """Serve until SIGTERM or SIGINT; then finish running calls. `key` is None for a keyless proxy.

    Raises ModelError, StorageError, OSError.
    """
    store = Store.open(settings.store, environ)
    await store.probe()
    model: Model = (
        Hub(settings.relay.model) if settings.relay else open_model(ModelSpec(endpoint=settings.endpoint), environ)
    )
    try:
        await model.check()
        pod = environ.get(POD_IP_VARIABLE)
        address = str(URL.build(scheme="http", host=pod, port=settings.port)) if pod else None
        gc.collect()
        gc.freeze()  # collections skip the objects that exist now, such as modules
        gc.set_threshold(_GARBAGE_OBJECTS)
        with until_stopped() as stop:
            async with standalone_proxy(
                store, model, key, host=settings.host, port=settings.port, address=address
            ) as proxy:
                _LOG.info("Sessions in %s, model %s, at http://%s:%d", store.uri, model.name, settings.host, proxy.port)
                await stop.wait()
    finally:
        await model.close()


async def serve_worker(urls: list[str], key: str | None, model: Model, name: str) -> None:
    """Answer the calls of the proxies at `urls` until SIGTERM or SIGINT. Raises ModelError."""
    try:
        await model.check()
        with until_stopped() as stop:
            working = [asyncio.ensure_future(Worker(url, key, model, name).run()) for url in urls]
            stopping = asyncio.ensure_future(stop.wait())
            done, under_way = await asyncio.wait({*working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            for task in done:
                task.result()
    finally:
        await model.close()


def log_to_stderr(*others: str) -> None:
    """Log this package, and the packages with these names, to standard error, one line per message."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True)
    level = logging.DEBUG if os.environ.get("ROLLOUT_LOG_LEVEL", "").lower() == "debug" else logging.INFO
    for name in ("agent_runtime.proxy", *others):
        logging.getLogger(name).setLevel(level)
