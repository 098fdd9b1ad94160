"""Build the pod of a Sandbox: the unchanged task image, started with the executor. It is untrusted and has no secrets.

A sandbox of N workspaces requests N times the limits of one workspace, plus what the executor needs. No side effects.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_api.base import MEBIBYTE, quantity, quantity_value
from rollout_api.cluster import (
    EXECUTOR_PATH,
    EXECUTOR_PORT,
    EXECUTOR_STATE,
    MANAGED_BY,
    MOST_LAYER_BYTES,
    NETWORK_LABEL,
    ROLE_LABEL,
    SANDBOX_LABEL,
    SANDBOX_ROLE,
    executor_token,
    token_sha256,
)
from rollout_api.on_cluster import template as templates
from rollout_api.on_cluster.nodes import NodeCounts, user_namespaces_label
from rollout_api.on_cluster.objects import Json, owned_object, owner_reference
from rollout_api.on_cluster.operator_config import Images
from rollout_api.on_cluster.template import BUNDLE_VOLUME, CONTAINER, INIT_CONTAINER, OVERLAY_ANNOTATION, STATE_VOLUME
from rollout_api.sandbox import Resources, SandboxSpec, WorkspaceMode

# Measured in a pod: 24 MB for the executor and 3 MB for each workspace's own processes. Twice that, because the
# executor would take missing memory from the workspaces: on cgroup v2 exceeding the pod's limit ends them all.
EXECUTOR_MEMORY = 48 * MEBIBYTE
WORKSPACE_MEMORY = 6 * MEBIBYTE
# The executor keeps up to 64 MiB of each stream of a command's output in its state folder; this is enough for a few
# large ones.
EXECUTOR_DISK = 256 * MEBIBYTE
WORKSPACE_DISK = 64 * MEBIBYTE
# Memory that the smallest useful limit of a pod template has to leave to the workspaces.
LEAST_MEMORY = 16 * MEBIBYTE


@dataclass(frozen=True)
class Needs:
    """Resources of a whole sandbox; None for a resource without a limit."""

    places: int
    cpu_millis: int | None
    memory_bytes: int | None
    """Memory of the workspaces alone; the same applies to `disk_bytes`."""
    disk_bytes: int | None

    @property
    def own_memory(self) -> int:
        """Bytes that the executor needs besides the workspaces."""
        return EXECUTOR_MEMORY + self.places * WORKSPACE_MEMORY

    @property
    def own_disk(self) -> int:
        """Bytes that the executor may write besides the workspaces."""
        return EXECUTOR_DISK + self.places * WORKSPACE_DISK

    @property
    def disk_limit(self) -> int | None:
        """Return the bytes at which the kubelet ends the pod. It must never act before the executor, which ends the
        workspace that exceeds its own limit: below each place may lie a prepared state as large as a workspace, and the
        layers from which it was restored.
        """
        return None if self.disk_bytes is None else 2 * self.disk_bytes + self.own_disk + MOST_LAYER_BYTES

    def requests(self) -> dict[str, str]:
        """Return the container's requests. Without any, the pod would be the first to be evicted."""
        disk = {} if self.disk_bytes is None else {"ephemeral-storage": quantity(self.disk_bytes + self.own_disk)}
        return {"memory": quantity(self.own_memory)} | self.limits() | disk

    def limits(self) -> dict[str, str]:
        limits = {}
        if self.cpu_millis is not None:
            limits["cpu"] = f"{self.cpu_millis}m"
        if self.memory_bytes is not None:
            limits["memory"] = quantity(self.memory_bytes + self.own_memory)
        if self.disk_limit is not None:
            limits["ephemeral-storage"] = quantity(self.disk_limit)
        return limits


def needs_of(one: Resources, places: int) -> Needs:
    """Return the resources of a sandbox with this many places, given the limits of one workspace.

    With `memoryRequest`, its memory is less than the workspaces' limits together, but enough for each of them alone.
    """
    memory = None
    if one.memory is not None and one.requested_memory is not None:
        memory = max(quantity_value(one.memory), one.requested_memory * places)
    return Needs(
        places=places,
        cpu_millis=None if one.cpu is None else max(1, math.ceil(quantity_value(one.cpu) * 1000 * places)),
        memory_bytes=None if memory is None else math.ceil(memory),
        disk_bytes=None if one.disk is None else math.ceil(quantity_value(one.disk) * places),
    )


