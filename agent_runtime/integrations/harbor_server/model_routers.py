"""One address for the model calls of many trials: `ModelRouter` listens in this process, `RelayedModelRouter` is behind
a session proxy. With `PROXY_SERVER_URL`, agents call a separate session proxy. This process registers a session there
for each trial, connects to the proxy as a worker (`proxy/relay`), and answers the calls of these trials. In both
cases the trial's session in this process records each call, for training.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web
from yarl import URL

from agent_runtime.integrations.harbor_server.client import SHOWN, TrialLost
from agent_runtime.integrations.harbor_server.plan import SessionUrl
from agent_runtime.integrations.harbor_server.runs import SessionModel
from agent_runtime.integrations.harbor_server.settings import RemoteSettings
from agent_runtime.models.base import ModelConfigError, ModelError, ModelReply, ModelRequest, RequestRefused
from agent_runtime.proxy.app import server_runner
from agent_runtime.proxy.http import request_key
from agent_runtime.proxy.keys import session_of
from agent_runtime.proxy.relay.worker import Worker
from agent_runtime.proxy.serve import ADMIN_KEY_VARIABLE


@dataclass
class ModelAccess:
    """How the agent of a trial reaches its model."""

    url: str
    """Base URL, up to `/v1`, with the key in its path."""
    key: str
    failure: str | None = None
    """Set when the session ends: why the agent's latest call got no answer, if the proxy failed and not the trial's own
    session, which knows its failures.
    """


class ModelRouter:
    """Listens from the first `open` to the last `close`. Agents reach it at `url`."""

    def __init__(self, host: str, port: int, public_host: str) -> None:
        self._host, self._port, self._public_host = host, port, public_host
        self._trials: dict[str, web.Server] = {}
        self._calls: dict[str, set[asyncio.Task[web.StreamResponse]]] = {}
        self._answered: set[str] = set()
        """Secrets of the trials whose agent had an answer of the model."""
        self._runner: web.AppRunner | None = None
        self._users = 0
        self._changing = asyncio.Lock()
        self.url = ""

    async def open(self) -> None:
        """Start listening. Raises OSError, for example if another worker of this machine uses the port."""
        async with self._changing:
            self._users += 1
            if self._runner is not None:
                return
            app = web.Application(client_max_size=0)
            app.router.add_route("*", "/{path:.*}", self._carry)
            self._runner = server_runner(app, 0.0)
            await self._runner.setup()
            await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
            self.url = f"http://{self._public_host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        async with self._changing:
            self._users -= 1
            if self._users == 0 and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    @contextlib.asynccontextmanager
    async def serving(self, secrets: Iterable[str], server: web.Server) -> AsyncIterator[str]:
        """While the context is open, `server` answers calls with keys of these secrets. Then running calls are aborted."""
        mine = list(secrets)
        self._trials |= dict.fromkeys(mine, server)
        try:
            yield self.url
        finally:
            for secret in mine:
                self._trials.pop(secret, None)
                self._answered.discard(secret)
                for call in self._calls.pop(secret, set()):
                    call.cancel()

    def has_answered(self, secrets: Collection[str]) -> bool:
        """Whether the model has answered an agent that has a key of these secrets."""
        return not self._answered.isdisjoint(secrets)

    @contextlib.asynccontextmanager
    async def session(self, key: str, model: str) -> AsyncIterator[ModelAccess]:
        """Yield how the agent of the trial with this key reaches the model of that name."""
        yield ModelAccess(f"{self.url}/{key}/v1", key)

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        segment = request.path.split("/")[1]
        key = segment if session_of(segment) is not None else request_key(request.headers) or ""
        secret = key.rpartition(".")[2]
        server = self._trials.get(secret)
        if server is None:
            # The key's attempt has ended or never existed, so the call must not reach the model.
            error = {"message": "this key belongs to no running trial", "code": "invalid_api_key"}
            return web.json_response({"error": error}, status=401, headers={"x-should-retry": "false"})
        call = asyncio.ensure_future(server.request_handler(request))
        calls = self._calls.setdefault(secret, set())
        calls.add(call)
        try:
            response = await call
            if request.method == "POST" and response.status == 200:
                self._answered.add(secret)
            return response
        finally:
            call.cancel()
            calls.discard(call)
            if not calls:
                self._calls.pop(secret, None)


CONNECT_SECONDS: Final = 60.0
"""Longest wait for the connection to the proxy; longer than the worker's longest pause between attempts."""
ASK_SECONDS: Final = 30.0
"""Deadline of registering or deleting a session."""
_TOKENS: Final = {"logprobs": True, "return_token_ids": True}


@dataclass
class _Trial:
    """A trial's own session, as the model of its session at the proxy."""

    model: SessionModel
    failed: set[int] = field(default_factory=set)
    """Turns at the proxy that the own session did not answer. It decides whether the policy caused that."""


