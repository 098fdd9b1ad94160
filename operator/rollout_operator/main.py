"""The operator's process. kopf runs it (login, signals, liveness, admission); informers, lease and loop run in the same
process."""

import asyncio
import itertools
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import kopf
from aiohttp import web
from prometheus_client import disable_created_metrics

from rollout_api.listener import limited_listener
from rollout_api.on_cluster.objects import KINDS
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator import admission, model_server, nodes, rollout_job, sandbox, sandbox_pool
from rollout_operator.api import KubeApi
from rollout_operator.cache import Cache
from rollout_operator.config import CONFIG_VARIABLE, load_config
from rollout_operator.endpoints import application
from rollout_operator.events import EventRecorder
from rollout_operator.execute import Execution
from rollout_operator.executor_contact import ExecutorContact
from rollout_operator.informer import Informer
from rollout_operator.keys import KeyRing
from rollout_operator.lease import Leadership
from rollout_operator.loop import Loop
from rollout_operator.metrics import Metrics
from rollout_operator.model_server.control import Control
from rollout_operator.model_server.operations import ServerOperations
from rollout_operator.tenant_limits import ByteBudget
from rollout_operator.world import WATCHED, Controller, Memory

log = logging.getLogger(__name__)

SILENT_SECONDS = 600.0
"""Time without a response or an error after which an informer counts as hung. It gets one at least every 5 minutes."""
RELEASE_SECONDS = 3.0
"""Time for releasing the lease at the end. The pod has 30 s."""


class Operator:
    """The parts of one operator process, and their connections."""

    def __init__(self, config: OperatorConfig, controllers: Iterable[Controller]) -> None:
        self.config = config
        self.api = KubeApi(login)
        self.cache = Cache()
        memory, keys = Memory(), KeyRing(self.api)
        self.keys = keys
        self.identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self.leadership = Leadership(
            self.api, config.lease, self.identity, time.monotonic, on_won=lambda: self.loop.lead()
        )
        self.metrics = Metrics(self.cache, self.leadership.held)
        self.api.on_write = self.metrics.wrote
        self.events = EventRecorder(self.api)
        answers = ByteBudget()
        self.operations = ServerOperations(Control(budget=answers), may_ask=self.leadership.held)
        self.executors = ExecutorContact(answers)
        execution = Execution(
            self.api,
            self.cache,
            memory,
            keys,
            self.operations,
            self.executors,
            config.budgets,
            may_write=self.leadership.held,
        )
        self.loop = Loop(controllers, config, execution, self.events, self.metrics)
        self.informers = [
            Informer(self.api, kind, namespace, selector, self.loop)
            for kind, selector in WATCHED.items()
            for namespace in (config.watch.namespaces if KINDS[kind].namespaced else []) or [""]
        ]
        self.loop.may_plan = self._is_known

    async def run(self) -> None:
        """Run until cancelled: fill the cache, request the lease, then process objects."""
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.api.close)
            stack.push_async_callback(self.executors.close)
            await self._serve(stack)
            async with asyncio.TaskGroup() as group:
                for informer in self.informers:
                    group.create_task(informer.run())
                for informer in self.informers:
                    await informer.answered.wait()
                log.info("cache is complete after %.1f s", time.monotonic() - started)
                group.create_task(self.events.run())
                group.create_task(self.operations.run())
                group.create_task(self.loop.run())
                group.create_task(self._lead())

    def trouble(self) -> str | None:
        """Return which part of this process has hung; None if none has. An unreachable API server does not count,
        because a restart would not help.
        """
        if seconds := self.loop.stuck():
            return f"a worker has made no progress for {seconds:.0f} s"
        for informer in self.informers:
            if (silence := time.monotonic() - informer.alive) > SILENT_SECONDS:
                return f"the informer of {informer.kind} has had no response for {silence:.0f} s"
        return None

    async def _lead(self) -> None:
        try:
            await self.leadership.run()
        finally:
            await asyncio.wait_for(self.leadership.release(), RELEASE_SECONDS)

    def _unsynced_kinds(self) -> list[str]:
        return [informer.kind for informer in self.informers if not informer.answered.is_set()]

    def _is_known(self, namespace: str) -> bool:
        """Whether the cache has all objects of a namespace."""
        return all(informer.synced.is_set() for informer in self.informers if informer.namespace == namespace)

    async def _serve(self, stack: AsyncExitStack) -> None:
        app = application(
            self.metrics.registry, self._unsynced_kinds, lambda: self.cache.all("ModelServer"), self.keys.known
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, limited_listener(self.config.metrics_port)).start()


def login() -> kopf.ConnectionInfo:
    """Return the connection to the API server: as the pod's service account, else by KUBECONFIG."""
    settings = kopf.OperatorSettings()
    info = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise kopf.LoginError(
            "found no credentials for an API server; run in a pod with a service account, or set KUBECONFIG"
        )
    return info


async def run(config: OperatorConfig) -> None:
    """Run the operator until SIGTERM or SIGINT, or until one of its parts fails."""
    node = Controller("Node", lambda world, node: node, nodes.plan)
    operator = Operator(
        config, [rollout_job.CONTROLLER, sandbox.CONTROLLER, sandbox_pool.CONTROLLER, model_server.CONTROLLER, node]
    )
    registry = kopf.OperatorRegistry()
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # kopf watches nothing here (see informer.py), so it need not read CRDs
    settings.networking.error_backoffs = itertools.repeat(5.0)  # an API server may be unavailable at the start
    settings.posting.enabled = False
    admission.register(registry, settings, config)
    parts: list[asyncio.Task[None]] = []
    failed = asyncio.Event()

    @kopf.on.login(registry=registry)
    def _login(**_: object) -> kopf.ConnectionInfo:
        return login()

    @kopf.on.startup(registry=registry)
    async def _startup(**_: object) -> None:
        parts.append(asyncio.create_task(operator.run()))
        parts[0].add_done_callback(lambda _: failed.set())

    @kopf.on.cleanup(registry=registry)
    async def _cleanup(**_: object) -> None:
        parts[0].cancel()
        await asyncio.wait(parts)

    @kopf.on.probe(registry=registry, id="alive")
    async def _alive(**_: object) -> str:
        if trouble := operator.trouble():
            raise kopf.PermanentError(trouble)
        return "ok"

    endpoint = f"http://0.0.0.0:{config.health_port}/healthz"
    await kopf.operator(
        registry=registry,
        settings=settings,
        # The default would look up the user's name, and the image's user has none.
        identity=cast("Any", operator.identity),
        memories=admission.NoMemories(),
        standalone=True,
        clusterwide=True,
        liveness_endpoint=endpoint,
        stop_flag=failed,
    )
    if parts and not parts[0].cancelled() and (error := parts[0].exception()):
        raise error


def main() -> None:
    """Entry point. The environment variable ROLLOUT_OPERATOR_CONFIG names the configuration file."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("kopf", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the series of counters
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise SystemExit(f"{CONFIG_VARIABLE} is not set; it names the operator's configuration file (docs/operator.md)")
    try:
        config = load_config(Path(path))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    asyncio.run(run(config))
