"""Types for operations on model servers, and for the last report of each server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from rollout_api.inference.description import Description
from rollout_api.inference.vllm import VLLM
from rollout_api.model_server import PolicySource, TransferMode


class Call(StrEnum):
    """Kinds of operations on a server; `operations.py` has their requests."""

    LOOK = "Look"
    PAUSE = "Pause"
    SLEEP = "Sleep"
    WAKE = "Wake"
    FETCH = "Fetch"
    LOAD = "Load"
    RESUME = "Resume"
    CHECK = "Check"
    OPEN = "Open"
    ADAPT = "Adapt"


@dataclass(frozen=True)
class WantedAdapter:
    """The versions of a LoRA adapter that a server should have."""

    name: str
    current: int
    """Version of calls that name none."""
    sources: tuple[PolicySource, ...]
    """The current version unless it is 0, and the next one."""


@dataclass(frozen=True)
class AdapterFailure:
    """Why a version of an adapter could not be loaded."""

    at: datetime
    message: str
    fetched: bool
    """Whether the files were fetched, so that the engine has refused them."""


@dataclass(frozen=True)
class LoadedAdapter:
    """What a server reports of one adapter."""

    current: int = 0
    versions: tuple[int, ...] = ()
    """Loaded versions."""
    loading: tuple[int, ...] = ()
    failures: Mapping[int, AdapterFailure] = field(default_factory=dict)
    """By version."""


@dataclass(frozen=True)
class ServerOperation:
    """An operation on servers. It may take minutes."""

    call: Call
    source: PolicySource | None = None
    """Weights to use; set for Fetch, Load and Open."""
    adapters: tuple[WantedAdapter, ...] = ()
    """All adapters; set for Adapt."""

    @property
    def version(self) -> int:
        assert self.source is not None
        return self.source.version


@dataclass(frozen=True)
class ServerReport:
    """The state that a server reported last."""

    at: datetime
    paused: bool
    version: int | None
    """Version of its weights; None after an unfinished load, because the weights may then mix two versions."""
    fetched: int | None = None
    """Version that its gateway has fetched."""
    checked: bool = False
    """Whether the engine's checksums were read since this version was loaded."""
    digest: str | None = None
    """SHA-256 over these checksums; None if the engine provides none."""
    process: str = ""
    """The gateway's name for the engine's process. A restarted engine has another name."""
    opened: int | None = None
    """Version for which the gateway accepts calls; None: it accepts none."""
    calls: int = 0
    """Calls that the engine's process has in progress; 0 also from a gateway that does not count them."""
    asleep: bool | None = False
    """Whether the engine has released its accelerators' memory. None: a request to do so may have had an effect."""
    adapters: Mapping[str, LoadedAdapter] = field(default_factory=dict)
    """The adapters that its gateway knows, by name."""

    @property
    def is_open(self) -> bool:
        """Whether the gateway accepts calls for this version."""
        return self.version is not None and self.opened == self.version


@dataclass(frozen=True)
class Failure:
    """A failed operation on a server, after all retries."""

    at: datetime
    operation: ServerOperation
    message: str
    """Message with server and route."""
    untouched: bool = False
    """Whether its weights are unchanged. The cause may then be a store or the trainer, not the server."""


@dataclass(frozen=True)
class ServerContact:
    """Results of the operator's requests to a server."""

    report: ServerReport | None = None
    busy: ServerOperation | None = None
    """The operation in progress."""
    failures: Mapping[Call, Failure] = field(default_factory=dict)
    """Last failure of each kind of operation. A later success removes it."""
    silent_since: datetime | None = None
    """Time of the first failed Look since the last report."""


@dataclass(frozen=True, kw_only=True)
class Server(ServerContact):
    """One start of an engine in a pod."""

    name: str
    uid: str
    """Uid of its pod."""
    restarts: int
    """Restarts of its engine."""
    url: str
    """URL for runners; empty while the pod has no address."""
    control_url: str
    """URL of its control port; empty while the pod has no address."""
    up: bool
    """Whether its containers run."""
    leaving: bool
    """Whether its pod has ended or is being deleted."""
    loaded: bool
    """Whether the pod's readiness gate `policy-loaded` is True."""

    @property
    def key(self) -> tuple[str, int]:
        """Identifier of this start of the engine."""
        return self.uid, self.restarts


@dataclass(frozen=True)
class LoadOptions:
    """Settings of a ModelServer's spec for loads."""

    namespace: str
    mode: TransferMode
    model: str
    """Name under which it is served."""
    model_path: str
    """Folder of the model's own weights, version 0."""
    fetch_seconds: float
    hook: str | None
    push_seconds: float
    world_size: int
    """Accelerators of one server."""
    update: int
    """`status.policy.update`, for the trainer's logs."""
    token: str = field(repr=False)
    engine: Description = VLLM
    """The inference server's description."""
    sleeps: bool = False
    """Whether the server can release its accelerators' memory."""