class TrialSessions:
    """A `Model`: each session at the proxy is answered by the trial that it belongs to."""

    name, token_capture = "trials", "Tokens"

    def __init__(self) -> None:
        self.open: dict[str, _Trial] = {}
        """Trials by the name of their session at the proxy."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """See `Model.complete`. Refusals of the trial's session are caused by the agent, and are not failures of the
        proxy.
        """
        if (trial := self.open.get(request.session)) is None:
            raise RequestRefused(
                "TrialEnded", f"session {request.session} does not belong to a running trial; its trial has ended"
            )
        try:
            return await trial.model.complete(request, _TOKENS, tries=1)
        except ModelConfigError as error:
            raise RequestRefused(error.reason, error.message) from error
        except (ModelError, asyncio.CancelledError) as error:
            if not (isinstance(error, ModelError) and error.reason == "Unreachable"):
                trial.failed.add(request.turn)
            raise

    async def check(self) -> None:
        """Do nothing: each trial has a checked model."""

    async def close(self) -> None:
        """Do nothing: each trial closes its own model."""


class RelayedModelRouter(ModelRouter):
    """A `ModelRouter` behind a session proxy: agents call the proxy, which forwards their calls here."""

    def __init__(self, settings: RemoteSettings, environ: Mapping[str, str], session_seconds: float) -> None:
        super().__init__("127.0.0.1", 0, "127.0.0.1")
        url = URL(settings.proxy_server_url or "")
        self._proxy = url.with_user(None)
        self._public = self._proxy if settings.llm_proxy_ip is None else self._proxy.with_host(settings.llm_proxy_ip)
        self._key = environ.get(ADMIN_KEY_VARIABLE) or url.password
        self._session_seconds = round(session_seconds)
        self._name = f"verl-{secrets.token_hex(8)}"
        self._sessions = TrialSessions()
        self._connected = asyncio.Event()
        self._scopes: set[asyncio.Timeout] = set()
        self._working: asyncio.Task[Any] | None = None

    async def open(self) -> None:
        """Connect to the proxy. Raises TrialLost if it is unreachable or accepts no workers."""
        await super().open()
        try:
            await self._wait_for_proxy()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await super().close()
        if self._users == 0 and self._working is not None:
            working, self._working = self._working, None
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def session(self, key: str, model: str) -> AsyncIterator[ModelAccess]:
        """See `ModelRouter.session`. Raises TrialLost as soon as the connection to the proxy is lost, because agents' calls
        may then fail without this process knowing.
        """
        await self._wait_for_proxy()
        name = f"{self._name}-{secrets.token_hex(8)}"
        # Errors quote the URL to the agent, so the key is not part of it.
        trial = _Trial(SessionModel(SessionUrl(f"{self.url}/v1", model, key)))
        self._sessions.open[name] = trial
        while_connected = asyncio.timeout(None)
        try:
            async with while_connected:
                self._scopes.add(while_connected)
                registration = {
                    "models": [model],
                    "expiresSeconds": self._session_seconds,
                    "metadata": {"attempt": session_of(key)},
                }
                registered = await self._ask("POST", name, registration)
                access = ModelAccess(str(self._public).rstrip("/") + registered["base_path"], registered["key"])
                try:
                    yield access
                except BaseException:
                    with contextlib.suppress(TrialLost):
                        await self._ask("DELETE", name)
                    raise
                # From now on the key is invalid, so that late calls do not reach the model.
                ended = await self._ask("DELETE", name)
                if ended.get("failed_turn") not in trial.failed:
                    access.failure = ended.get("failure")
        except TimeoutError:
            if not while_connected.expired():
                raise
            raise TrialLost("ProxyLost", f"the connection to {self._proxy} broke while the trial ran") from None
        finally:
            self._scopes.discard(while_connected)
            del self._sessions.open[name]
            await trial.model.close()

    async def _wait_for_proxy(self) -> None:
        if self._working is None:
            worker = Worker(
                str(self._proxy), self._key, self._sessions, self._name,
                sessions=f"{self._name}-", on_change=self._changed,
            )  # fmt: skip
            self._working = asyncio.ensure_future(worker.run())
        waiting = asyncio.ensure_future(self._connected.wait())
        try:
            first: set[asyncio.Future[Any]] = {waiting, self._working}
            await asyncio.wait(first, timeout=CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._working.done():
            raise TrialLost("ProxyRefused", f"remote_agent.proxy_server_url: {self._working.exception()}")
        if not self._connected.is_set():
            raise TrialLost(
                "ProxyUnreachable",
                f"remote_agent.proxy_server_url: no connection to {self._proxy} within {CONNECT_SECONDS:g} s; "
                "start the "
                "proxy there: rolloutctl proxy --relay",
            )

    def _changed(self, connected: bool) -> None:
        if connected:
            self._connected.set()
            return
        self._connected.clear()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(0)

    async def _ask(self, method: str, session: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        url = self._proxy / "sessions" / session
        try:
            timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
                http.request(method, url, json=body) as reply,
            ):
                text = await reply.text()
                if reply.status >= 400:
                    raise TrialLost("ProxyRefused", f"{method} {url} answers {reply.status}: {text[:SHOWN]}")
                answer: dict[str, Any] = await reply.json()
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TrialLost("ProxyUnreachable", f"{method} {url}: {type(error).__name__}: {error}") from error
