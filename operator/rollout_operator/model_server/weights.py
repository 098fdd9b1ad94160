"""Where the model's weights are in the pods, and who brings them there.

With a cache, or a claim that has them already, accelerators are taken only when all weights are in place: one Job without
accelerators writes, and servers mount read-only. Without a cache each pod downloads for itself, before its engine starts.
"""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from rollout_api.cluster import MODEL_DOWNLOAD_ROLE
from rollout_api.model_server import ModelServer
from rollout_operator.config import OperatorConfig
from rollout_operator.model_server.owned import claim_name, digest_of, download_name, labels, metadata, with_digest

USER: Final = 65532
"""The user of the runtime image; engine and gateway of a pod share it, so that one may read what the other has fetched."""
MODELS: Final = "/models"
"""Where the volume with the weights is mounted."""
VOLUME: Final = "weights"
DOWNLOAD: Final = "download"
"""Name of the container that brings the weights, for `podTemplate`."""
RETRIES: Final = 6
"""Kubernetes' own default for Jobs: pods that fail, each a little later than the one before, for some ten minutes."""
RESTRICTED: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

Json = dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """The model's weights in one of its pods."""

    path: str
    """Folder that the engine reads."""
    volume: Json
    init_containers: tuple[Json, ...] = ()

    @property
    def mount(self) -> Json:
        """How the engine mounts the volume."""
        return {"name": VOLUME, "mountPath": MODELS, "readOnly": True}


def weights(server: ModelServer, config: OperatorConfig) -> Weights:
    """Where a pod finds the weights."""
    if (claimed := _claimed(server)) is not None:
        claim, folder = claimed
        return Weights(f"{MODELS}/{folder}".rstrip("/"), _claim_volume(claim))
    if server.spec.cache is not None:
        return Weights(_folder(server), _claim_volume(_cache_claim(server)))
    container = _download_container(server, config)
    return Weights(_folder(server), {"name": VOLUME, "emptyDir": {}}, (container,))


def claim(server: ModelServer) -> Json | None:
    """The PersistentVolumeClaim, if one is to be made."""
    cache = server.spec.cache
    if cache is None or cache.size is None or _claimed(server) is not None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(server, claim_name(server.metadata.name), MODEL_DOWNLOAD_ROLE),
        "spec": {
            "accessModes": [cache.access_mode.value],
            **({"storageClassName": cache.storage_class_name} if cache.storage_class_name else {}),
            "resources": {"requests": {"storage": cache.size}},
        },
    }


def download_job(server: ModelServer, config: OperatorConfig) -> Json | None:
    """The Job that fills the cache; None where there is no cache to fill."""
    if server.spec.cache is None or _claimed(server) is not None:
        return None
    name = server.metadata.name
    return with_digest(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata(server, download_name(name), MODEL_DOWNLOAD_ROLE),
            "spec": {
                "backoffLimit": RETRIES,
                # One writer: the next pod starts when the last one has ended for certain.
                "podReplacementPolicy": "Failed",
                "template": {
                    "metadata": {"labels": labels(server, MODEL_DOWNLOAD_ROLE)},
                    "spec": {
                        "restartPolicy": "Never",
                        "automountServiceAccountToken": False,
                        "enableServiceLinks": False,
                        "securityContext": pod_security(),
                        "containers": [_download_container(server, config)],
                        "volumes": [_claim_volume(_cache_claim(server))],
                    },
                },
            },
        }
    )


def pod_security() -> Json:
    """Of all pods of a ModelServer."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Changing the owner of every file of a large model takes minutes, at every start.
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
            # What one pod has left half done, the next one of the same server goes on with.
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
    """Named by what is in it: servers that share a claim share equal weights, and never mix others."""
    return f"{MODELS}/{digest_of([server.spec.weights_uri, server.spec.model.revision])}"


def _claimed(server: ModelServer) -> tuple[str, str] | None:
    """Claim and folder of a `pvc://` URI."""
    uri = urlsplit(server.spec.weights_uri)
    return (uri.netloc, uri.path.strip("/")) if uri.scheme == "pvc" else None


def _cache_claim(server: ModelServer) -> str:
    assert server.spec.cache is not None
    return server.spec.cache.claim_name or claim_name(server.metadata.name)


def _claim_volume(name: str) -> Json:
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": name}}
