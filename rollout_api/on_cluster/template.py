"""The user's pod template: which fields are refused, and how the others are merged into the operator's pod.

Only listed fields are allowed, so that fields that Kubernetes adds later cannot grant rights. No side effects.
"""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollout_api.base import API_GROUP
from rollout_api.manifest import Problem

CONTAINER = "sandbox"
INIT_CONTAINER = "executor"
BUNDLE_VOLUME = "rollout-executor"
STATE_VOLUME = "rollout-state"
OWN_FOLDER = "/.rollout"
"""Mount folder of both volumes. A pod template cannot mount anything there."""

OVERLAY_ANNOTATION = f"{API_GROUP}/overlay"
"""Pod annotation with reason and message of its Sandbox's condition Overlay, as `Reason: message`."""


Json = Any

_TEXT, _FLAG, _TEXTS, _ANY_MAP, _ANY_LIST = "text", "true or false", "a mapping of texts", "a mapping", "a list"
_QUANTITIES = "a mapping of quantities"

REQUIRED, PREFERRED = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
"""Fields of an affinity."""

ALLOWED: Mapping[str, Json] = {
    "metadata": {"labels": _TEXTS, "annotations": _TEXTS},
    "spec": {
        "nodeSelector": _TEXTS,
        "affinity": {
            "nodeAffinity": {
                REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": _ANY_LIST, "matchFields": _ANY_LIST}]},
                PREFERRED: _ANY_LIST,
            },
            "podAffinity": _ANY_MAP,
            "podAntiAffinity": _ANY_MAP,
        },
        "tolerations": _ANY_LIST,
        "topologySpreadConstraints": _ANY_LIST,
        "priorityClassName": _TEXT,
        "schedulerName": _TEXT,
        "imagePullSecrets": _ANY_LIST,
        "dnsPolicy": _TEXT,
        "dnsConfig": _ANY_MAP,
        "hostAliases": _ANY_LIST,
        "volumes": [{"name": _TEXT, "emptyDir": _ANY_MAP, "image": _ANY_MAP}],
        "containers": [
            {
                "name": _TEXT,
                "resources": {"requests": _QUANTITIES, "limits": _QUANTITIES},
                "env": [{"name": _TEXT, "value": _TEXT}],
                "volumeMounts": [{"name": _TEXT, "mountPath": _TEXT, "readOnly": _FLAG, "subPath": _TEXT}],
                "imagePullPolicy": _TEXT,
            }
        ],
    },
}
"""Fields and forms that `security: Standard` allows in a template. A list with one entry means a list of such entries.
"""

_NO_ACCOUNT = "a sandbox has no identity in the cluster; for runners set spec.runners.serviceAccountName"
_NODE = "it would join the node's own namespaces"
_KERNEL = "it changes the pod's rights towards the kernel"
_ONE = "the pod has one container, and the operator sets its command"
_LIFETIME = "the operator decides when the pod ends; for sandboxes set spec.lifetimeSeconds and spec.idleSeconds"
REFUSAL_REASONS: Mapping[str, str] = {
    "serviceAccountName": _NO_ACCOUNT,
    "serviceAccount": _NO_ACCOUNT,
    "automountServiceAccountToken": _NO_ACCOUNT,
    "hostNetwork": _NODE,
    "hostPID": _NODE,
    "hostIPC": _NODE,
    "hostUsers": _NODE,
    "shareProcessNamespace": _ONE,
    "securityContext": f"{_KERNEL}; set the user of commands in spec.user",
    "procMount": _KERNEL,
    "initContainers": _ONE,
    "ephemeralContainers": _ONE,
    "command": _ONE,
    "args": _ONE,
    "lifecycle": _ONE,
    "restartPolicy": "a restart would silently lose the state of all workspaces",
    "activeDeadlineSeconds": _LIFETIME,
    "terminationGracePeriodSeconds": _LIFETIME,
    "image": "use spec.image, or spec.runners.image of a job",
    "runtimeClassName": "use spec.runtimeClassName",
    "envFrom": "it would expose Secrets to untrusted code",
    "valueFrom": "it would expose Secrets to untrusted code; give a value",
    "secret": "it would expose a Secret to untrusted code",
    "projected": "it may hold Secrets and service account tokens",
    "hostPath": "it gives access to the node's disk",
    "csi": "its driver could expose any data with any rights",
    "resourceClaims": "it gives access to devices of the node",
    "claims": "it gives access to devices of the node",
}
"""Why a field is refused, by its name. The message for other fields is that they are not supported."""

