"""The inputs of a policy update, and decisions about single servers. No side effects.

These decisions are whether a server may take calls, and which operation it needs next.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rollout_api.model_server import (
    Gate,
    ModelServerStatus,
    PolicySource,
    PolicyStep,
    ServerState,
    ServerStatus,
    TransferMode,
)
from rollout_operator.server_contact import Call, Failure, Server, ServerOperation


@dataclass(frozen=True)
class Runner:
    """A runner process that may have calls in progress on these servers."""

    key: str
    """`<job uid>/<index>`."""
    acknowledged: int | None
    """Its `policyUpdate` field."""


@dataclass(frozen=True)
class AdapterWanted:
    """An adapter in `spec.adapters`."""

    source: PolicySource
    min_ready: int
    """Servers that must have the version before calls get it."""


@dataclass(frozen=True)
class Seen:
    """All inputs at one moment."""

    wanted: PolicySource
    """The policy in `spec.policy`."""
    asleep: bool
    """Whether servers should release their memory: `spec.asleep`."""
    mode: TransferMode
    min_ready: int
    """Servers that must have a new version before the gate opens."""
    load_limit: timedelta
    """Time limit of a load on all servers."""
    status: ModelServerStatus
    servers: Sequence[Server]
    """Servers in existing pods, by name."""
    runners: Sequence[Runner]
    now: datetime
    adapters: Mapping[str, AdapterWanted] = field(default_factory=dict)
    """`spec.adapters`."""

    def entry(self, server: Server) -> ServerStatus | None:
        """Return the server's status entry; None if the entry is for another pod or an earlier start of the engine."""
        found = next((entry for entry in self.status.servers if entry.name == server.name), None)
        if found is None or found.uid != server.uid:
            return None
        # A restart of the engine does not undo the eviction of its pod.
        return found if found.restarts == server.restarts or found.state is ServerState.EVICTED else None

    def is_evicted(self, server: Server) -> bool:
        """Whether the server failed and its pod must be deleted."""
        entry = self.entry(server)
        return entry is not None and entry.state is ServerState.EVICTED

    def is_member(self, server: Server) -> bool:
        """Whether the server was open to runners since its start, so that it may have calls."""
        entry = self.entry(server)
        here = entry is not None and entry.policy_version is not None and entry.state is not ServerState.EVICTED
        return here and server.up and not server.leaving

    @property
    def members(self) -> list[Server]:
        """Return the servers that may have calls in progress."""
        return [server for server in self.servers if self.is_member(server)]

    @property
    def has_lost_members(self) -> bool:
        """Whether a server with calls has ended or restarted since the status was written."""
        here = {server.name for server in self.members}
        listed = (entry for entry in self.status.servers if entry.policy_version is not None)
        return any(entry.name not in here for entry in listed if entry.state is not ServerState.EVICTED)

    @property
    def newcomers(self) -> list[Server]:
        """Return the running servers that were not open to runners since their start."""
        return [
            server
            for server in self.servers
            if server.up and not server.leaving and not self.is_evicted(server) and not self.is_member(server)
        ]

    @property
    def since(self) -> datetime:
        """Return when the current step began; `datetime.min` if there is none."""
        since = self.status.policy.since
        return datetime.fromisoformat(since) if since else datetime.min.replace(tzinfo=UTC)

    def failed(self, server: Server, call: Call, version: int | None = None) -> Failure | None:
        """Return a server's failure of a call (for a version) in the current step."""
        failure = server.failures.get(call)
        if failure is None or failure.at < self.since:
            return None
        source = failure.operation.source
        return failure if version is None or (source is not None and source.version == version) else None

    def source(self, version: int) -> PolicySource:
        """Return the source of a version's weights."""
        known = (source for source in [*self.status.policy.sources, self.wanted] if source.version == version)
        return next(known, PolicySource(version=version))


LOOK_AGAIN = timedelta(seconds=10)
"""Interval between two reports of a server outside updates. For example, a person may have paused it."""
TRY_AGAIN = timedelta(seconds=30)
"""Pause before a failed operation is retried. It is longer than a connection's time-out."""
LOOK_AFTER_FAILURE = timedelta(seconds=2)
"""Pause after a failed Look. It is short because requests are cheap, and an engine that starts should be found soon."""

MOST_WORDS = 1024
"""Most characters of a `failedBecause`."""

_CHANGES = (Call.WAKE, Call.LOAD, Call.RESUME, Call.CHECK)
MISMATCH = "its weights differ from those of the other servers, although it reports the same version"


def report_if_old(seen: Seen, server: Server) -> ServerOperation | None:
    """Return the operation Look if a server is not busy and its last report is missing or old."""
    if server.busy is not None or not server.control_url:
        return None
    if server.report is None:
        failed = server.failures.get(Call.LOOK)
        return None if failed and seen.now < failed.at + LOOK_AFTER_FAILURE else ServerOperation(Call.LOOK)
    return ServerOperation(Call.LOOK) if seen.now >= server.report.at + LOOK_AGAIN else None


