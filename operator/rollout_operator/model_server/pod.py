"""The pods of a ModelServer, and the StatefulSet or LeaderWorkerSet that creates them.

In each pod the inference server (launch.py) listens on the loopback, with a gateway in front of it.
"""

from typing import Final

from rollout_api.cluster import (
    MODEL_CONTROL_PORT,
    MODEL_PORT,
    MODEL_SERVER_ROLE,
    MODEL_WORKER_ROLE,
    POLICY_FOLDER,
    POLICY_LOADED,
    model_control_name,
)
from rollout_api.inference.description import EngineType
from rollout_api.model_server import ModelServer, ModelServerSpec, TransferMode
from rollout_api.on_cluster import template
from rollout_api.on_cluster.objects import Json
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator.model_server.launch import DRAIN_SECONDS, LAUNCHES
from rollout_operator.model_server.objects import (
    DOWNLOAD,
    MODELS,
    RESTRICTED,
    VOLUME,
    labels,
    owned,
    pod_security,
    selector,
    weights,
    with_digest,
)

SCRATCH: Final = "/scratch"
"""Home folder of the engine. Its compiled kernels persist while the pod does, so that a container restarts quickly."""


def environment(spec: ModelServerSpec) -> list[Json]:
    """Return the environment of the engine. The user's variables come last."""
    fixed = {
        **LAUNCHES[spec.engine.type].environment(spec),
        "HOME": SCRATCH,
        # Some software looks up the user's name, and a numeric user has none.
        "USER": "rollout",
        "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/torchinductor",
    }
    own = {variable.name: variable.value for variable in spec.env}
    return [{"name": name, "value": value} for name, value in {**fixed, **own}.items()]


ENGINE, GATEWAY = "engine", "gateway"
"""Container names, for `podTemplate`."""
OWN_CONTAINERS: Final = (ENGINE, GATEWAY, DOWNLOAD)
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
PROBE_HANDLERS: Final = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})
"""Fields that define what a probe does. A probe in a template without one only changes settings of an existing probe."""

POLICIES: Final = "policies"
"""Volume for fetched weights in mode Pull, shared by gateway and engine."""
CONTROL_FOLDER: Final = "/var/run/rollout-control"
"""Folder with the control port's token, for the gateway."""
CREDENTIALS: Final = "store-credentials"
CREDENTIALS_FOLDER: Final = "/var/run/rollout-credentials"
"""Volume and folder with the store's Secret, for the gateway. The kubelet updates its files when credentials are rotated.
The environment of a running container never changes.
"""

PRE_STOP_SECONDS: Final = 15
"""Time for which a pod that is being deleted still serves clients with an outdated list of servers (KServe's value)."""
SPARE_SECONDS: Final = 15
"""Time for the gateway to end after the engine."""

STARTUP: Final = {"periodSeconds": 10, "failureThreshold": 270, "timeoutSeconds": 5}
"""45 minutes: the port opens after weights are loaded and kernels compiled. prime-rl uses the same limit."""
READINESS: Final = {"periodSeconds": 10, "failureThreshold": 3, "timeoutSeconds": 5}
"""Probes with a time-out of 1 s take busy pods out of service (llm-d-benchmark issue 1734), so it is 5 s here."""
LIVENESS: Final = {"periodSeconds": 30, "failureThreshold": 6, "timeoutSeconds": 10}
"""3 minutes. A restart takes up to 45 minutes, and busy or paused engines must not be restarted (gonka issue 1421)."""


def pod_template(server: ModelServer, config: OperatorConfig, *, worker: bool = False) -> Json:
    """Return the template of the serving pods, or of the further pods (`worker`) of a multi-node server."""
    role = MODEL_WORKER_ROLE if worker else MODEL_SERVER_ROLE
    base = {"metadata": {"labels": labels(server, role)}, "spec": _spec(server, config, worker=worker)}
    user_template = _applicable(template.without_nulls(server.spec.pod_template or {}), base["spec"])
    merged = template.merge(base, user_template)
    merged["metadata"]["labels"] |= labels(server, role)
    merged["spec"]["restartPolicy"] = "Always"
    return merged


