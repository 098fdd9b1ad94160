"""What a policy update is decided by: the spec, the status, what each server said, what runners acknowledged, the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from rollout_api.model_server import ModelServerStatus, PolicySource, ServerState, ServerStatus, TransferMode


class Call(StrEnum):
    """What a server can be asked to do; `control_errands.py` says in which requests."""

    LOOK = "Look"
    PAUSE = "Pause"
    FETCH = "Fetch"
    LOAD = "Load"
    RESUME = "Resume"
    CHECK = "Check"
    OPEN = "Open"


@dataclass(frozen=True)
class Errand:
    """Something that is asked of servers, and may take minutes."""

    call: Call
    source: PolicySource | None = None
    """For Fetch, Load and Open."""


@dataclass(frozen=True)
class Said:
    """What a server answered when it was last asked."""

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
    errand: Errand
    message: str
    """Names server and route."""
    untouched: bool = False
    """Its weights were not touched, and the cause may lie elsewhere: a store, or the trainer."""


@dataclass(frozen=True)
class Server:
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
    said: Said | None = None
    busy: Errand | None = None
    """What it is asked at the moment."""
    failures: Mapping[Call, Failure] = field(default_factory=dict)
    """By call; one that goes well later takes its failure away."""

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
    """As it was last written."""
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
        source = failure.errand.source
        return failure if version is None or (source is not None and source.version == version) else None

    def source(self, version: int) -> PolicySource:
        """Where a version's weights are."""
        known = (source for source in [*self.status.policy.sources, self.wanted] if source.version == version)
        return next(known, PolicySource(version=version))
