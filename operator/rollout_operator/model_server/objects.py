"""The objects of a ModelServer besides its pods: Services, NetworkPolicies, disruption budget, and the weight download.

Sandboxes can never connect to its pods, because they run untrusted code.

With `cache`, a Job without accelerators downloads the weights first, and servers then mount them read-only. Accelerators
are allocated only when the download is complete. Without `cache`, each pod downloads the weights before its engine starts.
Weights in `pvc://` are used in place.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from rollout_api.base import API_GROUP
from rollout_api.cluster import (
    MANAGED_BY,
    MODEL_CONTROL_PORT,
    MODEL_DOWNLOAD_ROLE,
    MODEL_PORT,
    MODEL_SERVER_LABEL,
    MODEL_SERVER_ROLE,
    MODEL_SERVER_UID_LABEL,
    MODEL_WORKER_ROLE,
    ROLE_LABEL,
    RUNNER_ROLE,
)
from rollout_api.model_server import ModelServer
from rollout_api.on_cluster.objects import Json, owned_object, owner_reference
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.selectors import NetworkPeer
from rollout_operator.world import NOT_SANDBOX, operator_peer, tcp

DIGEST: Final = f"{API_GROUP}/digest"
"""Annotation with the digest of the data that an object is built from. If the digest changes, the object is replaced."""

WORKLOAD_KINDS: Final = ("StatefulSet", "LeaderWorkerSet")
OPTIONAL_KINDS: Final = ("PodDisruptionBudget", "InferencePool")
"""Kinds of `optional_objects`."""
REFUSABLE_KINDS: Final = (*WORKLOAD_KINDS, "InferencePool")
"""Kinds whose refusal a condition reports: a quota may refuse them, or the cluster may lack them."""


def api_name(server: str) -> str:
    """Return the name of the Service in front of all servers. The headless Service has the server's own name."""
    return f"{server}-api"


def claim_name(server: str) -> str:
    """Return the name of the PersistentVolumeClaim for `cache.size`."""
    return f"{server}-weights"


def download_name(server: str) -> str:
    """Return the name of the download Job and of its pod's NetworkPolicy."""
    return f"{server}-download"


def labels(server: ModelServer, role: str = MODEL_SERVER_ROLE) -> dict[str, str]:
    """Return the labels of a pod with that role and of related objects."""
    return {**MANAGED_BY, **selector(server, role), MODEL_SERVER_UID_LABEL: server.metadata.uid or ""}


def selector(server: ModelServer, role: str = MODEL_SERVER_ROLE) -> dict[str, str]:
    """Return the label selector for pods with that role."""
    return {MODEL_SERVER_LABEL: server.metadata.name, ROLE_LABEL: role}


def owned(server: ModelServer, kind: str, name: str, role: str = MODEL_SERVER_ROLE, **body: Any) -> Json:
    """Return an object that garbage collection deletes with the ModelServer."""
    owner = owner_reference("ModelServer", server.metadata.name, server.metadata.uid)
    return owned_object(kind, name, server.metadata.namespace, owner, labels(server, role), **body)


def with_digest(body: dict[str, Any], source: Any = None) -> dict[str, Any]:
    """Return the object with an annotation that has the digest of `source`, or of the object itself."""
    digest = digest_of(body if source is None else source)
    return {**body, "metadata": {**body["metadata"], "annotations": {DIGEST: digest}}}


def digest_of(value: Any) -> str:
    """Return the first 16 hexadecimal digits of a value's SHA-256."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def noted_digest(obj: Mapping[str, Any]) -> str | None:
    """Return the digest in an object's annotation."""
    annotations: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return annotations.get(DIGEST)


_SERVING: Final = [MODEL_SERVER_ROLE, MODEL_WORKER_ROLE]


def url(server: ModelServer) -> str:
    """Return the URL of the Service in front of all servers."""
    return f"http://{api_name(server.metadata.name)}.{server.metadata.namespace}.svc:{MODEL_PORT}"


def services(server: ModelServer) -> list[Json]:
    """Return the Service in front of all ready servers, and the headless Service that gives each server a DNS name.

    A LeaderWorkerSet creates its headless Service itself.
    """
    name = server.metadata.name
    front = _service(server, api_name(name), {})
    # Pods that are not ready have DNS names too, because servers that still start are looked up by name.
    headless = _service(server, name, {"clusterIP": "None", "publishNotReadyAddresses": True})
    return [front] if server.spec.parallelism.nodes > 1 else [headless, front]