def next_operation(seen: Seen, server: Server, source: PolicySource) -> ServerOperation | None:
    """Return the next operation that a server without calls needs before it can serve a version; None if none is due."""
    if server.busy is not None:
        return None
    report = server.report
    if report is None:
        return report_if_old(seen, server)
    if any(failed_lately(seen, server, call, source.version) for call in (*_CHANGES, Call.OPEN)):
        return None
    if must_be_replaced(server, source.version):
        return None
    if report.asleep is not False:
        return ServerOperation(Call.WAKE)
    if report.version != source.version:
        return ServerOperation(Call.LOAD, source)
    if report.calls and seen.status.policy.step is PolicyStep.LOADING:
        return report_if_old(seen, server)  # its calls must not continue with a version that may be rolled back
    if (step := next_step(seen, server)) is not None:
        return step
    return report_if_old(seen, server) if report.is_open else ServerOperation(Call.OPEN, source)


def next_step(seen: Seen, server: Server) -> ServerOperation | None:
    """Return the operation that a server with the right version needs before its gateway can open."""
    if server.report is not None and server.report.asleep is not False:
        return ServerOperation(Call.WAKE)
    if server.report is not None and server.report.paused:
        return ServerOperation(Call.RESUME)
    return None if is_checked(seen, server) else ServerOperation(Call.CHECK)


def failed_lately(seen: Seen, server: Server, call: Call, version: int | None = None) -> bool:
    """Whether a call (for this version, if both have one) failed too recently for a retry."""
    failure = server.failures.get(call)
    if failure is None or seen.now >= failure.at + TRY_AGAIN:
        return False
    source = failure.operation.source
    return version is None or source is None or source.version == version


def must_be_replaced(server: Server, version: int) -> bool:
    """Whether this newcomer can get a version only by a restart.

    One reason is a failed operation of which the server itself is the cause. The other is that it may have calls with
    another version, because it was opened before the kubelet reported its restart. Its weights must not change, also
    if it was paused meanwhile.
    """
    if any(call in server.failures and not server.failures[call].untouched for call in _CHANGES):
        return True
    report = server.report
    return report is not None and (report.is_open or report.calls > 0) and report.version != version


def is_checked(seen: Seen, server: Server) -> bool:
    """Whether the checksums of its weights were read, or its engine was found to provide none."""
    assert server.report is not None
    entry = seen.entry(server) if seen.status.policy.gate is Gate.OPEN else None
    return server.report.checked or (entry is not None and entry.policy_version == server.report.version)


def digest_of(seen: Seen, server: Server) -> str | None:
    """Return the digest of a server's weights; None if its engine provides none."""
    entry = seen.entry(server)
    if server.report is not None and server.report.checked:
        return server.report.digest
    return entry.weights_digest if entry is not None else None


def with_deviating_weights(seen: Seen, servers: Iterable[Server], old: Collection[str | None] = ()) -> list[Server]:
    """Return the servers whose weights differ from those of the majority. All report the same version.

    Args:
        old: digests from before a load. In a tie, they count as wrong.
    """
    digests = {server.key: digest for server in servers if (digest := digest_of(seen, server)) is not None}
    if len(set(digests.values())) < 2:
        return []
    verified = Counter(entry.weights_digest for entry in seen.status.servers if entry.ready)
    counts = Counter(digests.values())
    right = max(counts, key=lambda digest: (counts[digest], digest not in old, 0 if old else verified[digest], digest))
    return [server for server in servers if digests.get(server.key, right) != right]


def is_ready(seen: Seen, server: Server) -> bool:
    """Whether runners may call a server while the gate is open. Without a report, its status entry decides."""
    return is_verified(seen, server) and (server.report is None or server.report.is_open)


def is_verified(seen: Seen, server: Server) -> bool:
    """Whether a server has the current version, so that its gateway may open. Without a report, its status entry decides."""
    if not server.up or server.leaving or seen.is_evicted(server):
        return False
    if server.report is None:
        entry = seen.entry(server)
        return entry is not None and entry.ready
    return server.report.version == seen.status.policy.current and next_step(seen, server) is None


def entry_at_rest(seen: Seen, server: Server, evicted: Collection[Server]) -> ServerStatus:
    """Return a server's status entry while the gate is open."""
    if is_ready(seen, server) and server not in evicted:
        return verified(seen, server, seen.status.policy.current)
    entry = entry_behind_gate(seen, server, evicted)
    if entry.policy_version is None:
        return entry
    # The version is kept, because calls in progress began with it.
    return entry.model_copy(update={"ready": False, "state": ServerState.PENDING_WEIGHTS})


def entry_behind_gate(seen: Seen, server: Server, evicted: Collection[Server]) -> ServerStatus:
    """Return a server's status entry while the gate is shut. The entry of a member is unchanged unless it is evicted."""
    old = seen.entry(server)
    if server not in evicted and seen.is_member(server) and old is not None:
        return old
    if server in evicted or seen.is_evicted(server):
        state = ServerState.EVICTED
    else:
        state = ServerState.PENDING_WEIGHTS if server.up and server.report is not None else ServerState.STARTING
    return ServerStatus(name=server.name, url=server.url, uid=server.uid, restarts=server.restarts, state=state)


def verified(seen: Seen, server: Server, version: int) -> ServerStatus:
    """Return the entry of a server that was verified to serve a version."""
    return ServerStatus(
        name=server.name,
        url=server.url,
        uid=server.uid,
        policy_version=version,
        ready=True,
        state=ServerState.READY,
        restarts=server.restarts,
        weights_digest=digest_of(seen, server),
    )
