"""`Sandbox`: one untrusted pod (or local process) that hosts workspaces; and the part of it that a job declares."""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from rollout_api.base import API_VERSION, ApiModel, ObjectName, Quantity, Seconds, ShortText, distinct, quantity_value
from rollout_api.conditions import Condition, Metadata
from rollout_api.selectors import LabelSelector
from rollout_api.storage import Storage

WORKING_DIR = "/workspace"
"""Working directory if neither the manifest nor the image sets one."""


class Provider(StrEnum):
    """`Local`: processes of this machine. `Container`: Docker or Podman. `Kodo`: the kodo package. `Cluster`: Sandboxes
    of a cluster, which runner pods always use.
    """

    LOCAL = "Local"
    CONTAINER = "Container"
    KODO = "Kodo"
    CLUSTER = "Cluster"


class WorkspaceMode(StrEnum):
    """`Overlay`: many isolated workspaces in one sandbox. `Plain`: one, on the sandbox's own root. `Auto`: Overlay if
    possible.
    """

    AUTO = "Auto"
    OVERLAY = "Overlay"
    PLAIN = "Plain"


AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4096)]
UserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)?$", max_length=256)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[-._A-Za-z][-._A-Za-z0-9]*$", max_length=256)]


class EnvVar(ApiModel):
    """One environment variable."""

    name: VariableName
    """Name of the variable."""
    value: Annotated[str, StringConstraints(max_length=32_768)] = ""
    """Its literal value."""


DISTINCT_VARIABLES = distinct("name", "{} is set twice; keep one of them")


MEASURED: Final = "Measured"
MemoryRequest = Annotated[
    str, StringConstraints(pattern=rf"^({MEASURED}|[0-9]+(\.[0-9]+)?(m|k|[MGTP]|[KMGTP]i)?)$", max_length=32)
]


class Resources(ApiModel):
    """Limits of one workspace. A sandbox of N workspaces requests N times cpu, memory and disk."""

    cpu: Quantity | None = None
    """Cores, such as `500m` or `2`."""
    memory: Quantity | None = None
    """Memory, such as `512Mi`. A workspace that exceeds it is ended before its sandbox's own limit is reached."""
    memory_request: MemoryRequest | None = None
    """Memory that a sandbox pod requests for each workspace, at most `memory`, which is the default. With less, workspaces
    wait for each other while they need more together. `Measured`: what earlier sandboxes of the pool, or of runs with
    the same output, have used. Outside a cluster it has no effect.
    """
    disk: Quantity | None = None
    """Bytes that may be written, such as `2Gi`."""
    processes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Most processes and threads at once."""
    file_size: Quantity | None = None
    """Size limit of a single file."""

    @property
    def measured_limit(self) -> float | None:
        """Return the limit of memory in bytes if the request follows measured use; else None."""
        return None if self.memory is None or self.memory_request != MEASURED else quantity_value(self.memory)

    @property
    def requested_memory(self) -> float | None:
        """Return the bytes that a sandbox requests for each workspace; None without a limit. While nothing was measured,
        these are the limit.
        """
        request = self.memory if self.memory_request in (None, MEASURED) else self.memory_request
        return None if request is None else quantity_value(request)

    @model_validator(mode="after")
    def _requests_no_more_than_its_limit(self) -> Self:
        if self.memory_request is None:
            return self
        if self.memory is None or self.requested_memory is None:
            raise ValueError("memoryRequest needs memory, the limit of one workspace; set it")
        if self.requested_memory > quantity_value(self.memory):
            raise ValueError(f"memoryRequest {self.memory_request} is more than memory ({self.memory}); lower it")
        return self


# RFC 1123 host name or IPv4 address, or a bracketed IPv6 address; then a port.
HostPort = Annotated[
    str,
    StringConstraints(
        pattern=r"^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]):[0-9]{1,5}$",
        max_length=259,
    ),
]
# The CRD cannot check a union's members. fail_fast limits the errors: 4096 tasks may each have hundreds of entries.
NetworkAccess = (
    Literal["None", "Public"] | Annotated[list[HostPort], Field(min_length=1, max_length=256, fail_fast=True)]
)
"""`None`; `Public` (no private, link-local or cluster address); or a list of reachable host:port pairs."""


PUBLIC_ONLY = "public:"
"""For executors: prefix of a listed destination that must have a public address (executor/network/rules.py)."""


Phase = Literal["setup", "agent", "verifier"]
"""Phase of a workspace's life, which decides what it may reach."""


