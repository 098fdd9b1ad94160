"""`SandboxPool`: sandboxes that are started ahead of need, for all jobs of their namespace; and which jobs fit one."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from rollout_api.base import API_VERSION, ApiModel, ObjectName, Quantity, Seconds, ShortText, quantity_value
from rollout_api.conditions import Condition, Metadata, Timestamp
from rollout_api.measured_memory import Measured
from rollout_api.sandbox import (
    Network,
    NetworkAccess,
    Resources,
    SandboxSpec,
    SandboxTemplate,
    Security,
    WorkspaceMode,
    Workspaces,
)

LONGEST_SECONDS = 604_800
"""Longest time that the API allows. An executor of a pool never ends itself for want of requests: the operator ends it."""


class PoolSandbox(ApiModel):
    """The sandboxes of a pool. Fields mean the same as in a job's `spec.sandbox`."""

    image: ShortText
    """Container image, the base of all environments that may use the pool."""
    resources: Resources = Resources()
    """Limits of one workspace. A sandbox requests that much for each of its places, of memory `memoryRequest`."""
    per_sandbox: Annotated[int, Field(ge=1, le=1024)] = 8
    """Workspaces of one sandbox at once."""
    network: Network = Network()
    """Destinations that its workspaces may reach, by phase. A job that needs more does not fit."""
    start_seconds: Seconds = 600
    """Time limit for a sandbox to become ready. Beyond it, it is replaced."""
    lifetime_seconds: Seconds = 86_400
    """Longest lifetime of a sandbox, at which its workspaces are lost. `recycle.ageSeconds` replaces it earlier."""
    runtime_class_name: ObjectName | None = None
    """Kubernetes RuntimeClass of the pods, such as gvisor."""
    pod_template: dict[str, Any] | None = None
    """Merged into the pod that the operator builds, as for a job: node selection, priorityClassName, spread."""
    security: Security = Security.STANDARD
    """What the pod template may change."""


class Recycle(ApiModel):
    """When a sandbox of a pool is replaced by a new one. It gets no more workspaces, and is deleted when it is empty."""

    age_seconds: Seconds = 43_200
    """Age from which on it is replaced."""
    uses: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """Workspaces that it has hosted."""
    disk: Quantity | None = None
    """Bytes that its workspaces and the layers below them use. Default: half of what its workspaces may write
    (`resources.disk`), or 20Gi.
    """


UNLIMITED_DISK = "20Gi"
"""Disk from which on a sandbox without limits is replaced: a tenth of an ordinary node's."""


class SandboxPoolSpec(ApiModel):
    """Desired state of a SandboxPool."""

    sandbox: PoolSandbox
    """The sandboxes."""
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Sandboxes that are always ready. `kubectl scale` changes it."""
    max_replicas: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Most sandboxes, started as jobs need places. Equal to `replicas` when left out or smaller."""
    idle_seconds: Annotated[int, Field(ge=0, le=LONGEST_SECONDS)] = 300
    """Time for which sandboxes beyond `replicas` are kept after the need for them has ended."""
    recycle: Recycle = Recycle()
    """When sandboxes are replaced."""

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.max_replicas or 0)


def recycle_bytes(spec: SandboxPoolSpec) -> float:
    """Return the disk use at which a sandbox of the pool is replaced, in bytes."""
    if spec.recycle.disk is not None:
        return quantity_value(spec.recycle.disk)
    if spec.sandbox.resources.disk is not None:
        return quantity_value(spec.sandbox.resources.disk) * spec.sandbox.per_sandbox / 2
    return quantity_value(UNLIMITED_DISK)


class PoolPlaces(ApiModel):
    """Places for workspaces in the ready sandboxes of a pool."""

    total: Annotated[int, Field(ge=0)] = 0
    """All places."""
    used: Annotated[int, Field(ge=0)] = 0
    """Places with a workspace."""
    wanted: Annotated[int, Field(ge=0)] = 0
    """Places that the runners of all jobs want at the moment, used ones included."""


class PoolMemory(Measured):
    """Memory that new sandboxes request, and what workspaces of ended sandboxes have used. Old use fades."""

    request: Quantity | None = None
    """Memory that new sandboxes request for each workspace. Without it, too little was measured, and they request
    `resources.memory`.
    """


