"""`Sandbox`: one untrusted pod (or local process) that hosts workspaces; and the part of it that a job declares."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from rollout_api.base import API_VERSION, ApiModel, ObjectName, Quantity, Seconds, distinct
from rollout_api.conditions import Condition, Metadata
from rollout_api.selectors import LabelSelector

WORKING_DIR = "/workspace"
"""Where commands start when neither the manifest nor the image says."""


class Provider(StrEnum):
    """`Local`: processes of this machine. `Container`: Docker or Podman. `Kodo`: the kodo package. `Cluster`: Sandboxes of a
    cluster; inside a cluster always this."""

    LOCAL = "Local"
    CONTAINER = "Container"
    KODO = "Kodo"
    CLUSTER = "Cluster"


class WorkspaceMode(StrEnum):
    """`Overlay`: many isolated workspaces in one sandbox. `Plain`: one, on the sandbox's own root. `Auto` tries."""

    AUTO = "Auto"
    OVERLAY = "Overlay"
    PLAIN = "Plain"


AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4096)]
UserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)?$", max_length=256)]


class EnvVar(ApiModel):
    """One environment variable."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
    """Name of the variable."""
    value: Annotated[str, StringConstraints(max_length=32_768)] = ""
    """Its value, taken literally."""


DISTINCT_VARIABLES = distinct("name", "{} is set twice; keep one of them")


class Resources(ApiModel):
    """What one workspace may use. A sandbox of N workspaces asks for N times cpu, memory and disk."""

    cpu: Quantity | None = None
    """Cores, such as `500m` or `2`."""
    memory: Quantity | None = None
    """Memory, such as `512Mi`. A workspace over it is ended before its sandbox's own limit is hit."""
    disk: Quantity | None = None
    """Bytes that may be written, such as `2Gi`."""
    processes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Processes and threads that may live at once."""
    file_size: Quantity | None = None
    """The largest single file."""


# RFC 1123 host name or IPv4 address, or a bracketed IPv6 address; then a port.
HostPort = Annotated[
    str,
    StringConstraints(
        pattern=r"^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]):[0-9]{1,5}$",
        max_length=259,
    ),
]
# The CRD cannot check a union's members, so the first wrong entry ends the check: 4096 tasks may each have hundreds.
NetworkAccess = (
    Literal["None", "Public"] | Annotated[list[HostPort], Field(min_length=1, max_length=256, fail_fast=True)]
)
"""`None`; `Public` (no private, link-local or cluster address); or the host:port pairs that may be reached."""


class Network(ApiModel):
    """What a workspace may reach, by phase."""

    setup: NetworkAccess = "None"
    """While the task's files and setup commands run: `None`; `Public`, the open internet alone; or a list of `host:port`."""
    agent: NetworkAccess = "None"
    """While the agent works: `None`; `Public`, the open internet alone; or a list of `host:port`."""
    verifier: NetworkAccess = "None"
    """While the result is graded: `None`; `Public`, the open internet alone; or a list of `host:port`."""


class Workspaces(ApiModel):
    """How many workspaces a sandbox hosts and how they are made."""

    mode: WorkspaceMode = WorkspaceMode.AUTO
    """`Auto` takes `Overlay` where the platform can, else `Plain`, with the reason."""
    per_sandbox: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Workspaces of one sandbox at once; `groupSize` when left out."""


class Security(StrEnum):
    """`Standard`: a pod template cannot lend rights. `Privileged`: it can, in the namespaces that the chart lists."""

    STANDARD = "Standard"
    PRIVILEGED = "Privileged"


class SandboxBase(ApiModel):
    """What a sandbox is, whoever asks for it."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """The task's own root file system: the name of a container image, or for the `Local` provider also a path."""
    working_dir: Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4096)] | None = None
    """Folder in which commands start and files are placed; made when missing. Left out: on a laptop the image's own, if it
    names one, else `/workspace`."""
    user: UserName | None = None
    """User of all commands: a name, a uid or uid:gid. The image's own user when left out."""
    env: Annotated[list[EnvVar], Field(max_length=256), DISTINCT_VARIABLES] = []
    """Environment of all commands."""
    resources: Resources = Resources()
    """Bounds of one workspace."""
    network: Network = Network()
    """What a workspace may reach, by phase."""
    start_seconds: Seconds = 600
    """Time from asking for a sandbox to its being ready; after it the attempt fails as infrastructure."""
    idle_seconds: Seconds = 900
    """A sandbox to which no runner has spoken for so long ends itself."""
    lifetime_seconds: Seconds = 86_400
    """Hard end of a sandbox's life."""
    runtime_class_name: ObjectName | None = None
    """Kubernetes RuntimeClass of sandbox pods, such as gvisor."""
    pod_template: dict[str, Any] | None = None
    """Merged over the pod that the operator builds, containers by name. What would lend rights is refused."""
    workspaces: Workspaces = Workspaces()
    """How workspaces are made and packed."""