class Network(ApiModel):
    """Destinations that a workspace may reach, by phase."""

    setup: NetworkAccess = "None"
    """During the task's setup: `None`; `Public`, only the public internet; or a list of `host:port`."""
    agent: NetworkAccess = "None"
    """While the agent works: `None`; `Public`, only the public internet; or a list of `host:port`."""
    verifier: NetworkAccess = "None"
    """While the result is graded: `None`; `Public`, only the public internet; or a list of `host:port`."""

    def by_phase(self) -> dict[Phase, NetworkAccess]:
        """Return the destinations of each phase."""
        return {"setup": self.setup, "agent": self.agent, "verifier": self.verifier}


class Workspaces(ApiModel):
    """How many workspaces a sandbox hosts and how they are made."""

    mode: WorkspaceMode = WorkspaceMode.AUTO
    """`Auto` uses `Overlay` if the platform supports it, else `Plain`, and reports the reason."""
    per_sandbox: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Workspaces of one sandbox at once; `groupSize` when left out."""


class Security(StrEnum):
    """`Standard`: a pod template cannot grant rights. `Privileged`: it can, in the namespaces that the chart lists."""

    STANDARD = "Standard"
    PRIVILEGED = "Privileged"


class SandboxBase(ApiModel):
    """Fields of every sandbox, of a job or created by hand."""

    image: ShortText | None = None
    """The task's root file system: the name of a container image, or for the `Local` provider also a path."""
    working_dir: AbsolutePath | None = None
    """Folder in which commands start and files are placed; created if missing. Default: `/workspace`; on a laptop
    the image's own working directory, if it has one.
    """
    user: UserName | None = None
    """User of all commands: a name, a uid or uid:gid. The image's own user when left out."""
    env: Annotated[list[EnvVar], Field(max_length=256), DISTINCT_VARIABLES] = []
    """Environment of all commands."""
    resources: Resources = Resources()
    """Limits of one workspace."""
    network: Network = Network()
    """Destinations that a workspace may reach, by phase."""
    start_seconds: Seconds = 600
    """Time limit for a sandbox to become ready. Beyond it, the attempt fails as infrastructure."""
    idle_seconds: Seconds = 900
    """Time without requests from a runner after which a sandbox ends itself."""
    lifetime_seconds: Seconds = 86_400
    """Longest lifetime of a sandbox."""
    runtime_class_name: ObjectName | None = None
    """Kubernetes RuntimeClass of sandbox pods, such as gvisor."""
    pod_template: dict[str, Any] | None = None
    """Merged into the pod that the operator builds, containers by name. Fields that would grant rights are refused."""
    workspaces: Workspaces = Workspaces()
    """How workspaces are created and packed into sandboxes."""


class KodoBackend(StrEnum):
    """Container backend of the kodo package."""

    DOCKER = "Docker"
    KUBERNETES = "Kubernetes"


class Kodo(ApiModel):
    """How the kodo package (provider `Kodo`) starts containers."""

    backend: KodoBackend = KodoBackend.DOCKER
    """`Docker`: on this machine. `Kubernetes`: as pods, whose addresses must be reachable from where the job runs."""
    namespace: ObjectName = "default"
    """Namespace of the pods."""
    node_selector: Annotated[dict[str, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)] = {}
    """Labels of the nodes on which pods may run."""


PoolChoice = Annotated[str, StringConstraints(pattern=r"^(Auto|None|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$", max_length=52)]