def optional_objects(server: ModelServer) -> dict[str, Json | None]:
    """Return by kind the objects that a change of the spec can remove, or None. They have the server's name."""
    return dict(zip(OPTIONAL_KINDS, (_disruption_budget(server), _inference_pool(server)), strict=True))


def _inference_pool(server: ModelServer) -> Json | None:
    pool = server.spec.inference_pool
    if pool is None:
        return None
    picker = pool.endpoint_picker
    spec = {
        "selector": {"matchLabels": selector(server)},
        "targetPorts": [{"number": MODEL_PORT}],
        "endpointPickerRef": {"name": picker.name, "port": {"number": picker.port}, "failureMode": picker.failure_mode},
    }
    return with_digest(owned(server, "InferencePool", server.metadata.name, spec=spec))


def _disruption_budget(server: ModelServer) -> Json | None:
    budget = server.spec.pod_disruption_budget
    if budget is None:
        return None
    spec = {
        "maxUnavailable": budget.max_unavailable,
        "selector": {
            "matchLabels": {MODEL_SERVER_LABEL: server.metadata.name},
            # All pods of a multi-node server count, because the end of one ends the others.
            "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": _SERVING}],
        },
        # A server that never became ready must not block the drain of its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return with_digest(owned(server, "PodDisruptionBudget", server.metadata.name, spec=spec))


def _service(server: ModelServer, name: str, more: Json) -> Json:
    ports = [{"name": "model", "port": MODEL_PORT, "targetPort": MODEL_PORT, "protocol": "TCP"}]
    return with_digest(owned(server, "Service", name, spec={**more, "selector": selector(server), "ports": ports}))


FIRST_PORT, LAST_PORT = 1024, 65_535
"""Range of the ports that NCCL may choose in the engine's pod."""


def policies(server: ModelServer, config: OperatorConfig) -> list[Json]:
    """Return the NetworkPolicies of the servers and of the download pod, which accepts no connections.

    Outgoing connections are unrestricted, because stores, hubs and trainers can be anywhere.
    """
    name = server.metadata.name
    return [
        _policy(server, name, {"matchLabels": {MODEL_SERVER_LABEL: name}}, list(_ingress(server, config))),
        _policy(server, download_name(name), {"matchLabels": selector(server, MODEL_DOWNLOAD_ROLE)}, []),
    ]


def _ingress(server: ModelServer, config: OperatorConfig) -> Iterator[Json]:
    spec = server.spec
    runners = {"podSelector": {"matchLabels": {ROLE_LABEL: RUNNER_ROLE}}}
    yield {"from": [runners, *map(_without_sandboxes, spec.clients)], "ports": [tcp(MODEL_PORT)]}
    yield {"from": [operator_peer(config)], "ports": [tcp(MODEL_CONTROL_PORT)]}
    if spec.weight_transfer.push and spec.weight_transfer.push.peers is not None:
        trainer = _without_sandboxes(NetworkPeer(pod_selector=spec.weight_transfer.push.peers))
        yield {"from": [trainer], "ports": _tensor_ports(spec.weight_transfer.push.ports)}
    if spec.parallelism.nodes > 1:
        own = {"podSelector": {"matchLabels": {MODEL_SERVER_LABEL: server.metadata.name}}}
        yield {"from": [own], "ports": _tensor_ports([])}


def _tensor_ports(ports: list[int]) -> list[Json]:
    """Return the listed ports, or all ports that an engine may open except the data and control ports."""
    if ports:
        return [tcp(port) for port in ports]
    return [
        {"protocol": "TCP", "port": FIRST_PORT, "endPort": MODEL_PORT - 1},
        {"protocol": "TCP", "port": MODEL_CONTROL_PORT + 1, "endPort": LAST_PORT},
    ]


def _without_sandboxes(peer: NetworkPeer) -> Json:
    """Return the peer without sandbox pods. A peer without a pod selector means all pods of its namespaces."""
    pods = peer.pod_selector.wire() if peer.pod_selector else {}
    pods["matchExpressions"] = [*pods.get("matchExpressions", ()), NOT_SANDBOX]
    namespaces = {"namespaceSelector": peer.namespace_selector.wire()} if peer.namespace_selector else {}
    return {**namespaces, "podSelector": pods}


