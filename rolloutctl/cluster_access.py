"""Access to a cluster as the current user: by kubeconfig, or from within a pod."""

import contextlib
import json
from pathlib import Path
from typing import Any

from rolloutctl.errors import CommandError

_NAMESPACE_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect() -> str:
    """Configure the clients of the kubernetes package for the user's cluster. Returns the user's namespace.

    Raises CommandError if the package is missing or no cluster is configured.
    """
    try:
        from kubernetes import config  # imported here because it takes a second
    except ImportError as error:
        raise CommandError(
            f"the Kubernetes client is not installed: {error}", hint="pip install 'agent-rollouts[cluster]'"
        ) from error
    try:
        config.load_config()
    except config.ConfigException as error:
        raise CommandError(
            f"no cluster is configured: {error}", hint="Set KUBECONFIG, or run this in a pod."
        ) from error
    with contextlib.suppress(config.ConfigException):
        _, active = config.list_kube_config_contexts()
        return str(active["context"].get("namespace", "default"))
    return _NAMESPACE_OF_POD.read_text() if _NAMESPACE_OF_POD.exists() else "default"


def refusal(error: Any) -> str:
    """Return an API server's message from a `kubernetes.client.ApiException`."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.reason} ({error.status})"
