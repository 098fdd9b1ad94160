"""The pods of a ModelServer: the engine on the pod's loopback, and the gateway in front of it."""

from typing import Any, Final

from rollout_api.cluster import (
    MODEL_CONTROL_PORT,
    MODEL_PORT,
    MODEL_SERVER_ROLE,
    MODEL_WORKER_ROLE,
    POLICY_FOLDER,
    POLICY_LOADED,
    model_control_name,
)
from rollout_api.model_server import ModelServer, TransferMode
from rollout_operator.config import OperatorConfig
from rollout_operator.model_server import engine
from rollout_operator.model_server.owned import labels
from rollout_operator.model_server.weights import DOWNLOAD, MODELS, RESTRICTED, VOLUME, pod_security, weights
from rollout_operator.sandbox import template

ENGINE, GATEWAY = "engine", "gateway"
"""Names of the containers, for `podTemplate`."""
OWN_CONTAINERS: Final = (ENGINE, GATEWAY, DOWNLOAD)
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
PROBE_HANDLERS: Final = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})
"""A probe has one of these; without, it is settings of one that is there."""

POLICIES: Final = "policies"
"""Volume between gateway and engine, for what is fetched in mode Pull."""
CONTROL_FOLDER: Final = "/var/run/rollout-control"
"""Where the gateway finds the control port's token."""

PRE_STOP_SECONDS: Final = 15
"""Between leaving all lists of servers and the end: whoever has seen an old list still gets an answer (KServe's choice)."""
SPARE_SECONDS: Final = 15
"""For the gateway's own end, after the engine's."""

STARTUP: Final = {"periodSeconds": 10, "failureThreshold": 270, "timeoutSeconds": 5}
"""45 minutes: vLLM's port opens when the weights are loaded and kernels compiled; prime-rl allows as much."""
READINESS: Final = {"periodSeconds": 10, "failureThreshold": 3, "timeoutSeconds": 5}
"""A busy server answers within 5 s; with 1 s, busy pods were taken out of service (llm-d-benchmark issue 1734)."""
LIVENESS: Final = {"periodSeconds": 30, "failureThreshold": 6, "timeoutSeconds": 10}
"""Three minutes: a restart costs up to 45, and a busy or paused engine must not have one (gonka issue 1421)."""

Json = dict[str, Any]


def pod_template(server: ModelServer, config: OperatorConfig, *, worker: bool = False) -> Json:
    """Template of the pods that answer, or of the further ones (`worker`) of a server that spans several nodes."""
    role = MODEL_WORKER_ROLE if worker else MODEL_SERVER_ROLE
    base = {"metadata": {"labels": labels(server, role)}, "spec": _spec(server, config, worker=worker)}
    merged = template.merge(base, _of_this_pod(template.without_nulls(server.spec.pod_template or {}), base["spec"]))
    merged["metadata"]["labels"] |= labels(server, role)
    merged["spec"]["restartPolicy"] = "Always"
    return merged


def _of_this_pod(given: Json, base: Json) -> Json:
    """The user's template without what it says of parts that other pods have: there may be no download, further pods of a
    server on several nodes have no gateway, and their engines no probes."""
    spec = dict(given.get("spec", {}))
    for kind in ("initContainers", "containers"):
        own = {container["name"]: container for container in base[kind]}
        if kind in spec:
            spec[kind] = [
                _without_settings_of_no_probe(container, own.get(container["name"], {}))
                for container in spec[kind]
                if container["name"] in own or container["name"] not in OWN_CONTAINERS
            ]
    return {**given, "spec": spec}


def _without_settings_of_no_probe(container: Json, base: Json) -> Json:
    # What is no mapping at all is left for the API server to refuse.
    return {
        field: value
        for field, value in container.items()
        if field not in PROBES or field in base or not isinstance(value, dict) or PROBE_HANDLERS & set(value)
    }


