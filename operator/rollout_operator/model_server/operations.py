"""Runs operations on model servers outside the control loop, and keeps the last report of each server.

A load takes minutes, and a worker of the loop must not wait for it. Each server has at most one operation at a time. When
an operation ends, its ModelServer is planned again. Reports are not persisted: an operator that has just started requests
them again.
"""

import asyncio
import logging
import reprlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

from rollout_api.model_server import TransferMode
from rollout_operator import clock
from rollout_operator.actions import Ask, Ref
from rollout_operator.model_server.control import ENDED, LOADING, Address, Control, ControlError, transfer_of
from rollout_operator.model_server.hook import HookProblem, Transfer, read_hook_answer
from rollout_operator.server_contact import Call, Failure, Server, ServerContact, ServerOperation
from rollout_operator.tenant_limits import Held

log = logging.getLogger(__name__)

LEADER_CHECK_SECONDS = 1.0
"""Interval of checks that this replica still leads. After a lost lease, 5 s pass before another one writes (lease.py)."""
_UNCHECKED = {"checked": False, "digest": None}
"""Fields of the report of a server with newly loaded weights."""


class ServerOperations:
    """Runs operations and keeps the last report of each server."""

    def __init__(self, control: Control, may_ask: Callable[[], bool]) -> None:
        self._control, self._may_ask = control, may_ask
        self.known: dict[tuple[str, int], ServerContact] = {}
        self.on_done: Callable[[Ref], None] = lambda ref: None
        """Called when an operation for an object has ended."""
        self.exists: Callable[[Ref, str], bool] = lambda ref, uid: True
        """Whether the pod of that uid exists. `forget` is called when it no longer does."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ref: Ref, ask: Ask) -> None:
        """Begin an operation unless one of its servers is busy, or was deleted after the plan was made."""
        pods = [(Ref("Pod", ask.options.namespace, server.name), server.uid) for server in ask.servers]
        if any(self._of(server).busy is not None for server in ask.servers) or not all(starmap(self.exists, pods)):
            return
        for server in ask.servers:
            self.known[server.key] = replace(self._of(server), busy=ask.operation)
        task = asyncio.create_task(self._run(ref, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, pod_uid: str) -> None:
        """Drop the reports of a pod that was deleted."""
        for key in [key for key in self.known if key[0] == pod_uid]:
            del self.known[key]

    async def run(self) -> None:
        """Run until cancelled. When another replica may lead, stop all operations and drop all reports."""
        try:
            while True:
                await asyncio.sleep(LEADER_CHECK_SECONDS)
                if not self._may_ask() and self.known:
                    await self._stop()
        finally:
            await self._stop()
            await self._control.close()

    async def _stop(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.known.clear()

    async def _run(self, ref: Ref, ask: Ask) -> None:
        operation = ask.operation
        try:
            if operation.call is Call.LOAD and ask.options.mode is TransferMode.PUSH and operation.version > 0:
                await self._push(ask)
            else:
                await asyncio.gather(*(self._one(ask, server) for server in ask.servers))
        except Exception as error:
            # Record a failure, because the plan would otherwise repeat the operation immediately.
            log.exception("%s of %s", operation.call.value, ref)
            for server in ask.servers:
                failed = ControlError(f"{server.name}: {operation.call.value} failed: {error!r}")
                self._record(server, operation, failed)
        finally:
            for server in ask.servers:
                self._update(server, busy=None)
            self.on_done(ref)

    async def _one(self, ask: Ask, server: Server) -> None:
        operation, address = ask.operation, self._address(ask, server)
        failed, touched = None, False
        learned: dict[str, Any] = {}
        try:
            match operation.call:
                case Call.LOOK:
                    pass
                case Call.PAUSE:
                    await self._control.pause(address)
                case Call.SLEEP:
                    await self._control.sleep(address)
                case Call.WAKE:
                    await self._control.wake(address)
                    # What comes back must be what the other servers have.
                    learned = _UNCHECKED
                case Call.RESUME:
                    await self._control.resume(address, sleeps=ask.options.sleeps)
                case Call.CHECK:
                    learned = {"checked": True, "digest": await self._control.digest(address)}
                case Call.OPEN | Call.ADAPT:
                    if operation.adapters or operation.call is Call.ADAPT:
                        await self._control.want_adapters(address, operation.adapters, ask.options.fetch_seconds)
                    if operation.call is Call.OPEN:
                        await self._control.open(address, operation.version)
                case Call.FETCH | Call.LOAD:
                    path = await self._fetch(ask, address)
                    learned["fetched"] = operation.version
                    if operation.call is Call.LOAD:
                        touched = True
                        await self._load(ask, address, path)
                        learned |= _UNCHECKED
        except ControlError as error:
            failed = error
        untouched = not touched and operation.call in (Call.LOAD, Call.FETCH)
        self._record(server, operation, failed, untouched=untouched)
        await self._store_report(address, server, **learned)

    async def _fetch(self, ask: Ask, address: Address) -> str | None:
        source = ask.operation.source
        # The engine loaded the model's own weights at its start.
        if ask.options.mode is TransferMode.PUSH or source is None or source.uri is None:
            return None
        return await self._control.fetch(address, source, ask.options.fetch_seconds)

    async def _load(self, ask: Ask, address: Address, path: str | None) -> None:
        version, options = ask.operation.version, ask.options
        await self._control.name_weights(address, f"{LOADING}-{version}")
        await self._reload(address, path or options.model_path, version)
        await self._control.name_weights(address, str(version))

    async def _reload(self, address: Address, path: str, version: int) -> None:
        try:
            await self._control.reload(address, path)
        except ControlError as error:
            if error.status != ENDED or address.updates.survives_bad_weights:
                raise
            # An engine that does not survive bad weights and ends during a load probably got bad weights. An engine that
            # ended before another request says nothing about the version.
            words = f"{address.engine.type} ended while it loaded version {version}"
            raise ControlError(f"{address.name}: {words}; are the weights those of this model?") from error

    async def _push(self, ask: Ask) -> None:
        """Load pushed weights on all servers together, because all take part in the trainer's broadcast."""
        deadline = asyncio.get_running_loop().time() + ask.options.push_seconds
        async with self._control.budget.hold(ask.options.namespace, beyond=0) as held:
            try:
                sent = await self._ask_hook(ask, held)
            except ControlError as error:
                held.shrink(0)
                for server in ask.servers:
                    self._record(server, ask.operation, error, untouched=True)
                await asyncio.gather(
                    *(self._store_report(self._address(ask, server), server) for server in ask.servers)
                )
                return
            await asyncio.gather(*(self._receive(ask, server, sent[server.name], deadline) for server in ask.servers))

    async def _ask_hook(self, ask: Ask, held: Held) -> Mapping[str, Transfer]:
        """Call the trainer's hook through the first gateway that responds. `held` then counts what is kept of the answer."""
        options, question = ask.options, _question(ask)
        assert options.hook is not None
        for server in ask.servers:
            address = self._address(ask, server)
            try:
                answer = await self._control.ask_hook(address, options.hook, question, options.push_seconds, held)
                names = [server.name for server in ask.servers]
                sent, size = read_hook_answer(answer, transfer_of(address), names, held.size)
                held.shrink(size)
                return sent
            except HookProblem as error:
                raise ControlError(f"weightTransfer.push.hook answered {reprlib.repr(answer)}: {error}") from error
            except ControlError as error:
                if error.status or server is ask.servers[-1]:
                    raise
        raise AssertionError("unreachable")

    async def _receive(self, ask: Ask, server: Server, sent: Transfer, deadline: float) -> None:
        address, failed = self._address(ask, server), None
        seconds, version = ask.options.push_seconds, ask.operation.version
        try:
            async with asyncio.timeout_at(deadline):
                await self._control.name_weights(address, f"{LOADING}-{version}")
                await self._control.begin_transfer(address, sent.init)
                for update in sent.updates:
                    await self._control.transfer(address, update, seconds)
                await self._control.finish_transfer(address, version)
        except TimeoutError:
            words = f"the weights did not arrive within {seconds:.0f} s after the call of the trainer's hook"
            failed = ControlError(f"{server.name}: {words}")
        except ControlError as error:
            failed = error
        self._record(server, ask.operation, failed)
        await self._store_report(address, server, **_UNCHECKED)

    async def _store_report(self, address: Address, server: Server, **learned: Any) -> None:
        """Request a report of a server and store it. `learned` has fields of it that an operation has determined."""
        old = self._of(server).report
        try:
            report = await self._control.server_report(address)
        except ControlError as error:
            self._update(server, report=None, silent_since=self._of(server).silent_since or clock.now())
            self._record(server, ServerOperation(Call.LOOK), error)
            return
        if "checked" in learned and address.process != report.process:
            del learned["checked"], learned["digest"]
        if old is not None:
            learned = {"fetched": old.fetched, **learned}
            if (old.process, old.version) == (report.process, report.version):
                learned = {"checked": old.checked, "digest": old.digest, **learned}
        self._update(server, report=replace(report, **learned), silent_since=None)
        self._record(server, ServerOperation(Call.LOOK))

    def _address(self, ask: Ask, server: Server) -> Address:
        """Return the address of the engine process that was last reported. A later process refuses the requests, because
        they were decided for this one.
        """
        report = self._of(server).report
        process, options = "" if report is None else report.process, ask.options
        return Address(options.namespace, server.name, server.control_url, options.token, process, options.engine)

    def _of(self, server: Server) -> ServerContact:
        return self.known.get(server.key, ServerContact())

    def _update(self, server: Server, **changes: Any) -> None:
        """Change what is known of a server, unless its pod was deleted during the operation."""
        if server.key in self.known:
            self.known[server.key] = replace(self._of(server), **changes)

    def _record(
        self, server: Server, operation: ServerOperation, error: ControlError | None = None, *, untouched: bool = False
    ) -> None:
        """Record the result of an operation on a server."""
        failures = {call: failure for call, failure in self._of(server).failures.items() if call is not operation.call}
        if error is not None:
            log.warning("%s of %s: %s", operation.call.value, server.name, error.message)
            if error.status == ENDED and operation.call is not Call.LOOK:
                return  # The request was for an engine process that has ended. The current one has not failed.
            failures[operation.call] = Failure(clock.now(), operation, error.message, untouched)
        self._update(server, failures=failures)


def _question(ask: Ask) -> dict[str, Any]:
    assert ask.operation.source is not None
    return {
        "transfer": secrets.token_hex(8),
        "modelServer": ask.options.model,
        "update": ask.options.update,
        "policy": ask.operation.source.wire(),
        "servers": [
            {"name": server.name, "uid": server.uid, "url": server.url, "worldSize": ask.options.world_size}
            for server in ask.servers
        ],
    }
