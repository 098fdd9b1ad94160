"""What all pods with the runtime image have in common: their user, their rights, and how fast they leave a lost node."""

from typing import Any, Final

USER: Final = 65532
"""User of the runtime image, as a number because `runAsNonRoot` cannot check names."""

LOST_NODE_SECONDS: Final = 30
"""Time after which the pod of an unreachable node is started elsewhere. Kubernetes' default is 300 s."""

GRACE_SECONDS: Final = 30
"""Time between SIGTERM and SIGKILL. A runner finishes its turns within 25 s."""


def pod_fields() -> dict[str, Any]:
    """Return fields of the pod's spec."""
    return {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{trouble}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": LOST_NODE_SECONDS,
            }
            for trouble in ("not-ready", "unreachable")
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def container_fields(secret_ref: str | None) -> dict[str, Any]:
    """Return fields of its container. `secret_ref` is the Secret with the variables of object storage."""
    return {
        "envFrom": [{"secretRef": {"name": secret_ref}}] if secret_ref else [],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
