"""What a policy update is decided by: spec, status, reports of servers, acknowledgements of runners, the time. Pure.

Also here: which servers may take calls, and which operation brings a server nearer to that.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from rollout_api.model_server import Gate, ModelServerStatus, PolicySource, ServerState, ServerStatus, TransferMode


class Call(StrEnum):
    """What a server can be asked to do; `operations.py` says in which requests."""

    LOOK = "Look"
    PAUSE = "Pause"
    FETCH = "Fetch"
    LOAD = "Load"
    RESUME = "Resume"
    CHECK = "Check"
    OPEN = "Open"


@dataclass(frozen=True)
class ServerOperation:
    """What servers are asked to do; it may take minutes."""

    call: Call
    source: PolicySource | None = None
    """For Fetch, Load and Open."""

    @property
    def version(self) -> int:
        assert self.source is not None
        return self.source.version


@dataclass(frozen=True)
class ServerReport:
    """What a server answered when it was last asked for its state."""

    at: datetime
    paused: bool
    version: int | None
    """Version of its weights; None: a load was begun and not finished, so they may be of two versions."""
    fetched: int | None = None
    """Version that its side-car was last seen to have fetched."""
    checked: bool = False
    """Its engine was asked for its checksums since this version was loaded."""
    digest: str | None = None
    """What they come to, when it makes any."""
    process: str = ""
    """Its gateway's name for the process that the engine is: one that is started again has another."""
    opened: int | None = None
    """Version that its gateway lets calls through for; None: it lets none through."""

    @property
    def is_open(self) -> bool:
        """Its gateway knows that this version was verified."""
        return self.version is not None and self.opened == self.version


@dataclass(frozen=True)
class Failure:
    """A call to a server failed, after all retries."""

    at: datetime
    operation: ServerOperation
    message: str
    """Names server and route."""
    untouched: bool = False
    """Its weights were not touched, and the cause may lie elsewhere: a store, or the trainer."""


@dataclass(frozen=True)
class ServerContact:
    """What the operator's requests to a server have shown."""

    report: ServerReport | None = None
    busy: ServerOperation | None = None
    """The operation that is under way."""
    failures: Mapping[Call, Failure] = field(default_factory=dict)
    """By call; a later success removes the failure."""


@dataclass(frozen=True, kw_only=True)
class Server(ServerContact):
    """One server: an engine in a pod, since it last started."""

    name: str
    uid: str
    """Of its pod."""
    restarts: int
    """Of its engine."""
    url: str
    """Where runners reach it."""
    control_url: str
    """Its control port; empty while it has no address."""
    up: bool
    """Its containers run."""
    leaving: bool
    """Its pod is being deleted."""
    loaded: bool
    """The pod's condition policy-loaded, which its readiness waits for."""

    @property
    def key(self) -> tuple[str, int]:
        """Tells engine starts apart."""
        return self.uid, self.restarts


@dataclass(frozen=True)
class Runner:
    """A runner process that may have calls on these servers."""

    key: str
    """`<job uid>/<index>`."""
    acknowledged: int | None
    """Its `policyUpdate`."""