NODE_KEYS = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
    "io.kubernetes.cri",
    "io.containerd.",
    "io.katacontainers.",
    "io.cri-containerd",
    "cpu-load-balancing.crio.io",
    "cpu-quota.crio.io",
    "irq-load-balancing.crio.io",
    "unsupported.cpu-load-balancing.crio.io",
    "run.oci.",
)
"""Annotations that change a pod's rights on its node, through the container runtime or the kernel."""

# Annotations and labels by which other software changes a pod later: additional networks that no NetworkPolicy covers,
# and injected containers with their own permissions and credentials. An administrator can add any injector, so this
# list has the common ones; docs/sandboxes.md explains how to handle others.
REFUSED_KEYS = (
    *NODE_KEYS,
    "k8s.v1.cni.cncf.io/",
    "v1.multus-cni.io/",
    "cni.projectcalico.org/",
    "k8s.ovn.org/",
    "ovn.kubernetes.io/",
    "istio.io/",
    "sidecar.istio.io/",
    "inject.istio.io/",
    "proxy.istio.io/",
    "ambient.istio.io/",
    "linkerd.io/",
    "config.linkerd.io/",
    "kuma.io/",
    "consul.hashicorp.com/",
    "vault.hashicorp.com/",
    "vault.security.banzaicloud.io/",
    "dapr.io/",
    "instrumentation.opentelemetry.io/",
    "sidecar.opentelemetry.io/",
    "admission.datadoghq.com/",
    "gke-gcsfuse/",
    "azure.workload.identity/",
    "aadpodidbinding",
    "iam.amazonaws.com/",
    "eks.amazonaws.com/",
)
OWN_KEYS = (f"{API_GROUP}/", "app.kubernetes.io/managed-by")

MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
    "claims": ("name",),
}
"""Keys that identify an entry when two lists are merged (Kubernetes' list-map-keys). Other lists are replaced whole."""
_KEY_DEFAULTS = {"protocol": "TCP"}


class OwnParts(NamedTuple):
    """Parts of the operator's pod that a template may not replace."""

    container: str
    volumes: tuple[str, ...]
    folder: str
    """Mount path of the operator's volumes."""


SANDBOX_PARTS = OwnParts(CONTAINER, (BUNDLE_VOLUME, STATE_VOLUME), OWN_FOLDER)


def without_nulls(value: Json) -> Json:
    """Return the value without null fields: in a template, null means unset."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value if inner is not None]
    return value


def refusals(template: Mapping[str, Json], where: str, own: OwnParts = SANDBOX_PARTS) -> list[Problem]:
    """Return why a template (without nulls) is not allowed in `security: Standard`. `where` is the template's path in the
    manifest.
    """
    found = [*_further_containers(template, where, own.container), *_compare(template, ALLOWED, where)]
    if found:
        return found
    spec, metadata = template.get("spec", {}), template.get("metadata", {})
    for kind in ("labels", "annotations"):
        found += refused_keys(metadata.get(kind, {}), f"{where}.metadata.{kind}")
    volumes = spec.get("volumes", [])
    for index, volume in enumerate(volumes):
        path = f"{where}.spec.volumes[{index}]"
        if volume.get("name") in own.volumes:
            found.append(Problem(f"{path}.name", f"{volume['name']} is the operator's own volume; choose another name"))
        if ("emptyDir" in volume) == ("image" in volume):
            found.append(Problem(path, "expected exactly one of emptyDir and image"))
    names = {volume.get("name") for volume in volumes}
    for index, container in enumerate(spec.get("containers", [])):
        path = f"{where}.spec.containers[{index}]"
        for number, mount in enumerate(container.get("volumeMounts", [])):
            found += _refused_mount(mount, names, f"{path}.volumeMounts[{number}]", own.folder)
    return found


def merge_problems(template: Mapping[str, Json], where: str) -> list[Problem]:
    """Return why a template of `security: Privileged` cannot be merged."""
    spec = template.get("spec", {})
    found = [
        Problem(f"{where}.{name}", "expected a mapping")
        for name in ("metadata", "spec")
        if not isinstance(template.get(name, {}), Mapping)
    ]
    if found or not isinstance(spec, Mapping):
        return found
    for name, (key, *_) in MERGE_KEYS.items():
        entries = spec.get(name, [])
        if not isinstance(entries, list) or not all(
            isinstance(e, Mapping) and isinstance(e.get(key), str) for e in entries
        ):
            found.append(Problem(f"{where}.spec.{name}", f"expected a list of mappings, each with {key}"))
    metadata = {name: keys for name, keys in template.get("metadata", {}).items() if name in ALLOWED["metadata"]}
    found += _compare(metadata, ALLOWED["metadata"], f"{where}.metadata")
    return found + _compare(spec.get("affinity", {}), ALLOWED["spec"]["affinity"], f"{where}.spec.affinity")


def merge(base: Mapping[str, Json], over: Mapping[str, Json]) -> dict[str, Json]:
    """Merge `over` into `base`: mappings field by field, lists of named entries by name; other lists are replaced."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(before, list):
            merged[key] = _merge_lists(key, before, value)
        else:
            merged[key] = value
    return merged


