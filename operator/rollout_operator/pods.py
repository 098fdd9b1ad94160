"""What a pod's status says of its start."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

_ON_ITS_WAY: Final = ("ContainerCreating", "PodInitializing")


def trouble(status: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why a pod does not start: a reason, and words of whoever said it. None while nothing is wrong."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "")
    containers = chain(status.get("initContainerStatuses") or (), status.get("containerStatuses") or ())
    for container in containers:
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "ContainerCreating")
        if reason not in _ON_ITS_WAY:
            # The kubelet goes back and forth between the two.
            return "ImagePullBackOff" if reason == "ErrImagePull" else reason, waiting.get("message", "")
    return None
