"""Validating admission: `kubectl apply` refuses what the CRD's schema cannot detect. kopf serves it on every replica.

If the API server cannot reach the webhook, it admits the object (`failurePolicy: Ignore`). The condition `Invalid` then
reports the same problems.
"""

import asyncio
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import kopf
from aiohttp import web
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from rollout_api.base import API_VERSION
from rollout_api.listener import limited_listener
from rollout_api.on_cluster.model_server_problems import parse
from rollout_api.on_cluster.objects import EXCESS, size_problem
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.on_cluster.resolve import resolve
from rollout_operator.sandbox.validate import parse_spec, problems
from rollout_operator.sandbox_pool import validate as sandbox_pool

Body = Mapping[str, Any]

log = logging.getLogger(__name__)

UNPROCESSABLE: Final = 422
"""Status code that the API server uses when its own schema refuses an object."""

MOST_PER_ADDRESS: Final = 8
"""Most concurrent requests of one address. They are checked one after the other. A check of the largest jobs takes about
a second, and an API server waits 5 s.
"""

MOST_REQUESTS: Final = 4 * MOST_PER_ADDRESS
"""Most concurrent requests. It is above MOST_PER_ADDRESS, so that one pod cannot block the API servers."""

READ_SECONDS: Final = 2
"""Longest time that a request may take to arrive."""

BUFFER_BYTES: Final = 2**14
"""Buffer of a connection with TLS. asyncio's are 2**18 bytes, before the handshake too. Python collects those of failed
handshakes only with its oldest garbage, so that connections of one pod could fill the operator's memory.
"""

RELOAD_SECONDS: Final = 60
"""Interval at which the certificate is read again, because an upgrade may replace it."""


def _of_rollout_job(body: Body, config: OperatorConfig) -> list[str]:
    return [str(problem) for problem in resolve(body, config).problems]


def _of_model_server(body: Body, config: OperatorConfig) -> list[str]:
    if why := size_problem(body.get("spec")):
        body = {**body, "spec": {}, EXCESS: why}  # as in the operator's cache
    return [str(problem) for problem in parse(body, config.privileged_namespaces).problems]


def _of_sandbox(body: Body, config: OperatorConfig) -> list[str]:
    """Check a Sandbox that a person created. A job's Sandboxes are not checked here: the job was, and its runners read
    the Sandboxes' conditions.
    """
    if any(
        owner.get("kind") in ("RolloutJob", "SandboxPool") for owner in body["metadata"].get("ownerReferences") or []
    ):
        return []
    if why := size_problem(body.get("spec")):
        return [f"spec: {why}"]
    spec = parse_spec(body.get("spec") or {})
    if isinstance(spec, list):
        return spec
    return problems(spec, None, body["metadata"]["namespace"], config.privileged_namespaces)


def _of_sandbox_pool(body: Body, config: OperatorConfig) -> list[str]:
    if why := size_problem(body.get("spec")):
        return [f"spec: {why}"]
    found = sandbox_pool.checked(body.get("spec") or {}, body["metadata"], config)
    return found if isinstance(found, list) else []


CHECKS: Final[Mapping[str, Callable[[Body, OperatorConfig], list[str]]]] = {
    "rolloutjobs": _of_rollout_job,
    "modelservers": _of_model_server,
    "sandboxes": _of_sandbox,
    "sandboxpools": _of_sandbox_pool,
}
"""Checks by the plural name of the resource, which is the last part of the webhook's path."""


def refusal(plural: str, new: Body, old: Body | None, config: OperatorConfig) -> str | None:
    """Return why an object is not admitted; None if it is admitted.

    An update is refused only for problems that it adds: an invalid object can still be labelled, suspended and deleted.
    A check that fails refuses nothing. The operator then reports the failure in the condition Reconciled.
    """
    check = CHECKS[plural]
    try:
        before = [] if old is None else check(old, config)
        return "; ".join(problem for problem in check(new, config) if problem not in before) or None
    except Exception:
        log.exception("%s: checking %s failed", plural, new["metadata"].get("name"))
        return None


