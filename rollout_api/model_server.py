"""`ModelServer`: an inference engine that a cluster runs for its jobs."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from rollout_api.base import API_VERSION, ApiModel, ShortText
from rollout_api.conditions import Condition, Metadata


class ModelServerSpec(ApiModel):
    """What is served, and on what."""

    model: ShortText
    """Name under which the model is served."""
    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = None
    """Where its weights are."""
    image: ShortText | None = None
    """Image of the engine."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Servers."""
    pod_template: dict[str, Any] | None = None
    """Merged over the pods that the operator builds, containers by name."""


class Gate(StrEnum):
    """Whether runners may call the servers."""

    OPEN = "Open"
    SHUT = "Shut"


class PolicyStatus(ApiModel):
    """The policy update that is under way, or the last one."""

    current: Annotated[int, Field(ge=0)] = 0
    """Version that ready servers serve."""
    target: Annotated[int, Field(ge=0)] = 0
    """Version that the update leads to; equal to `current` when none is under way."""
    gate: Gate = Gate.OPEN
    """`Shut`: runners start no call, and those that run are held by the servers."""
    update: Annotated[int, Field(ge=0)] = 0
    """Counts the updates; runners acknowledge this number."""
    paused: bool = False
    """All servers are paused: a stream that falls silent from now on has no more tokens of `current` to come."""
    mixed: Annotated[list[Annotated[str, StringConstraints(max_length=128)]], Field(max_length=1024)] = []
    """Runners (`<job uid>/<index>`) whose acknowledgement was not waited for: where their calls change version is unknown."""


class ServerState(StrEnum):
    """What one server is good for."""

    STARTING = "Starting"
    PENDING_WEIGHTS = "PendingWeights"
    READY = "Ready"
    EVICTED = "Evicted"


class ServerStatus(ApiModel):
    """One server."""

    name: Annotated[str, StringConstraints(max_length=253)]
    """Its pod."""
    url: Annotated[str, StringConstraints(max_length=2048)]
    """Where runners reach it."""
    uid: Annotated[str, StringConstraints(max_length=64)] = ""
    """Uid of its pod: another one is another server."""
    policy_version: Annotated[int, Field(ge=0)] | None = None
    """Version that it was last seen to serve."""
    ready: bool = False
    """Serves `policy.current`, verified; runners call no other."""
    state: ServerState = ServerState.STARTING
    """What it is good for."""


class ModelServerStatus(ApiModel):
    """What the operator has seen."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready and what leads there."""
    url: Annotated[str, StringConstraints(max_length=2048)] | None = None
    """Service in front of all servers, for clients that do not choose among them."""
    servers: Annotated[list[ServerStatus], Field(max_length=256)] = []
    """The servers, by name."""
    policy: PolicyStatus = PolicyStatus()
    """Version, and the gate that runners watch."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Pods; for the scale subresource."""
    selector: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Label selector of the pods; for the scale subresource."""


class ModelServer(ApiModel):
    """An inference engine that a cluster runs for its jobs."""

    api_version: Literal["rollout.dev/v1alpha1"] = API_VERSION
    kind: Literal["ModelServer"] = "ModelServer"
    metadata: Metadata
    spec: ModelServerSpec
    """What is asked for."""
    status: ModelServerStatus | None = None
    """What is there."""
