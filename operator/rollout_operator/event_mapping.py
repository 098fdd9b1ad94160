"""Which RolloutJobs, Sandboxes and ModelServers have to be looked at when an object changes."""

from rollout_api.cluster import JOB_LABEL, MODEL_SERVER_LABEL, ROLE_LABEL, RUNNER_ROLE, own_model_server_name
from rollout_operator.actions import Manifest, Ref
from rollout_operator.cache import Cache, controller_of
from rollout_operator.nodes import is_ready

PRIMARY = ("Sandbox", "RolloutJob", "ModelServer")
"""Kinds that people and runners write; all others follow from them."""


def wakes(kind: str, old: Manifest | None, new: Manifest | None, cache: Cache) -> list[Ref]:
    """Keys to look at, given an object before and after a change (None: not there)."""
    obj = new or old
    assert obj is not None
    if kind in PRIMARY:
        itself = Ref(kind, obj["metadata"]["namespace"], obj["metadata"]["name"])
        if kind == "RolloutJob":  # Only while it has not ended, a policy update waits for its runners.
            server = model_server_of(obj)
            return [itself, server] if server else [itself]
        if kind == "ModelServer":
            jobs = (
                Ref("RolloutJob", job["metadata"]["namespace"], job["metadata"]["name"]) for job in users(itself, cache)
            )
            return [itself, *jobs]
        return [itself]
    if kind == "Node":
        itself = Ref(kind, "", obj["metadata"]["name"])
        same = old is not None and new is not None and is_ready(old) == is_ready(new)
        pods = () if same else cache.pods_on(itself.name)
        return [itself, *(ref for pod in pods for ref in wakes("Pod", None, pod, cache))]
    namespace = obj["metadata"]["namespace"]
    labels = obj["metadata"].get("labels", {})
    if kind == "Pod" and labels.get(ROLE_LABEL) == RUNNER_ROLE:  # Its controller is the Job.
        return [Ref("RolloutJob", namespace, labels[JOB_LABEL])] if JOB_LABEL in labels else []
    if kind == "Pod" and MODEL_SERVER_LABEL in labels:  # Its controller is a StatefulSet, a LeaderWorkerSet's or a Job.
        return [Ref("ModelServer", namespace, labels[MODEL_SERVER_LABEL])]
    owner = controller_of(obj)
    if owner is None or owner["kind"] not in PRIMARY:
        return []
    owners = [Ref(owner["kind"], namespace, owner["name"])]
    if kind == "RolloutShard" and (job := cache.get("RolloutJob", namespace, owner["name"])):
        owners += filter(None, [model_server_of(job)])  # Runners' acknowledgements are a part of policy updates.
    return owners


def model_server_of(job: Manifest) -> Ref | None:
    """The ModelServer that a RolloutJob uses: its own, or the one that it names."""
    model = job["spec"].get("model") or {}
    metadata = job["metadata"]
    name = own_model_server_name(metadata["name"]) if model.get("server") else model.get("serverRef")
    return Ref("ModelServer", metadata["namespace"], name) if name else None


def users(server: Ref, cache: Cache) -> list[Manifest]:
    """The RolloutJobs that use a ModelServer."""
    return [job for job in cache.all("RolloutJob") if model_server_of(job) == server]
