"""Names, labels and metadata of everything that is made for a ModelServer."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from rollout_api.base import API_GROUP, API_VERSION
from rollout_api.cluster import MANAGED_BY, MODEL_SERVER_LABEL, MODEL_SERVER_ROLE, MODEL_SERVER_UID_LABEL, ROLE_LABEL
from rollout_api.model_server import ModelServer

DIGEST: Final = f"{API_GROUP}/digest"
"""Annotation: digest of what an object was made of. Another one: it is made anew."""

WORKLOAD_KINDS: Final = ("StatefulSet", "LeaderWorkerSet")


def api_name(server: str) -> str:
    """The Service in front of all servers. NAME itself is the headless one: LeaderWorkerSet names its own so."""
    return f"{server}-api"


def claim_name(server: str) -> str:
    """The PersistentVolumeClaim that is made for `cache.size`."""
    return f"{server}-weights"


def download_name(server: str) -> str:
    """The Job that fetches the model's weights, and the NetworkPolicy of its pod."""
    return f"{server}-download"


def labels(server: ModelServer, role: str = MODEL_SERVER_ROLE) -> dict[str, str]:
    """Labels of a pod with that role, and of what goes with it."""
    return {**MANAGED_BY, **selector(server, role), MODEL_SERVER_UID_LABEL: server.metadata.uid or ""}


def selector(server: ModelServer, role: str = MODEL_SERVER_ROLE) -> dict[str, str]:
    """Labels that find pods of that role."""
    return {MODEL_SERVER_LABEL: server.metadata.name, ROLE_LABEL: role}


def metadata(server: ModelServer, name: str, role: str = MODEL_SERVER_ROLE) -> dict[str, Any]:
    """Metadata of an object which garbage collection removes with the ModelServer."""
    return {
        "name": name,
        "namespace": server.metadata.namespace,
        "labels": labels(server, role),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": "ModelServer",
                "name": server.metadata.name,
                "uid": server.metadata.uid,
                "controller": True,
                # Nobody waits for these to go: deleting a server never hangs.
                "blockOwnerDeletion": False,
            }
        ],
    }


def with_digest(body: dict[str, Any], source: Any = None) -> dict[str, Any]:
    """The object with the digest of `source`, or of itself, on it."""
    digest = digest_of(body if source is None else source)
    return {**body, "metadata": {**body["metadata"], "annotations": {DIGEST: digest}}}


def digest_of(value: Any) -> str:
    """Sixteen hexadecimal digits that differ when the value does."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def noted_digest(obj: Mapping[str, Any]) -> str | None:
    """The digest that an object carries."""
    annotations: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return annotations.get(DIGEST)