class Server(kopf.WebhookServer):
    """Webhook server with limits: MOST_REQUESTS concurrent requests, MOST_PER_ADDRESS of each address.

    Further requests fail unread, and the API server then admits their objects. Every pod can connect to the port, and a
    check of a large job takes half a second of processor time, so without limits a few connections could stop the
    operator. A request that does not arrive within READ_SECONDS fails, so that it does not occupy a slot.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._requests = Counter[str | None]()
        self._turn = asyncio.Lock()
        """Held while a request is parsed and checked, because nested lists take 50 times their length in memory."""

    async def __call__(self, fn: Any) -> AsyncIterator[Any]:
        """Serve until cancelled, once the certificate can be read. Unlike kopf's own loop, it limits connections, which are
        idle until a request arrives.
        """
        SSLProtocol.max_size = BUFFER_BYTES
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        unread = ""

        def has_read() -> bool:
            nonlocal unread
            try:
                context.load_cert_chain(str(self.certfile), self.pkeyfile)
            except (OSError, ssl.SSLError) as error:  # also between the writes of its two files
                if str(error) != unread:
                    unread = str(error)
                    log.warning(
                        "the certificate of the admission webhook cannot be read (%s): %s", self.certfile, unread
                    )
                return False
            unread = ""
            return True

        async def listen() -> None:
            await web.SockSite(runner, limited_listener(self.port or 0), ssl_context=context).start()

        async def serve(request: web.Request) -> web.Response:
            return await self._serve(fn, request)

        app = web.Application()
        app.add_routes([web.post("/{id}", serve)])
        runner = web.AppRunner(app, handle_signals=False, access_log=None)
        await runner.setup()
        try:
            if is_serving := has_read():
                await listen()
            yield {}  # The chart creates the webhook's configuration.
            while True:
                await asyncio.sleep(RELOAD_SECONDS)
                if has_read() and not is_serving:
                    await listen()
                    is_serving = True
        finally:
            await runner.cleanup()

    async def _serve(self, fn: Any, request: web.Request) -> web.Response:  # type: ignore[override]
        source = request.remote
        if self._requests.total() >= MOST_REQUESTS or self._requests[source] >= MOST_PER_ADDRESS:
            raise web.HTTPServiceUnavailable(text="too many concurrent requests")
        self._requests[source] += 1
        try:
            async with asyncio.timeout(READ_SECONDS):
                await request.read()  # aiohttp caches the body for kopf
            async with self._turn:
                return await super()._serve(fn, request)
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the request did not arrive within {READ_SECONDS} s") from error
        finally:
            self._requests -= Counter([source])  # subtraction removes addresses whose count is 0


class NoMemories(ResourceMemories):
    """Keeps no memory of objects. kopf would keep an entry for each updated object until its own watch reports a
    deletion, and here kopf has no watch.
    """

    async def recall(self, raw_body: kopf.RawBody, **options: Any) -> ResourceMemory:
        return await super().recall(raw_body, **{**options, "ephemeral": True})


def register(registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings, config: OperatorConfig) -> None:
    """Register the checks with kopf if the configuration has a port and a certificate."""
    if config.admission is None:
        return
    folder = config.admission.certificates
    settings.execution.max_workers = 1
    settings.admission.server = Server(
        port=config.admission.port, certfile=folder / "tls.crt", pkeyfile=folder / "tls.key"
    )

    def check(*, resource: kopf.Resource, body: kopf.Body, **more: Any) -> None:
        if why := refusal(resource.plural, body, more["old"], config):
            raise kopf.AdmissionError(why, code=UNPROCESSABLE)

    group, version = API_VERSION.split("/")
    for plural in CHECKS:
        kopf.on.validate(group, version, plural, id=plural, registry=registry)(check)
