"""Overlay or Plain, and why; and how the executor comes into the pod. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.sandbox import WorkspaceMode
from rollout_operator.sandbox.placement import Node

SUPPORTED, NOT_ASKED = "Supported", "NotAsked"
NODES_LACK_USER_NAMESPACES = "NodesLackUserNamespaces"
ADMISSION_REFUSED = "AdmissionRefused"
TRIAL_FAILED = "TrialFailed"

# The first versions with image volumes (their release notes). Any other runtime is taken to be new enough; where it is
# not, the pod is refused or cannot start, and the reason is in the Sandbox's conditions.
IMAGE_VOLUMES_SINCE = {"containerd": (2, 1), "cri-o": (1, 31)}
WITHOUT_IMAGE_VOLUMES = frozenset({"docker"})


@dataclass(frozen=True)
class Choice:
    """A mode, and the condition Overlay that explains it."""

    mode: WorkspaceMode
    reason: str
    message: str
    nodes: Sequence[Node] = ()
    """Where it may run, when that is not everywhere; empty: anywhere."""
    others: Sequence[Node] = ()
    """Candidates on which it may not run."""


def choose(
    asked: WorkspaceMode,
    candidates: Sequence[Node],
    *,
    handler: str = "",
    admission_refusal: str | None = None,
    trial_failure: str | None = None,
) -> Choice:
    """The mode of the pod that is to be made.

    Args:
        asked: what the user wants.
        candidates: nodes to which the pod may come; none: not known yet, as when nodes are made on demand.
        handler: runtime handler of the pod; a RuntimeClass has the name of its handler by custom.
        admission_refusal: the API server's words when it refused an Overlay pod in this namespace.
        trial_failure: the words of this Sandbox's own executor when it could not do Overlay.
    """
    if asked == WorkspaceMode.PLAIN:
        return Choice(WorkspaceMode.PLAIN, NOT_ASKED, "spec.workspaces.mode is Plain")
    if trial_failure is not None:
        return Choice(WorkspaceMode.PLAIN, TRIAL_FAILED, trial_failure)
    if admission_refusal is not None:
        return Choice(WorkspaceMode.PLAIN, ADMISSION_REFUSED, admission_refusal)
    able = [node for node in candidates if handler in node.user_namespaces and node.trial_failure is None]
    if candidates and not able:
        return Choice(WorkspaceMode.PLAIN, *_why_none(candidates, handler))
    others = [node for node in candidates if node not in able]
    return Choice(WorkspaceMode.OVERLAY, SUPPORTED, "", *((able, others) if others else ((), ())))


def image_volumes_work(candidates: Sequence[Node]) -> bool:
    """Whether every candidate can mount the executor's image and run it from there, as far as is known."""
    return all(node.exec_failure is None and _has_image_volumes(node.runtime) for node in candidates)


def _why_none(candidates: Sequence[Node], handler: str) -> tuple[str, str]:
    failed = [node for node in candidates if handler in node.user_namespaces]
    if failed:
        node = failed[0]
        return TRIAL_FAILED, f"Overlay was tried and failed on node {node.name}: {node.trial_failure}"
    handlers = f"runtime handler {handler}" if handler else "default runtime"
    return (
        NODES_LACK_USER_NAMESPACES,
        f"none of {len(candidates)} nodes reports user namespaces for its {handlers}; "
        "they need Linux 6.3, containerd 2.0 and runc 1.2, or newer",
    )


def _has_image_volumes(runtime: str) -> bool:
    name, _, version = runtime.partition("://")
    since = IMAGE_VOLUMES_SINCE.get(name)
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if since is None or numbers is None:
        return name not in WITHOUT_IMAGE_VOLUMES
    return (int(numbers[1]), int(numbers[2])) >= since
