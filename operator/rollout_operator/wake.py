"""Which RolloutJobs and Sandboxes have to be looked at when an object changes."""

from rollout_api.cluster import JOB_LABEL, ROLE_LABEL, RUNNER_ROLE
from rollout_operator.actions import Manifest, Ref
from rollout_operator.cache import Cache, controller_of

PRIMARY = ("Sandbox", "RolloutJob")
"""Kinds that people and runners write; all others follow from them."""


def wakes(kind: str, old: Manifest | None, new: Manifest | None, cache: Cache) -> list[Ref]:
    """Keys to look at, given an object before and after a change (None: not there)."""
    obj = new or old
    assert obj is not None
    if kind in PRIMARY:
        return [Ref(kind, obj["metadata"]["namespace"], obj["metadata"]["name"])]
    if kind == "Node":
        if readiness(old) == readiness(new):
            return []
        pods = cache.pods_on(obj["metadata"]["name"])
        return [ref for pod in pods for ref in wakes("Pod", None, pod, cache)]
    namespace = obj["metadata"]["namespace"]
    labels = obj["metadata"].get("labels", {})
    if kind == "Pod" and labels.get(ROLE_LABEL) == RUNNER_ROLE:  # Its controller is the Job.
        return [Ref("RolloutJob", namespace, labels[JOB_LABEL])] if JOB_LABEL in labels else []
    owner = controller_of(obj)
    return [Ref(owner["kind"], namespace, owner["name"])] if owner and owner["kind"] in PRIMARY else []


def readiness(node: Manifest | None) -> str | None:
    """Status of a node's Ready condition; None when there is no such node."""
    if node is None:
        return None
    for condition in node["status"]["conditions"]:
        if condition["type"] == "Ready":
            status: str = condition["status"]
            return status
    return "Unknown"