@dataclass(frozen=True)
class Seen:
    """Everything at one moment."""

    wanted: PolicySource
    """As `spec.policy` says."""
    mode: TransferMode
    min_ready: int
    """Servers that must have a new version before the gate opens."""
    load_limit: timedelta
    """For a load on all servers."""
    status: ModelServerStatus
    servers: Sequence[Server]
    """Of the pods that exist, by name."""
    runners: Sequence[Runner]
    now: datetime

    def entry(self, server: Server) -> ServerStatus | None:
        """What the status says of this start of this server."""
        found = next((entry for entry in self.status.servers if entry.name == server.name), None)
        if found is None or found.uid != server.uid:
            return None
        # A pod is evicted, whatever its containers do until it is gone.
        return found if found.restarts == server.restarts or found.state is ServerState.EVICTED else None

    def is_evicted(self, server: Server) -> bool:
        """It was given up; its pod has to go."""
        entry = self.entry(server)
        return entry is not None and entry.state is ServerState.EVICTED

    def is_member(self, server: Server) -> bool:
        """It has been open to runners since it started, so calls may be running on it."""
        entry = self.entry(server)
        here = entry is not None and entry.policy_version is not None and entry.state is not ServerState.EVICTED
        return here and server.up and not server.leaving

    @property
    def members(self) -> list[Server]:
        """Servers with calls, or that may have some."""
        return [server for server in self.servers if self.is_member(server)]

    @property
    def has_lost_members(self) -> bool:
        """A server with calls has ended, or started again, since the status was written."""
        here = {server.name for server in self.members}
        listed = (entry for entry in self.status.servers if entry.policy_version is not None)
        return any(entry.name not in here for entry in listed if entry.state is not ServerState.EVICTED)

    @property
    def newcomers(self) -> list[Server]:
        """Servers that run and have never been open to runners."""
        return [
            server
            for server in self.servers
            if server.up and not server.leaving and not self.is_evicted(server) and not self.is_member(server)
        ]

    @property
    def since(self) -> datetime:
        """When the step that is under way began; long ago when none is."""
        since = self.status.policy.since
        return datetime.fromisoformat(since) if since else datetime.min.replace(tzinfo=UTC)

    def failed(self, server: Server, call: Call, version: int | None = None) -> Failure | None:
        """A server's failure of a call (for a version) in the step that is under way."""
        failure = server.failures.get(call)
        if failure is None or failure.at < self.since:
            return None
        source = failure.operation.source
        return failure if version is None or (source is not None and source.version == version) else None

    def source(self, version: int) -> PolicySource:
        """Where a version's weights are."""
        known = (source for source in [*self.status.policy.sources, self.wanted] if source.version == version)
        return next(known, PolicySource(version=version))


LOOK_AGAIN = timedelta(seconds=10)
"""Between two looks at a server while no update is under way: a person may have paused it."""
TRY_AGAIN = timedelta(seconds=30)
"""After a failure that may lie with a store or with the trainer. Longer than a connection's time-out."""
LOOK_AFTER_FAILURE = timedelta(seconds=2)
"""An engine that starts answers within minutes; asking it costs nothing."""

_CHANGES = (Call.LOAD, Call.RESUME, Call.CHECK)
MISMATCH = "its weights differ from those of the other servers, though it names the same version"


def look(seen: Seen, server: Server) -> ServerOperation | None:
    """The operation Look, if a server's last answer is missing or old and it is free."""
    if server.busy is not None or not server.control_url:
        return None
    if server.report is None:
        failed = server.failures.get(Call.LOOK)
        return None if failed and seen.now < failed.at + LOOK_AFTER_FAILURE else ServerOperation(Call.LOOK)
    return ServerOperation(Call.LOOK) if seen.now >= server.report.at + LOOK_AGAIN else None


def next_operation(seen: Seen, server: Server, source: PolicySource) -> ServerOperation | None:
    """What a server without traffic needs next to serve a version; None: nothing, or nothing yet."""
    if server.busy is not None:
        return None
    report = server.report
    if report is None:
        return look(seen, server)
    if any(failed_lately(seen, server, call, source.version) for call in (*_CHANGES, Call.OPEN)):
        return None
    if has_to_go(server, source.version):
        return None
    if report.version != source.version:
        return ServerOperation(Call.LOAD, source)
    if (step := next_step(seen, server)) is not None:
        return step
    return look(seen, server) if report.is_open else ServerOperation(Call.OPEN, source)


def next_step(seen: Seen, server: Server) -> ServerOperation | None:
    """What stands between a server with the right version and its gateway's opening."""
    if server.report is not None and server.report.paused:
        return ServerOperation(Call.RESUME)
    return None if is_checked(seen, server) else ServerOperation(Call.CHECK)