def _applicable(given: Json, base: Json) -> Json:
    """Return the user's template without settings of containers and probes that this pod lacks.

    A pod may have no download container. Further pods of a multi-node server have no gateway and no probes.
    """
    spec = dict(given.get("spec", {}))
    for kind in ("initContainers", "containers"):
        own = {container["name"]: container for container in base[kind]}
        if kind in spec:
            spec[kind] = [
                _without_absent_probes(container, own.get(container["name"], {}))
                for container in spec[kind]
                if container["name"] in own or container["name"] not in OWN_CONTAINERS
            ]
    return {**given, "spec": spec}


def _without_absent_probes(container: Json, base: Json) -> Json:
    """Return the container without settings of probes that `base` lacks. Malformed probes remain for the API server."""
    return {
        field: value
        for field, value in container.items()
        if field not in PROBES or field in base or not isinstance(value, dict) or PROBE_HANDLERS & set(value)
    }


def _spec(server: ModelServer, config: OperatorConfig, *, worker: bool) -> Json:
    spec, found = server.spec, weights(server, config)
    accelerator = spec.accelerator
    drain = DRAIN_SECONDS if LAUNCHES[spec.engine.type].drains(spec) else 0
    pod: Json = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        # With links, a Service called `vllm` would set VLLM_PORT=tcp://..., with which vLLM fails to start.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + drain + SPARE_SECONDS,
        "securityContext": pod_security(),
        "initContainers": list(found.init_containers),
        "containers": [_engine(server, found.path, found.mount, worker=worker)],
        "volumes": [
            found.volume,
            # The processes of an engine exchange tensors in /dev/shm. The default of 64 MiB is too small (vLLM issue 1710).
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
        # The gateway is a sidecar: it starts before the inference server and ends after it.
        pod["initContainers"].append(_gateway(server, config))
        pod["volumes"].append(
            {
                "name": "control",
                "secret": {"secretName": model_control_name(server.metadata.name), "defaultMode": 0o440},
            }
        )
        if secret := _store_secret(server):
            # Optional: without the Secret, the container's environment gives the clearer reason.
            pod["volumes"].append(
                {"name": CREDENTIALS, "secret": {"secretName": secret, "defaultMode": 0o440, "optional": True}}
            )
    if _pulls(server) and not _spans_nodes(server):
        pod["volumes"].append({"name": POLICIES, "emptyDir": {}})
    if _accelerators(server):
        pod["tolerations"] = [{"key": accelerator.resource_name, "operator": "Exists", "effect": "NoSchedule"}]
        if accelerator.claim_template:
            pod["resourceClaims"] = [{"name": "accelerators", "resourceClaimTemplateName": accelerator.claim_template}]
    if accelerator.product:
        # Label that the vendors' feature discovery sets, such as nvidia.com/gpu.product.
        pod["nodeSelector"] = {f"{accelerator.resource_name}.product": accelerator.product}
    if accelerator.runtime_class_name:
        pod["runtimeClassName"] = accelerator.runtime_class_name
    return pod


def _engine(server: ModelServer, path: str, weights_mount: Json, *, worker: bool) -> Json:
    spec = server.spec
    launch = LAUNCHES[spec.engine.type]
    container: Json = {
        "name": ENGINE,
        "image": spec.engine.image,
        "imagePullPolicy": "IfNotPresent",  # the image is tens of gigabytes large
        "command": list(launch.command),
        "args": launch.arguments(spec, path, worker),
        "env": environment(spec),
        "resources": _resources(server),
        "securityContext": dict(RESTRICTED),
        "volumeMounts": [
            weights_mount,
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": SCRATCH},
            *({**mount, "readOnly": True} for mount in _policy_mounts(server) if mount["name"] == POLICIES),
        ],
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if not worker:
        # Probes use the gateway, because the kubelet cannot connect to a pod's loopback.
        health = {"httpGet": {"path": "/health", "port": MODEL_PORT}}
        container |= {
            "startupProbe": {**health, **STARTUP},
            "readinessProbe": {**health, **READINESS},
            "livenessProbe": {**health, **LIVENESS},
        }
    return container


def _gateway(server: ModelServer, config: OperatorConfig) -> Json:
    secret = _store_secret(server)
    credentials = [{"name": CREDENTIALS, "mountPath": CREDENTIALS_FOLDER, "readOnly": True}] if secret else []
    return {
        "name": GATEWAY,
        "image": config.images.runtime,
        "imagePullPolicy": config.images.pull_policy,
        "restartPolicy": "Always",
        "command": ["python3", "-m", "agent_runtime.serving.gateway"],
        "args": [
            f"--token-file={CONTROL_FOLDER}/token",
            *([f"--policy-folder={policy_folder(server)}"] if _pulls(server) else []),
            *([f"--credentials={CREDENTIALS_FOLDER}"] if secret else []),
            *([] if server.spec.engine.type is EngineType.VLLM else [f"--engine={server.spec.engine.type}"]),
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
            *credentials,
            *_policy_mounts(server),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _store_secret(server: ModelServer) -> str | None:
    """Return the Secret with the credentials of the store of policies, if the gateway fetches them."""
    return server.spec.weight_transfer.pull.secret_ref if _pulls(server) else None


def policy_folder(server: ModelServer) -> str:
    """Return the folder for fetched weights, on a volume that all pods of a server mount."""
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
    """Return the accelerators of one pod."""
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
        # Requests and limits of extended resources must be equal.
        requests[accelerator.resource_name] = limits[accelerator.resource_name] = str(count)
    return found | {"requests": requests, "limits": limits}


OF_PODS: Final = {
    *("model", "engine", "parallelism", "accelerator", "resources", "cache", "sleep", "lora", "tool_call_parser"),
    *("extra_args", "env", "pod_template"),
}
"""Fields of the spec that determine the pods, besides some of `weightTransfer`. Only their changes replace pods.

A new operator, a new policy or another number of servers must not restart an engine that takes 45 minutes to start.
"""


def workload(server: ModelServer, config: OperatorConfig) -> Json:
    """Return the StatefulSet or LeaderWorkerSet, with a digest of the fields that determine its pods."""
    body = _leader_worker_set(server, config) if server.spec.parallelism.nodes > 1 else _stateful_set(server, config)
    transfer = server.spec.weight_transfer
    how = [transfer.mode, transfer.pull.secret_ref, transfer.push and transfer.push.backend]
    of_pods = server.spec.model_dump(mode="json", by_alias=True, include=OF_PODS)
    if server.spec.engine.type is EngineType.VLLM:
        del of_pods["engine"]["type"]  # so that servers from before this field are not restarted
    return with_digest(body, [of_pods, how])


def _stateful_set(server: ModelServer, config: OperatorConfig) -> Json:
    name = server.metadata.name
    spec = {
        "replicas": server.spec.replicas,
        "serviceName": name,
        # Servers need not wait for each other.
        "podManagementPolicy": "Parallel",
        # Replaces one pod at a time without an extra pod, because no accelerator may be free (LLMKube issue 192).
        "updateStrategy": {"type": "RollingUpdate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector(server)},
        "template": pod_template(server, config),
    }
    return owned(server, "StatefulSet", name, spec=spec)


def _leader_worker_set(server: ModelServer, config: OperatorConfig) -> Json:
    rolling = {"maxUnavailable": 1, "maxSurge": 0}
    spec = {
        "replicas": server.spec.replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "leaderWorkerTemplate": {
            "size": server.spec.parallelism.nodes,
            # An engine that has lost one of its nodes stops responding.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": pod_template(server, config),
            "workerTemplate": pod_template(server, config, worker=True),
        },
    }
    return owned(server, "LeaderWorkerSet", server.metadata.name, spec=spec)