def _merge_lists(field: str, base: list[Json], over: list[Json]) -> list[Json]:
    if field == "tolerations":
        # A user's toleration replaces the operator's for the same taint. The API server validates the user's entries, so
        # they may have any type here.
        replaced = [(t.get("key"), t.get("effect")) for t in over if isinstance(t, Mapping)]
        return [t for t in base if isinstance(t, Mapping) and (t.get("key"), t.get("effect")) not in replaced] + over
    keys = MERGE_KEYS.get(field)
    if keys is None or not all(isinstance(entry, Mapping) for entry in over):
        return list(over)

    def identity(entry: Mapping[str, Json]) -> tuple[str, ...]:
        return tuple(str(entry.get(key, _KEY_DEFAULTS.get(key))) for key in keys)

    merged = {identity(entry): entry for entry in base if isinstance(entry, Mapping)}
    for entry in over:
        merged[identity(entry)] = merge(merged.get(identity(entry), {}), entry)
    return list(merged.values())


def _further_containers(template: Mapping[str, Json], where: str, own: str) -> list[Problem]:
    """Return a refusal for each further container. Problems inside such containers are not reported."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    return [
        Problem(f"{where}.spec.containers[{index}].name", f"is {container.get('name')!r}, expected {own!r}: {_ONE}")
        for index, container in enumerate(containers if isinstance(containers, list) else [])
        if isinstance(container, Mapping) and container.get("name") != own
    ]


def _compare(value: Json, allowed: Json, path: str) -> list[Problem]:
    if isinstance(allowed, str):
        return [] if _has_form(value, allowed) else [Problem(path, f"expected {allowed}")]
    if isinstance(allowed, Sequence):
        if not isinstance(value, list):
            return [Problem(path, "expected a list")]
        return [problem for i, inner in enumerate(value) for problem in _compare(inner, allowed[0], f"{path}[{i}]")]
    if not isinstance(value, Mapping):
        return [Problem(path, "expected a mapping")]
    found = []
    for name, inner in value.items():
        if name in allowed:
            found += _compare(inner, allowed[name], f"{path}.{name}")
        else:
            why = REFUSAL_REASONS.get(name, f"not supported here; supported fields are {', '.join(allowed)}")
            found.append(Problem(f"{path}.{name}", f"refused: {why}"))
    return found


def _has_form(value: Json, form: str) -> bool:
    if form == _TEXT:
        return isinstance(value, str)
    if form == _FLAG:
        return isinstance(value, bool)
    if form == _ANY_LIST:
        return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)
    if not isinstance(value, Mapping):
        return False
    if form == _ANY_MAP:
        return True
    types = str if form == _TEXTS else (str, int, float)
    return all(isinstance(inner, types) and not isinstance(inner, bool) for inner in value.values())


def refused_keys(keys: Iterable[str], path: str, refused: tuple[str, ...] = REFUSED_KEYS) -> list[Problem]:
    """Return why labels or annotations are refused: the operator's own, and those with a prefix in `refused`."""
    found = []
    for key in keys:
        if key.startswith(OWN_KEYS):
            why = "refused: the operator and its NetworkPolicies identify the pod by it; choose another key"
        elif key.startswith(refused):
            why = "refused: it makes other software change the pod's rights or network; remove it"
        else:
            continue
        found.append(Problem(f"{path}[{key}]", why))
    return found


def _refused_mount(mount: Mapping[str, Json], names: set[Json], path: str, folder: str) -> list[Problem]:
    found = []
    if mount.get("name") not in names:
        why = f"{mount.get('name')!r} is not a volume of this template; add it to spec.volumes"
        found.append(Problem(f"{path}.name", why))
    target = posixpath.normpath("/" + str(mount.get("mountPath", "/")).lstrip("/"))
    if _is_below(target, folder) or _is_below(folder, target):
        why = f"{target} would hide the operator's files in {folder}; choose another folder"
        found.append(Problem(f"{path}.mountPath", why))
    return found


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