def failed_lately(seen: Seen, server: Server, call: Call, version: int) -> bool:
    """Whether a call (for this version, where it has one) failed too recently to be tried again."""
    failure = server.failures.get(call)
    if failure is None or seen.now >= failure.at + TRY_AGAIN:
        return False
    return failure.operation.source is None or failure.operation.source.version == version


def has_to_go(server: Server, version: int) -> bool:
    """Only a restart brings this newcomer to a version.

    It failed at what it was asked, and the cause is its own. Or it lets calls through for another version: it was open
    before the kubelet counted the start that it is of, and has calls that runners have not ended yet, so its weights must
    not change.
    """
    if any(call in server.failures and not server.failures[call].untouched for call in _CHANGES):
        return True
    return server.report is not None and server.report.is_open and server.report.version != version


def is_checked(seen: Seen, server: Server) -> bool:
    """Its engine's checksums are known, or known not to exist, for the weights it has."""
    assert server.report is not None
    entry = seen.entry(server) if seen.status.policy.gate is Gate.OPEN else None
    return server.report.checked or (entry is not None and entry.policy_version == server.report.version)


def digest_of(seen: Seen, server: Server) -> str | None:
    """Digest of the weights of the version it names, when its engine makes any."""
    entry = seen.entry(server)
    if server.report is not None and server.report.checked:
        return server.report.digest
    return entry.weights_digest if entry is not None else None


def odd_ones(seen: Seen, servers: Iterable[Server], old: Collection[str | None] = ()) -> list[Server]:
    """Servers of one version whose weights are not what most of them have: a version is a name, and proves nothing.

    Args:
        old: digests from before a load. Where as many have these as have something else, these are the odd ones.
    """
    digests = {server.key: digest for server in servers if (digest := digest_of(seen, server)) is not None}
    if len(set(digests.values())) < 2:
        return []
    verified = Counter(entry.weights_digest for entry in seen.status.servers if entry.ready)
    counts = Counter(digests.values())
    right = max(counts, key=lambda digest: (counts[digest], digest not in old, 0 if old else verified[digest], digest))
    return [server for server in servers if digests.get(server.key, right) != right]


def is_ready(seen: Seen, server: Server) -> bool:
    """Whether runners may call it while the gate is open: as it says, or as was verified before it could be asked."""
    return is_verified(seen, server) and (server.report is None or server.report.is_open)


def is_verified(seen: Seen, server: Server) -> bool:
    """Whether it runs with the current version, so that its gateway may let calls through; as `is_ready`."""
    if not server.up or server.leaving or seen.is_evicted(server):
        return False
    if server.report is None:
        entry = seen.entry(server)
        return entry is not None and entry.ready
    return server.report.version == seen.status.policy.current and not server.report.paused and is_checked(seen, server)


def entry_at_rest(seen: Seen, server: Server, evicted: Collection[Server]) -> ServerStatus:
    """A server's entry while the gate is open."""
    if is_ready(seen, server) and server not in evicted:
        return verified(seen, server, seen.status.policy.current)
    entry = entry_behind_gate(seen, server, evicted)
    if entry.policy_version is None:
        return entry
    # Its version stays on record: calls that it holds began with it.
    return entry.model_copy(update={"ready": False, "state": ServerState.PENDING_WEIGHTS})


def entry_behind_gate(seen: Seen, server: Server, evicted: Collection[Server]) -> ServerStatus:
    """A server's entry while the gate is shut: what runners saw before stays as it was, unless the server leaves."""
    old = seen.entry(server)
    if server not in evicted and seen.is_member(server) and old is not None:
        return old
    if server in evicted or seen.is_evicted(server):
        state = ServerState.EVICTED
    else:
        state = ServerState.PENDING_WEIGHTS if server.up and server.report is not None else ServerState.STARTING
    return ServerStatus(name=server.name, url=server.url, uid=server.uid, restarts=server.restarts, state=state)


def verified(seen: Seen, server: Server, version: int) -> ServerStatus:
    """The entry of a server that was verified to serve a version."""
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