class KodoBackend(StrEnum):
    """What the kodo package starts containers with."""

    DOCKER = "Docker"
    KUBERNETES = "Kubernetes"


class Kodo(ApiModel):
    """How the kodo package (provider `Kodo`) starts containers."""

    backend: KodoBackend = KodoBackend.DOCKER
    """`Docker`: on this machine. `Kubernetes`: as pods, whose addresses must be reachable from where the job runs."""
    namespace: ObjectName = "default"
    """Namespace of the pods."""
    node_selector: Annotated[dict[str, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)] = {}
    """Labels of the nodes that pods may run on."""


class SandboxTemplate(SandboxBase):
    """The sandbox that every task of a job gets."""

    provider: Provider = Provider.LOCAL
    """Where sandboxes come from when the job runs outside a cluster."""
    snapshot_every_turns: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Store a snapshot of the workspace after every so many turns, for `tasks.branch` to start from; none when left out."""
    snapshot_paths: Annotated[list[AbsolutePath], Field(max_length=64)] = []
    """Folders that a `Plain` workspace's snapshots keep beside the working directory. In `Overlay` they have all that was
    changed."""
    snapshot_limit: Quantity = "10Gi"
    """Most bytes of one layer of a snapshot; over it, that snapshot is not taken."""
    kodo: Kodo = Kodo()
    """How the kodo package starts containers, where `provider` is `Kodo`."""


class SandboxOverrides(ApiModel):
    """What a single task changes of `spec.sandbox`; a field left out keeps the job's value."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """Container image."""
    working_dir: Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4096)] | None = None
    """Folder in which commands start."""
    user: UserName | None = None
    """User of all commands."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = []
    """Added to the job's; the same name replaces it."""
    resources: Resources | None = None
    """Bounds of one workspace, all of them."""
    network: Network | None = None
    """What a workspace may reach, all phases."""

    def apply(self, template: SandboxTemplate) -> SandboxTemplate:
        """The job's template with this task's changes."""
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
    """What becomes of a Sandbox that has ended."""

    DELETE = "Delete"
    RETAIN = "Retain"


class SandboxSpec(SandboxBase):
    """A Sandbox that is asked for, by a runner or by hand."""

    clients: LabelSelector | None = None
    """Selector of the pods that may reach a Sandbox without an owning job; a job's own runners reach its Sandboxes."""
    security: Security = Security.STANDARD
    """What its pod template may change; a job's Sandboxes take it from their RolloutJob."""
    when_finished: WhenFinished = WhenFinished.DELETE
    """`Delete` removes the Sandbox and its pod soon after it has ended; `Retain` keeps the Sandbox, to be read."""


class SandboxPlaces(ApiModel):
    """Workspaces that the sandbox can host. Only its executor knows how many are free."""

    total: Annotated[int, Field(ge=0, le=1024)] = 0
    """Workspaces at once."""


class SandboxStatus(ApiModel):
    """What the operator has seen."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Scheduled, ImagePulled, Overlay, Ready, Finished."""
    pod_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """The pod."""
    pod_ip: Annotated[Annotated[str, StringConstraints(max_length=64)] | None, Field(alias="podIP")] = None
    """Its address."""
    node_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Its node."""
    mode: WorkspaceMode | None = None
    """How workspaces are made here."""
    places: SandboxPlaces | None = None
    """How many workspaces it hosts."""


class Sandbox(ApiModel):
    """One untrusted pod of a task's image that hosts workspaces."""

    api_version: Literal["rollout.dev/v1alpha1"] = API_VERSION
    kind: Literal["Sandbox"] = "Sandbox"
    metadata: Metadata
    spec: SandboxSpec
    """What is asked for."""
    status: SandboxStatus | None = None
    """What is there."""