class SandboxTemplate(SandboxBase):
    """The sandbox of every task of a job."""

    provider: Provider = Provider.LOCAL
    """What creates sandboxes when the job runs outside a cluster."""
    store_setup: bool = False
    """Store what files and setup of a task change as a layer in the output. Every later workspace, runner and job with
    the same image, files and setup starts from it. Not in `Plain`.
    """
    snapshot_every_turns: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Store a snapshot of the workspace every this many turns, for `tasks.branch` to start from; none when left out."""
    snapshot_paths: Annotated[list[AbsolutePath], Field(max_length=64)] = []
    """Folders that snapshots of a `Plain` workspace include besides the working directory. In `Overlay` they include
    all changes.
    """
    snapshot_limit: Quantity = "10Gi"
    """Most bytes of one layer of a snapshot. A larger snapshot is skipped."""
    kodo: Kodo = Kodo()
    """Settings of the kodo package, for provider `Kodo`."""
    pool: PoolChoice = "Auto"
    """On a cluster: `Auto` uses a SandboxPool of the namespace where one fits, `None` none; or the name of one."""

    @model_validator(mode="after")
    def _stores_layers_in_overlay(self) -> Self:
        if self.store_setup and self.workspaces.mode is WorkspaceMode.PLAIN:
            raise ValueError(
                "storeSetup keeps a layer, which needs workspaces in Overlay, but workspaces.mode is Plain; leave "
                "storeSetup out, or set workspaces.mode to Auto or Overlay"
            )
        return self


class SandboxOverrides(ApiModel):
    """Changes of a single task to `spec.sandbox`. A field left out keeps the job's value."""

    image: ShortText | None = None
    """Container image."""
    working_dir: AbsolutePath | None = None
    """Folder in which commands start."""
    user: UserName | None = None
    """User of all commands."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = []
    """Variables added to the job's. An equal name replaces the job's."""
    resources: Resources | None = None
    """Limits of one workspace, which replace the job's as a whole."""
    network: Network | None = None
    """Destinations by phase, which replace the job's as a whole."""

    def apply(self, template: SandboxTemplate) -> SandboxTemplate:
        """Return the job's template with this task's changes."""
        names = {variable.name for variable in self.env}
        changes: dict[str, Any] = {
            field: value
            for field in ("image", "working_dir", "user", "resources", "network")
            if (value := getattr(self, field)) is not None
        }
        if self.env:
            changes["env"] = [v for v in template.env if v.name not in names] + list(self.env)
        return template.model_copy(update=changes)


class WhenFinished(StrEnum):
    """What happens to a Sandbox that has ended."""

    DELETE = "Delete"
    RETAIN = "Retain"


class Parking(Storage):
    """Where and when a Sandbox is parked."""

    when_idle: bool = False
    """Park the Sandbox after `idleSeconds` without a request and without a running command, instead of ending it: the
    operator sets `running: false`.
    """


class SandboxSpec(SandboxBase):
    """Desired state of a Sandbox that a runner or a person creates."""

    clients: LabelSelector | None = None
    """Selector of the pods that may connect to a Sandbox without an owning job. A job's own runners may connect to its
    Sandboxes.
    """
    security: Security = Security.STANDARD
    """What its pod template may change. A job's Sandboxes inherit it from their RolloutJob."""
    drain: bool = False
    """Give it no further workspaces. The operator sets it for the Sandboxes of a SandboxPool, which it then deletes when
    they are empty.
    """
    parking: Parking | None = None
    """Where `running: false` stores the files of a Sandbox without an owning job or pool."""
    running: bool = True
    """`false` parks the Sandbox: the files of its workspaces are stored in `parking`, and its pod is deleted. `true` brings
    them back in a new pod.
    """
    when_finished: WhenFinished = WhenFinished.DELETE
    """`Delete` removes the Sandbox and its pod soon after it has ended; `Retain` keeps the Sandbox for inspection."""

    @property
    def parks_when_idle(self) -> bool:
        """Whether the operator parks it when it is idle, instead of its executor ending itself."""
        return self.parking is not None and self.parking.when_idle

    @model_validator(mode="after")
    def _parks_in_storage(self) -> Self:
        if not self.running and self.parking is None:
            raise ValueError("running: false needs parking, where the files are stored; create a Sandbox with parking")
        return self


class SandboxPlaces(ApiModel):
    """Workspaces that the sandbox can host. Only its executor knows how many are free."""

    total: Annotated[int, Field(ge=0, le=1024)] = 0
    """Most workspaces at once."""


START_CONDITIONS = ("ImagePulled", "Scheduled", "Reconciled", "Ready")
"""Conditions that are False while a Sandbox starts; the first one that is False explains the delay best."""


class SandboxStatus(ApiModel):
    """Observed state of a Sandbox."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Scheduled, ImagePulled, Overlay, Parked, Ready, Finished."""
    pod_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Name of the pod."""
    pod_ip: Annotated[Annotated[str, StringConstraints(max_length=64)] | None, Field(alias="podIP")] = None
    """Address of the pod."""
    node_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Node of the pod."""
    mode: WorkspaceMode | None = None
    """Workspace mode of the pod."""
    places: SandboxPlaces | None = None
    """Number of workspaces that it hosts."""
    parking: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Number of its last parking. While Parked is True, the files of this one are in storage."""


class Sandbox(ApiModel):
    """One untrusted pod of a task's image that hosts workspaces."""

    api_version: Literal["rollout.dev/v1alpha1"] = API_VERSION
    kind: Literal["Sandbox"] = "Sandbox"
    metadata: Metadata
    spec: SandboxSpec
    """Desired state."""
    status: SandboxStatus | None = None
    """Observed state."""
