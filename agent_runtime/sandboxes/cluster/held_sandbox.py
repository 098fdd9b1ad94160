"""One Sandbox of this runner, from its request to its end: its executor's connection and its workspaces."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime.executor import CONTRACT_VERSION
from agent_runtime.kube.api import ApiError, KubeApi
from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.cluster.network_probe import NetworkProbe
from agent_runtime.sandboxes.cluster.packing import Room
from agent_runtime.sandboxes.cluster.sandbox_object import Reason, SandboxView
from agent_runtime.sandboxes.cluster.watch import WatchedClient
from agent_runtime.sandboxes.executor_client.sandbox import ExecutorSandbox
from agent_runtime.sandboxes.prepare import PREPARED
from rollout_api.cluster import EXECUTOR_PORT, MOST_LAYER_BYTES, executor_token
from rollout_api.measured_memory import Measured

PROVIDER = "cluster"
# The executor listens about 0.2 s after its container starts; on a node that starts many pods, several seconds.
LISTEN_SECONDS, LISTEN_POLL_SECONDS = 60.0, 0.02
# Time limit of a health check of a loaded executor. The address of a dead pod never responds.
ANSWER_SECONDS = 5.0
# Long enough for two retransmissions of a lost packet, after 1 s and 3 s.
CONNECT_SECONDS = 4.0

log = logging.getLogger(__name__)


ReasonOfEnd = Callable[["HeldSandbox", SandboxFailure], Awaitable[SandboxFailure | None]]
"""Returns why a Sandbox has ended whose connection failed; None if it responds again."""


async def unexplained(held: HeldSandbox, failure: SandboxFailure) -> SandboxFailure | None:
    """Return the failure unchanged. A ReasonOfEnd for short visits, which do not ask the API server for the reason."""
    return failure


class HeldSandbox:
    """`sandbox` exists once its executor has responded; `ended` is set at its end."""

    def __init__(
        self,
        name: str,
        kind: str,
        api: KubeApi,
        key: str,
        idle_seconds: float,
        reason_of_end: ReasonOfEnd,
        *,
        tenant: str,
        pool: str | None = None,
    ) -> None:
        self.name, self.kind = name, kind
        self.pool = pool
        """The SandboxPool that it belongs to; None for one that this runner has created."""
        self._tenant = tenant
        self.uid: str | None = None
        self.view: SandboxView | None = None
        self.ended: Reason | None = None
        self.sandbox: ExecutorSandbox | None = None
        self.places, self.is_reusable, self.is_adopted = 0, True, False
        self.is_single_use = False
        """Whether the sandbox is for a single attempt."""
        self.was_used = False
        """Whether the sandbox has or had a workspace. An adopted sandbox counts as used."""
        self.taken: dict[str, str | None] = {}
        """Workspaces that this process knows, and the prepared states that they are or will be forked from."""
        self.foreign: set[str] = set()
        """Unclaimed workspaces of an earlier process."""
        self.groups: set[str] = set()
        """Prepared states that it has or will have."""
        self.pod_ip: str | None = None
        """Address of the pod to which it is, or is being, connected."""
        self.creation: asyncio.Task[None] | None = None
        self.connection: asyncio.Task[None] | None = None
        self.inquiry: asyncio.Task[None] | None = None
        self.probe: NetworkProbe | None = None
        self._api, self._key, self._idle_seconds = api, key, idle_seconds
        self._reason_of_end = reason_of_end
        self._client: WatchedClient | None = None
        self._asked_for = self._empty_since = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._asked_for

    def room(self, expected_places: int, to_come: Callable[[str], int]) -> Room:
        is_ready, count = self.sandbox is not None, len(self.taken) + len(self.foreign)
        return Room(
            name=self.name,
            places=count if self._is_draining else self.places if is_ready else expected_places,
            taken=count,
            is_ready=is_ready,
            to_come={group: to_come(group) for group in self.groups},
            empty_seconds=0.0 if count or not is_ready else time.monotonic() - self._empty_since,
        )

    @property
    def _is_draining(self) -> bool:
        return self.view is not None and self.view.is_draining

    @property
    def is_used_up(self) -> bool:
        """Whether the sandbox is empty and must not host another workspace, which could see files of an earlier one."""
        return self.was_used and not self.is_reusable and not self.taken and not self.foreign

    def has(self, identity: str) -> bool:
        """Whether that workspace is here, as far as known."""
        return identity in self.taken or identity in self.foreign

    def take(self, identity: str, prepared: str | None) -> None:
        """Add a workspace, or claim one of an earlier process."""
        self.was_used = True
        self.foreign -= {identity, prepared}
        self.taken[identity] = prepared
        if prepared is not None:
            self.groups.add(prepared)

    def leave(self, identity: str) -> None:
        self.taken.pop(identity, None)
        self.foreign.discard(identity)
        self._empty_since = time.monotonic()

    def lose_hold(self, identity: str) -> None:
        """Record that another runner holds a workspace now; it keeps its place."""
        self.taken.pop(identity, None)
        self.foreign.add(identity)

    async def connect(self, view: SandboxView) -> None:
        """Wait until its executor responds, and read its places. Raises SandboxFailure."""
        token = executor_token(self._key, self.name, view.uid)
        address = f"tcp:{_host(str(view.pod_ip))}:{EXECUTOR_PORT}"
        self._client = client = WatchedClient(address, token, lambda failure: self._reason_of_end(self, failure))

        async def pause() -> float:
            return LISTEN_POLL_SECONDS

        try:
            health = await client.first_health(pause, LISTEN_SECONDS)
        except BaseException:
            await client.close()
            raise
        is_plain = health["mode"] == "Plain"
        if self.pool is not None and health["version"] != CONTRACT_VERSION:
            await client.close()
            raise SandboxFailure(
                "ExecutorUnreachable",
                f"its executor has version {health['version']} of the contract, and this runner {CONTRACT_VERSION}",
            )
        self.places, self.is_reusable = int(health["places"]["total"]), not (is_plain or self.is_single_use)
        if self.is_adopted:
            self.was_used = True
        if self.is_adopted or self.pool is not None:
            await self.recount()
        self._empty_since = time.monotonic()
        self.probe = NetworkProbe(str(view.pod_ip), EXECUTOR_PORT)
        self.sandbox = ExecutorSandbox(
            client,
            mode=health["mode"],
            description={
                "provider": PROVIDER,
                "mode": health["mode"],
                "modeReason": view.overlay.message if is_plain and view.overlay is not None else None,
                "sandbox": self.name,
                "imageUsed": True,
                **({} if self.pool is None else {"pool": self.pool}),
            },
            handle={"provider": PROVIDER, "sandbox": self.name, "uid": view.uid, "podIP": view.pod_ip},
            environment={},
            idle_seconds=self._idle_seconds,
            # Other jobs may start from the same layers at any moment. The operator replaces a pool's sandbox that is full.
            most_layer_bytes=MOST_LAYER_BYTES if self.pool is None else None,
        )

    def forget_pod(self) -> None:
        """Drop the current connection attempt, because another pod replaces its pod."""
        self.pod_ip = None
        if self.probe is not None:
            self.probe.stop()
        if self.connection is not None and self.connection is not asyncio.current_task():
            self.connection.cancel()

    async def connected(self) -> ExecutorSandbox:
        """Return the sandbox once its executor has responded. Raises SandboxFailure if that fails."""
        while self.connection is not None and not self.connection.done():
            await asyncio.wait({self.connection})
        if self.ended is not None or self.sandbox is None:
            raise self.why_not_ready(self.seconds())
        return self.sandbox

    async def recount(self) -> None:
        """Query the executor for workspaces that this process does not know. Raises SandboxFailure."""
        assert self._client is not None
        listed = (await self._client.call("GET", "/workspaces")).json()["workspaces"]
        live = {workspace["id"] for workspace in listed if workspace["state"] == "Live"}
        self.groups |= {one["id"] for one in listed if one["id"].startswith(f"{self._tenant}{PREPARED}")}
        was_foreign = bool(self.foreign)
        # A prepared state uses the place of a member that waits for it, so it is not foreign.
        self.foreign = live - self.taken.keys() - set(self.taken.values())
        if was_foreign and not self.foreign:
            self._empty_since = time.monotonic()

    async def measured(self) -> Measured | None:
        """Return what its workspaces have used of memory; None if its executor does not answer, or reports none."""
        try:
            return Measured.model_validate((await self._health())["memoryBytes"]["measured"])
        except (SandboxFailure, TimeoutError, LookupError, TypeError, ValueError):
            return None

    async def answers(self) -> bool:
        """Whether its executor responds and is the same as before."""
        try:
            await self._health()
        except (SandboxFailure, TimeoutError):
            return False
        return self.ended is None

    async def _health(self) -> dict[str, Any]:
        assert self._client is not None
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self._client.health()

    async def is_cut_off(self) -> bool:
        """Whether its address neither accepts nor refuses connections, as when its node is dead."""
        if self.pod_ip is None:  # its pod may be replaced in the meantime
            return False
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(self.pod_ip, EXECUTOR_PORT)
        except ConnectionError:
            return False
        except (OSError, TimeoutError):
            return True
        writer.close()
        return False

    def why_not_ready(self, seconds: float) -> SandboxFailure:
        if self.ended is not None:
            return SandboxFailure(self.ended.word, self.ended.message)
        late = f"Sandbox {self.name} was not ready after {seconds:.0f} s (sandbox.startSeconds)"
        if self.pod_ip is not None:
            return SandboxFailure(
                "ExecutorUnreachable",
                f"{late}: its pod runs, but does not answer at {self.pod_ip}, port {EXECUTOR_PORT}; see the pod's log, "
                "and check that no other NetworkPolicy than the operator's blocks runners",
            )
        if self.view is not None and self.view.problem is not None:
            return SandboxFailure(self.view.problem.word, f"{late}: {self.view.problem.message}")
        return SandboxFailure(
            "StartDeadlineExceeded", f"{late} and its status does not say why; check that the operator runs"
        )

    def end(self, reason: Reason) -> None:
        """Mark the sandbox as ended. Callers that wait for it or its executor get a failure."""
        self.ended = reason
        if self._client is not None:
            self._client.end(reason)
        self.forget_pod()

    async def close(self, *, delete: bool) -> None:
        """Close the connections; `delete` removes a Sandbox of this runner, even while it is being created."""
        self.forget_pod()
        if self.sandbox is not None:
            await self.sandbox.close()
        elif self._client is not None:
            await self._client.close()
        if delete and self.pool is None:
            if self.creation is not None:
                await asyncio.wait({self.creation})
            try:
                await self._api.delete_sandbox(self.name)
            except ApiError as error:
                log.warning("Sandbox %s was not deleted and will be deleted with its job: %s", self.name, error)


def _host(address: str) -> str:
    return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
