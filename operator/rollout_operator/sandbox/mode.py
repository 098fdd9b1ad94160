"""Overlay or Plain, and why. Pure."""

from dataclasses import dataclass

from rollout_api.sandbox import WorkspaceMode
from rollout_operator.nodes import NodeCounts

SUPPORTED, NOT_ASKED = "Supported", "NotAsked"
NODES_LACK_USER_NAMESPACES = "NodesLackUserNamespaces"
ADMISSION_REFUSED = "AdmissionRefused"
TRIAL_FAILED = "TrialFailed"


@dataclass(frozen=True)
class Choice:
    """A mode, and the condition Overlay that explains it."""

    mode: WorkspaceMode
    reason: str
    message: str


def choose(
    asked: WorkspaceMode,
    nodes: NodeCounts,
    *,
    handler: str = "",
    admission_refusal: str | None = None,
    trial_failure: str | None = None,
) -> Choice:
    """The mode of the pod that is to be made. Its cost does not depend on the number of nodes.

    Args:
        asked: what the user wants.
        nodes: of the cluster; none: not known yet, as when nodes are made on demand.
        handler: runtime handler of the pod; a RuntimeClass has the name of its handler by custom.
        admission_refusal: the API server's message when it refused an Overlay pod in this namespace.
        trial_failure: the executor's message when Overlay failed for this namespace and image.
    """
    if asked == WorkspaceMode.PLAIN:
        return Choice(WorkspaceMode.PLAIN, NOT_ASKED, "spec.workspaces.mode is Plain")
    if trial_failure is not None:
        return Choice(WorkspaceMode.PLAIN, TRIAL_FAILED, trial_failure)
    if admission_refusal is not None:
        return Choice(WorkspaceMode.PLAIN, ADMISSION_REFUSED, admission_refusal)
    if nodes.total and not nodes.able(handler):
        return Choice(
            WorkspaceMode.PLAIN,
            NODES_LACK_USER_NAMESPACES,
            f"none of {nodes.total} nodes reports user namespaces for its {handler_words(handler)}; "
            "they need Linux 6.3, containerd 2.0 and runc 1.2, or newer",
        )
    return Choice(WorkspaceMode.OVERLAY, SUPPORTED, "")


def handler_words(handler: str) -> str:
    """A runtime handler, in the words of messages."""
    return f"runtime handler {handler}" if handler else "default runtime"
