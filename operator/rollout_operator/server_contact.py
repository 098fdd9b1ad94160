"""What the operator asks of model servers, and what they answered last."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from rollout_api.model_server import PolicySource, TransferMode


class Call(StrEnum):
    """The operations of a server; `operations.py` has their requests."""

    LOOK = "Look"
    PAUSE = "Pause"
    FETCH = "Fetch"
    LOAD = "Load"
    RESUME = "Resume"
    CHECK = "Check"
    OPEN = "Open"


@dataclass(frozen=True)
class ServerOperation:
    """Operations of servers; they may take minutes."""

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
    silent_since: datetime | None = None
    """When the first of the looks failed that no report has followed."""


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
class LoadOptions:
    """What a ModelServer's spec says about loads."""

    mode: TransferMode
    adapters: bool
    """Whether policies are LoRA adapters of the model."""
    model: str
    """Name under which it is served."""
    model_path: str
    """Folder of the weights with which the engines were started: version 0."""
    fetch_seconds: float
    hook: str | None
    push_seconds: float
    world_size: int
    """Accelerators of one server."""
    update: int
    """`status.policy.update`, for the trainer's logs."""
    token: str = field(repr=False)