def bytes_of(given: object, where: str) -> int:
    """Parse an unvalidated quantity into bytes. Raises ValueError that names `where`."""
    try:
        return math.floor(quantity_value(str(given)))
    except (KeyError, ValueError):
        raise ValueError(f"{where}: {given!r} is not understood; expected a quantity such as 512Mi") from None


SUPPORTED, NOT_ASKED = "Supported", "NotAsked"
NODES_LACK_USER_NAMESPACES = "NodesLackUserNamespaces"
ADMISSION_REFUSED = "AdmissionRefused"
TRIAL_FAILED = "TrialFailed"


@dataclass(frozen=True)
class Choice:
    """A mode, and the condition Overlay that explains the choice."""

    mode: WorkspaceMode
    reason: str
    message: str


def choose_mode(
    asked: WorkspaceMode,
    nodes: NodeCounts,
    *,
    handler: str = "",
    admission_refusal: str | None = None,
    trial_failure: str | None = None,
) -> Choice:
    """Choose the mode of a new pod. The cost does not depend on the number of nodes.

    Args:
        nodes: counts of the cluster's nodes. With 0 nodes, Overlay is assumed to work: an autoscaler may add nodes.
        handler: runtime handler of the pod; a RuntimeClass has the name of its handler by custom.
        admission_refusal: the API server's message when it refused an Overlay pod in this namespace.
        trial_failure: the executor's message when Overlay failed for this namespace and image.
    """
    if asked == WorkspaceMode.PLAIN:
        return Choice(WorkspaceMode.PLAIN, NOT_ASKED, "spec.workspaces.mode is Plain")
    if trial_failure is not None:
        return Choice(WorkspaceMode.PLAIN, TRIAL_FAILED, trial_failure)
    if admission_refusal is not None:
        return Choice(WorkspaceMode.PLAIN, ADMISSION_REFUSED, admission_refusal)
    if nodes.total and not nodes.with_user_namespaces(handler):
        return Choice(
            WorkspaceMode.PLAIN,
            NODES_LACK_USER_NAMESPACES,
            f"none of {nodes.total} nodes reports user namespaces for its {handler_text(handler)}; "
            "they need Linux 6.3, containerd 2.0 and runc 1.2, or newer",
        )
    return Choice(WorkspaceMode.OVERLAY, SUPPORTED, "")


def handler_text(handler: str) -> str:
    """Return a runtime handler's name as used in messages."""
    return f"runtime handler {handler}" if handler else "default runtime"


# The same as for runner pods: long enough for a network hiccup, short enough that a lost node costs half a minute.
NODE_TOLERATION_SECONDS = 30
# The executor ends immediately on a signal; its workspaces have nothing to save.
GRACE_SECONDS = 2
# Capabilities of the executor, only inside the pod's own user namespace. Tested by leaving each out in a real pod:
# without SYS_ADMIN, SYS_CHROOT, SETUID, SETGID and SETFCAP no workspace is created; without the others layers lose
# owners, or mode bits, of files.
OVERLAY_CAPABILITIES = (
    *("SYS_ADMIN", "SYS_CHROOT", "SETUID", "SETGID", "SETFCAP"),
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"),
)
# The uid of `nobody` in distroless images. The init container only copies files that every user may read.
INIT_USER = 65532


@dataclass(frozen=True)
class Identity:
    """The owner of a pod and the key that identifies its callers."""

    name: str
    namespace: str
    uid: str
    key: str
    """Key of the job, or of a Sandbox without a job."""
    owner_labels: Mapping[str, str]
    """Labels of the job or pool; empty for a Sandbox that a person created."""
    network: str
    """Digest of its NetworkPolicy."""


def places_of(spec: SandboxSpec, mode: WorkspaceMode) -> int:
    """Return how many workspaces a sandbox hosts at once."""
    return (spec.workspaces.per_sandbox or 1) if mode == WorkspaceMode.OVERLAY else 1


