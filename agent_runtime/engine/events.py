"""Events of a run, for progress displays and trainers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_api.records import Result, Usage


@dataclass(frozen=True)
class JobStarted:
    """The run's folder is open and its tasks are known. `total` is None for a stream."""

    name: str
    folder: str
    uri: str
    total: int | None
    sealed: int
    resumed: bool
    warnings: tuple[str, ...] = ()
    isolation: tuple[str, ...] = ()
    """What the sandboxes do not isolate or enforce, the most important first."""
    results: Collection[Result] = ()
    """Results sealed by earlier processes. They are read from disk each time, so do not store them."""


@dataclass(frozen=True)
class RolloutStarted:
    """An attempt of a rollout begins, or continues after a crash."""

    index: int
    task: str
    member: int
    attempt: int


@dataclass(frozen=True)
class TurnEnded:
    """A model call was answered; `replayed`: from the journal of an earlier process."""

    index: int
    turn: int
    model_seconds: float
    usage: Usage
    replayed: bool


@dataclass(frozen=True)
class ModelCallFailing:
    """A rollout's model call is retried because the server fails; `message` has the reason. Sent for each failed attempt.
    None: that call has ended.
    """

    index: int
    message: str | None


@dataclass(frozen=True)
class ModelSilent:
    """Calls to the model at `place` are waiting, and none has been answered for `seconds`. Repeated while that lasts.

    `calls` 0: the model answers again.
    """

    place: str
    calls: int
    seconds: float
    has_answered: bool
    """The model has answered an earlier call of this run."""


@dataclass(frozen=True)
class StepBuilt:
    """A step of a Dockerfile, or a setup, was made and stored, or was found stored. Tasks that share it repeat the event."""

    step: str
    seconds: float
    bytes: int
    was_stored: bool = False


@dataclass(frozen=True)
class AttemptFailed:
    """An attempt was lost to infrastructure; `retry` says whether another one follows."""

    index: int
    attempt: int
    reason: str
    message: str
    retry: bool


@dataclass(frozen=True)
class PluginFailed:
    """A plugin raised, timed out, or returned an invalid value; `key` names the occasion."""

    plugin: str
    hook: str
    key: str
    message: str
    traceback: str | None = None
    """Traceback of the plugin's own exception."""


@dataclass(frozen=True)
class RolloutSealed:
    """A rollout has its result."""

    result: Result


@dataclass(frozen=True)
class GroupFinished:
    """All members of a group have their results."""

    group: int
    task: str
    results: tuple[Result, ...]
    earlier: bool = False
    """Earlier processes sealed all of them."""


@dataclass(frozen=True)
class JobSummary:
    """How a run ended. `completed`: every rollout is sealed. `aborted`: why the run was aborted."""

    name: str
    folder: str
    uri: str
    total: int
    outcomes: Mapping[str, int]
    mean_reward: float | None
    completed: bool
    aborted: str | None
    resumable: bool
    stats: Mapping[str, Any] = field(default_factory=dict)
    tracebacks: Mapping[str, int] = field(default_factory=dict)
    """Tracebacks of the agent's own exceptions and their number of rollouts, most frequent first."""


@dataclass(frozen=True)
class JobEnded:
    """The run is over."""

    summary: JobSummary


@dataclass(frozen=True)
class WorkspaceAcquired:
    """A new attempt has its workspace, this many seconds after the request."""

    index: int
    seconds: float


@dataclass(frozen=True)
class ToolEnded:
    """A tool call has its observation. `tool` is the name that the model wrote, which may be unknown."""

    index: int
    tool: str
    seconds: float
    error: bool
    traceback: str | None = None
    """Traceback of the tool's own exception."""


@dataclass(frozen=True)
class AgentFailed:
    """The agent's own code has raised in a rollout, whose end may be recorded later."""

    task: str
    member: int
    traceback: str


@dataclass(frozen=True)
class VerifierFailed:
    """The verifier of a rollout has raised, or has written no usable report, so the verdict is a failed one."""

    task: str
    member: int
    message: str
    output: str
    """The end of what its commands printed."""


@dataclass(frozen=True)
class StorageRequested:
    """One request to object storage has ended; a retry is a separate request. `failed`: it had no usable response."""

    operation: str
    """create, put, get, list, delete, head."""
    seconds: float
    failed: bool


Event = (
    JobStarted
    | WorkspaceAcquired
    | RolloutStarted
    | TurnEnded
    | ModelCallFailing
    | ModelSilent
    | StepBuilt
    | ToolEnded
    | AgentFailed
    | VerifierFailed
    | AttemptFailed
    | PluginFailed
    | RolloutSealed
    | GroupFinished
    | StorageRequested
    | JobEnded
)
Observer = Callable[[Event], None]