def _policy(server: ModelServer, name: str, pods: Json, ingress: list[Json]) -> Json:
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return with_digest(owned(server, "NetworkPolicy", name, spec=spec))


USER: Final = 65532
"""User of the runtime image. Engine and gateway of a pod share it, so that they can read each other's files."""
MODELS: Final = "/models"
"""Mount path of the volume with the weights."""
VOLUME: Final = "weights"
DOWNLOAD: Final = "download"
"""Name of the container that downloads the weights, for `podTemplate`."""
RETRIES: Final = 6
"""Kubernetes' default for Jobs: failing pods are retried with growing pauses for about ten minutes."""
RESTRICTED: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Weights:
    """The model's weights as mounted in a pod."""

    path: str
    volume: Json
    init_containers: tuple[Json, ...] = ()

    @property
    def mount(self) -> Json:
        return {"name": VOLUME, "mountPath": MODELS, "readOnly": True}


def weights(server: ModelServer, config: OperatorConfig) -> Weights:
    if (claimed := _claim_and_folder(server)) is not None:
        claim, folder = claimed
        return Weights(f"{MODELS}/{folder}".rstrip("/"), _claim_volume(claim))
    if server.spec.cache is not None:
        return Weights(_folder(server), _claim_volume(_cache_claim(server)))
    container = _download_container(server, config)
    return Weights(_folder(server), {"name": VOLUME, "emptyDir": {}}, (container,))


def claim(server: ModelServer) -> Json | None:
    """Return the PersistentVolumeClaim if one is needed."""
    cache = server.spec.cache
    if cache is None or cache.size is None or _claim_and_folder(server) is not None:
        return None
    spec = {
        "accessModes": [cache.access_mode.value],
        **({"storageClassName": cache.storage_class_name} if cache.storage_class_name else {}),
        "resources": {"requests": {"storage": cache.size}},
    }
    name = claim_name(server.metadata.name)
    return owned(server, "PersistentVolumeClaim", name, MODEL_DOWNLOAD_ROLE, spec=spec)


def download_job(server: ModelServer, config: OperatorConfig) -> Json | None:
    """Return the Job that fills the cache; None without a cache."""
    if server.spec.cache is None or _claim_and_folder(server) is not None:
        return None
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "containers": [_download_container(server, config)],
        "volumes": [_claim_volume(_cache_claim(server))],
    }
    spec = {
        "backoffLimit": RETRIES,
        # A replacement pod starts only when the last one has ended, so that one pod at a time writes.
        "podReplacementPolicy": "Failed",
        "template": {"metadata": {"labels": labels(server, MODEL_DOWNLOAD_ROLE)}, "spec": pod},
    }
    return with_digest(owned(server, "Job", download_name(server.metadata.name), MODEL_DOWNLOAD_ROLE, spec=spec))


def pod_security() -> Json:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Otherwise the owner of every file would be changed at every start, which takes minutes for a large model.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _download_container(server: ModelServer, config: OperatorConfig) -> Json:
    model = server.spec.model
    revision = [f"--revision={model.revision}"] if model.revision else []
    return {
        "name": DOWNLOAD,
        "image": config.images.runtime,
        "imagePullPolicy": config.images.pull_policy,
        "command": ["python3", "-m", "agent_runtime.serving.download"],
        "args": [
            f"--uri={server.spec.weights_uri}",
            *revision,
            f"--folder={_folder(server)}",
            # A later pod with the same writer continues an unfinished download.
            f"--writer={server.metadata.uid}",
        ],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "envFrom": [{"secretRef": {"name": model.secret_ref}}] if model.secret_ref else [],
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": VOLUME, "mountPath": MODELS}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _folder(server: ModelServer) -> str:
    """Return the folder of the weights. It is named by their source, so that servers on one claim share equal weights."""
    return f"{MODELS}/{digest_of([server.spec.weights_uri, server.spec.model.revision])}"


def _claim_and_folder(server: ModelServer) -> tuple[str, str] | None:
    """Return claim and folder of a `pvc://` URI."""
    uri = urlsplit(server.spec.weights_uri)
    return (uri.netloc, uri.path.strip("/")) if uri.scheme == "pvc" else None


def _cache_claim(server: ModelServer) -> str:
    assert server.spec.cache is not None
    return server.spec.cache.claim_name or claim_name(server.metadata.name)


def _claim_volume(name: str) -> Json:
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": name}}