def pod_for(
    who: Identity, spec: SandboxSpec, choice: Choice, images: Images, template: Mapping[str, Any], *, image_volume: bool
) -> Json:
    """Return the pod. Raises ValueError that names the field if the template leaves no memory for the executor.

    Args:
        template: the user's pod template, validated and without nulls.
        image_volume: whether to mount the executor's image; else an init container copies it.
    """
    places = places_of(spec, choice.mode)
    needs = needs_of(spec.resources, places)
    pod = templates.merge(_base(spec, choice.mode, images, needs, image_volume=image_volume), template)
    container = next(c for c in pod["spec"]["containers"] if c["name"] == CONTAINER)
    invariants = _invariants(who, spec, choice, images, needs, container, image_volume=image_volume)
    container.pop("args", None)
    pod = templates.merge(pod, invariants)
    if choice.mode == WorkspaceMode.OVERLAY:
        pod["spec"]["affinity"] = _overlay_affinity(spec, pod["spec"].get("affinity") or {})
    return pod


def executor_config(
    who: Identity, spec: SandboxSpec, mode: WorkspaceMode, *, memory_bytes: int | None, disk_bytes: int | None
) -> Json:
    """Return the executor's configuration (docs/executor.md). It does not include the token itself."""
    config: Json = {
        "listen": f"tcp:0.0.0.0:{EXECUTOR_PORT}",
        "tokenSha256": token_sha256(executor_token(who.key, who.name, who.uid)),
        "mode": mode.value,
        "places": places_of(spec, mode),
        "stateDir": EXECUTOR_STATE,
        # With `whenIdle`, the operator asks how long it has been idle.
        "idleSeconds": 0 if spec.parks_when_idle else spec.idle_seconds,
    }
    optional = {"user": spec.user, "memoryBytes": memory_bytes, "diskBytes": disk_bytes}
    return config | {key: value for key, value in optional.items() if value is not None}


def _base(spec: SandboxSpec, mode: WorkspaceMode, images: Images, needs: Needs, *, image_volume: bool) -> Json:
    """Return the parts that a template may change."""
    # Kubernetes expands $(NAME) in values; `$$` is an escaped `$`.
    env = [{"name": variable.name, "value": variable.value.replace("$", "$$")} for variable in spec.env]
    container: Json = {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "ports": [{"name": "executor", "containerPort": EXECUTOR_PORT, "protocol": "TCP"}],
        "resources": {"requests": needs.requests(), "limits": needs.limits()},
        "securityContext": _security(spec, mode),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [],
        **({"env": env} if env else {}),
    }
    unwell = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    seconds = NODE_TOLERATION_SECONDS
    pod_spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds} for key in unwell
        ],
        "containers": [container],
        "volumes": [],
    }
    if mode == WorkspaceMode.OVERLAY:
        pod_spec["hostUsers"] = False
    if spec.runtime_class_name:
        pod_spec["runtimeClassName"] = spec.runtime_class_name
    if not image_volume:
        pod_spec["initContainers"] = [_copying_container(images, container["resources"])]
    return {"metadata": {}, "spec": pod_spec}


def _invariants(
    who: Identity,
    spec: SandboxSpec,
    choice: Choice,
    images: Images,
    needs: Needs,
    container: Mapping[str, Any],
    *,
    image_volume: bool,
) -> Json:
    """Return the parts that no template may change, not even a privileged one: the pod's owner, and the executor."""
    bundle = (
        {"image": {"reference": images.executor, "pullPolicy": images.pull_policy}}
        if image_volume
        else {"emptyDir": {}}
    )
    limit = None if needs.disk_limit is None else quantity(needs.disk_limit)
    config = executor_config(
        who, spec, choice.mode, memory_bytes=_memory_for_workspaces(container, needs), disk_bytes=needs.disk_bytes
    )
    command = [f"{EXECUTOR_PATH}/executor", "--config-json", json.dumps(config, separators=(",", ":"))]
    executor = {
        "name": CONTAINER,
        # Escaped as in `env`: commands are expanded too.
        "command": [part.replace("$", "$$") for part in command],
        "volumeMounts": [
            {"name": BUNDLE_VOLUME, "mountPath": EXECUTOR_PATH, "readOnly": True},
            {"name": STATE_VOLUME, "mountPath": EXECUTOR_STATE},
        ],
    }
    pod_spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": spec.lifetime_seconds,
        "containers": [executor],
        "volumes": [
            {"name": BUNDLE_VOLUME, **bundle},
            {"name": STATE_VOLUME, "emptyDir": {"sizeLimit": limit} if limit else {}},
        ],
    }
    labels = {ROLE_LABEL: SANDBOX_ROLE, SANDBOX_LABEL: who.name, NETWORK_LABEL: who.network}
    owner = owner_reference("Sandbox", who.name, who.uid)
    pod = owned_object(
        "Pod", who.name, who.namespace, owner, {**MANAGED_BY, **who.owner_labels, **labels}, spec=pod_spec
    )
    pod["metadata"]["annotations"] = {OVERLAY_ANNOTATION: f"{choice.reason}: {choice.message}"}
    return pod