class SandboxPoolStatus(ApiModel):
    """Observed state of a SandboxPool."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Existing sandboxes, without those that are being drained."""
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    """Those that are ready."""
    desired_replicas: Annotated[int, Field(ge=0)] = 0
    """Sandboxes that the pool should have now, between `replicas` and `maxReplicas`."""
    draining: Annotated[int, Field(ge=0)] = 0
    """Sandboxes that get no more workspaces and are deleted when they are empty."""
    places: PoolPlaces = PoolPlaces()
    """Places for workspaces."""
    memory: PoolMemory | None = None
    """Measured memory, if `resources.memoryRequest` is `Measured`."""
    surplus_since: Timestamp | None = None
    """Since when fewer sandboxes than desired are needed."""
    selector: Annotated[str, StringConstraints(max_length=512)] = ""
    """Label selector of its pods, for the scale subresource."""


class SandboxPool(ApiModel):
    """Warm sandboxes of one base image that all jobs of a namespace share."""

    api_version: Literal["rollout.dev/v1alpha1"] = API_VERSION
    kind: Literal["SandboxPool"] = "SandboxPool"
    metadata: Metadata
    spec: SandboxPoolSpec
    """Desired state."""
    status: SandboxPoolStatus | None = None
    """Observed state."""


def pooled_sandbox(pool: PoolSandbox) -> SandboxSpec:
    """Return the spec of a pool's Sandboxes."""
    return SandboxSpec(
        image=pool.image,
        resources=pool.resources,
        network=pool.network,
        start_seconds=pool.start_seconds,
        idle_seconds=LONGEST_SECONDS,
        lifetime_seconds=pool.lifetime_seconds,
        runtime_class_name=pool.runtime_class_name,
        workspaces=Workspaces(mode=WorkspaceMode.OVERLAY, per_sandbox=pool.per_sandbox),
    )


# Fields of a pod's spec that decide on which nodes and when it runs, and change nothing of what runs in it.
_PLACEMENT = {
    "affinity",
    "nodeSelector",
    "preemptionPolicy",
    "priorityClassName",
    "schedulerName",
    "tolerations",
    "topologySpreadConstraints",
}


def why_unfit(pool: PoolSandbox, wanted: SandboxSpec, job: SandboxTemplate, security: Security) -> str:
    """Return why workspaces of a job's Sandbox cannot be in a pool's instead; empty if they can."""
    if wanted.image != pool.image:
        return f"its image is {pool.image}, and the job needs {wanted.image}"
    if wanted.workspaces.mode is WorkspaceMode.PLAIN:
        return "the job wants sandbox.workspaces.mode Plain, and pools are Overlay"
    if wanted.runtime_class_name != pool.runtime_class_name:
        return "its runtimeClassName differs from the job's"
    if (job.pod_template or {}) != (pool.pod_template or {}) and (
        job.pod_template or not _only_places(pool.pod_template)
    ):
        return "its podTemplate differs from the job's, in more than where pods are placed"
    if security is not pool.security:
        return "its security differs from the job's"
    for name in ("cpu", "memory", "disk"):
        needed, offered = getattr(wanted.resources, name), getattr(pool.resources, name)
        if offered is None:
            continue
        if needed is None or quantity_value(needed) > quantity_value(offered):
            return f"it offers resources.{name} {offered} a workspace, and the job needs {needed or 'no limit'}"
    offered_access = [*pool.network.by_phase().values()]
    for phase, access in wanted.network.by_phase().items():
        if not _is_within(access, offered_access):
            return f"the job needs network.{phase} {access}, which no phase of the pool allows"
    return ""


def _only_places(template: Mapping[str, Any] | None) -> bool:
    """Whether a podTemplate decides at most on which nodes and when its pods run."""
    template = template or {}
    return template.keys() <= {"metadata", "spec"} and (template.get("spec") or {}).keys() <= _PLACEMENT


def _is_within(wanted: NetworkAccess, offered: list[NetworkAccess]) -> bool:
    """Whether the pods' NetworkPolicy, which is the same in all phases, allows it. Executors enforce the phases."""
    if wanted == "None":
        return True
    if wanted == "Public":
        return "Public" in offered
    listed = {pair for access in offered if isinstance(access, list) for pair in access}
    return set(wanted) <= listed