def _spec(server: ModelServer, config: OperatorConfig, *, worker: bool) -> Json:
    spec, found = server.spec, weights(server, config)
    accelerator = spec.accelerator
    drain = engine.DRAIN_SECONDS if engine.drains(spec) else 0
    pod: Json = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        # A Service called `vllm` would set VLLM_PORT=tcp://..., which vLLM takes for its own setting and ends.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + drain + SPARE_SECONDS,
        "securityContext": pod_security(),
        "initContainers": list(found.init_containers),
        "containers": [_engine(server, found.path, found.mount, worker=worker)],
        "volumes": [
            found.volume,
            # Processes of an engine exchange tensors there; 64 MiB, the default, is too little (vLLM issue 1710).
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.resources.shared_memory}},
            {"name": "scratch", "emptyDir": {}},
        ],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(server, MODEL_WORKER_ROLE if worker else MODEL_SERVER_ROLE)},
            }
        ],
    }
    if not worker:
        pod["readinessGates"] = [{"conditionType": POLICY_LOADED}]
        # A sidecar: there before the engine, and still there while the engine finishes what runs.
        pod["initContainers"].append(_gateway(server, config))
        pod["volumes"].append(
            {
                "name": "control",
                "secret": {"secretName": model_control_name(server.metadata.name), "defaultMode": 0o440},
            }
        )
    if _pulls(server) and not _spans_nodes(server):
        pod["volumes"].append({"name": POLICIES, "emptyDir": {}})
    if _accelerators(server):
        pod["tolerations"] = [{"key": accelerator.resource_name, "operator": "Exists", "effect": "NoSchedule"}]
        if accelerator.claim_template:
            pod["resourceClaims"] = [{"name": "accelerators", "resourceClaimTemplateName": accelerator.claim_template}]
    if accelerator.product:
        # The label of the vendors' feature discovery: nvidia.com/gpu.product.
        pod["nodeSelector"] = {f"{accelerator.resource_name}.product": accelerator.product}
    if accelerator.runtime_class_name:
        pod["runtimeClassName"] = accelerator.runtime_class_name
    return pod


def _engine(server: ModelServer, path: str, weights_mount: Json, *, worker: bool) -> Json:
    spec = server.spec
    container: Json = {
        "name": ENGINE,
        "image": spec.engine.image,
        "imagePullPolicy": "IfNotPresent",  # tens of gigabytes
        "command": ["vllm", "serve"],
        "args": engine.arguments(spec, path, worker=worker),
        "env": engine.environment(spec),
        "resources": _resources(server),
        "securityContext": dict(RESTRICTED),
        "volumeMounts": [
            weights_mount,
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": engine.SCRATCH},
            *({**mount, "readOnly": True} for mount in _policy_mounts(server) if mount["name"] == POLICIES),
        ],
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if not worker:
        # Through the gateway: the kubelet does not reach a pod's loopback.
        health = {"httpGet": {"path": "/health", "port": MODEL_PORT}}
        container |= {
            "startupProbe": {**health, **STARTUP},
            "readinessProbe": {**health, **READINESS},
            "livenessProbe": {**health, **LIVENESS},
        }
    return container


def _gateway(server: ModelServer, config: OperatorConfig) -> Json:
    pull = server.spec.weight_transfer.pull
    secret = pull.secret_ref if _pulls(server) else None
    return {
        "name": GATEWAY,
        "image": config.images.runtime,
        "imagePullPolicy": config.images.pull_policy,
        "restartPolicy": "Always",
        "command": ["python3", "-m", "agent_runtime.serving.gateway"],
        "args": [
            f"--token-file={CONTROL_FOLDER}/token",
            *([f"--policy-folder={policy_folder(server)}"] if _pulls(server) else []),
        ],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "envFrom": [{"secretRef": {"name": secret}}] if secret else [],
        "ports": [
            {"name": "model", "containerPort": MODEL_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": MODEL_CONTROL_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}},
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "control", "mountPath": CONTROL_FOLDER, "readOnly": True},
            *_policy_mounts(server),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def policy_folder(server: ModelServer) -> str:
    """Where the gateway puts what it fetches, and the engine finds it: on a volume that all pods of a server mount."""
    return f"{MODELS}/policies/{server.metadata.name}" if _spans_nodes(server) else POLICY_FOLDER


def _policy_mounts(server: ModelServer) -> list[Json]:
    if not _pulls(server):
        return []
    if _spans_nodes(server):
        return [{"name": VOLUME, "mountPath": MODELS}]
    return [{"name": POLICIES, "mountPath": POLICY_FOLDER}]


def _spans_nodes(server: ModelServer) -> bool:
    return server.spec.parallelism.nodes > 1


def _pulls(server: ModelServer) -> bool:
    return server.spec.weight_transfer.mode is TransferMode.PULL


def _accelerators(server: ModelServer) -> int:
    """Of one pod."""
    spec = server.spec
    return 0 if spec.accelerator.count == 0 else spec.parallelism.accelerators // spec.parallelism.nodes


def _resources(server: ModelServer) -> Json:
    asked, accelerator, count = server.spec.resources, server.spec.accelerator, _accelerators(server)
    requests = {name: value for name, value in (("cpu", asked.cpu), ("memory", asked.memory)) if value}
    limits = {"memory": asked.memory} if asked.memory else {}
    found: Json = {}
    if count and accelerator.claim_template:
        found["claims"] = [{"name": "accelerators"}]
    elif count:
        # Extended resources cannot be overcommitted: requests and limits are equal.
        requests[accelerator.resource_name] = limits[accelerator.resource_name] = str(count)
    return found | {"requests": requests, "limits": limits}