def _memory_for_workspaces(container: Mapping[str, Any], needs: Needs) -> int | None:
    """Return the memory that the pod's limit, possibly changed by a template, leaves for workspaces."""
    limits = (container.get("resources") or {}).get("limits") or {}
    if "memory" not in limits:
        return needs.memory_bytes
    left = bytes_of(limits["memory"], f"containers[{CONTAINER}].resources.limits.memory") - needs.own_memory
    if left < LEAST_MEMORY:
        least = quantity(needs.own_memory + LEAST_MEMORY)
        raise ValueError(
            f"containers[{CONTAINER}].resources.limits.memory: {limits['memory']} is too little for {needs.places} "
            f"workspaces and the executor; give at least {least}, or leave it out"
        )
    return left if needs.memory_bytes is None else min(left, needs.memory_bytes)


def _overlay_affinity(spec: SandboxSpec, affinity: Mapping[str, Any]) -> Json:
    """Return the affinity that also keeps an Overlay pod off nodes without user namespaces.

    The affinity is required in mode Overlay and preferred in mode Auto. A job in mode Auto whose template selects nodes
    without user namespaces gets Plain sandboxes there.
    """
    offers: Json = {"key": user_namespaces_label(spec.runtime_class_name or ""), "operator": "DoesNotExist"}
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    if spec.workspaces.mode == WorkspaceMode.OVERLAY:
        required = node_affinity.get(templates.REQUIRED) or {}
        # The terms are alternatives, so each one needs the expression. An empty term matches nothing and stays empty.
        terms = [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), offers]} if term else term
            for term in required.get("nodeSelectorTerms") or [{"matchExpressions": []}]
        ]
        node_affinity[templates.REQUIRED] = {**required, "nodeSelectorTerms": terms}
    else:
        preferred = {"weight": 100, "preference": {"matchExpressions": [offers]}}
        node_affinity[templates.PREFERRED] = [*(node_affinity.get(templates.PREFERRED) or ()), preferred]
    return {**affinity, "nodeAffinity": node_affinity}


def _security(spec: SandboxSpec, mode: WorkspaceMode) -> Json:
    if mode == WorkspaceMode.OVERLAY:
        return {
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            # containerd's own profile refuses mount; without AppArmor the field has no effect.
            "appArmorProfile": {"type": "Unconfined"},
            "capabilities": {"drop": ["ALL"], "add": list(OVERLAY_CAPABILITIES)},
        }
    context: Json = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    uid, _, gid = (spec.user or "").partition(":")
    if uid.isdigit():
        # Without capabilities the executor cannot become another user, so it must start as that one.
        context |= {"runAsUser": int(uid), "runAsNonRoot": int(uid) != 0}
        context |= {"runAsGroup": int(gid)} if gid.isdigit() else {}
    return context


def _copying_container(images: Images, resources: Json) -> Json:
    return {
        "name": INIT_CONTAINER,
        "image": images.executor,
        "imagePullPolicy": images.pull_policy,
        "command": ["/executor", "--copy-to", EXECUTOR_PATH],
        # Those of the executor, which runs after it: a quota on limits refuses a pod with a container without them.
        "resources": resources,
        "volumeMounts": [{"name": BUNDLE_VOLUME, "mountPath": EXECUTOR_PATH}],
        "securityContext": {
            "runAsUser": INIT_USER,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
