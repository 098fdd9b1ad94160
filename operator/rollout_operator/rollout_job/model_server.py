"""The ModelServer of a job: an own one (`model.server`), created and deleted with the job, or a named one (`serverRef`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_api.cluster import JOB_LABEL, JOB_UID_LABEL, MANAGED_BY, own_model_server_name
from rollout_api.on_cluster.objects import Manifest
from rollout_api.rollout_job import RolloutJob
from rollout_operator.actions import Action, Delete, Patch, Ref
from rollout_operator.cache import uid_of
from rollout_operator.rollout_job.observe import Observed
from rollout_operator.rollout_job.runner_objects import owned


def own_server(job: RolloutJob) -> dict[str, Any] | None:
    """Return the ModelServer to create for `model.server`. Its policy and size may be changed afterwards."""
    if job.spec.model is None or job.spec.model.server is None:
        return None
    labels = {**MANAGED_BY, JOB_LABEL: job.metadata.name, JOB_UID_LABEL: job.metadata.uid or ""}
    name = own_model_server_name(job.metadata.name)
    return owned(job.metadata, "ModelServer", name, labels, spec=job.spec.model.server.wire())


def waiting(seen: Observed) -> str | None:
    """Return a message why runners must wait for their model; None if they need not."""
    if seen.server_ref is None:
        return None
    name = seen.server_ref.name
    if seen.model_server is None:
        if is_lost(seen):
            return f"ModelServer {name} was deleted; it is created again with the size and policy of spec.model.server"
        state = (
            "is being created"
            if seen.owns_server
            else "does not exist; create it, or name another in spec.model.serverRef"
        )
        return f"ModelServer {name} {state}"
    conditions = {c["type"]: c for c in (seen.model_server.get("status") or {}).get("conditions", ())}
    for kind in ("Invalid", "Ready"):
        condition: Mapping[str, Any] = conditions.get(kind, {})
        if condition.get("status") == "True":
            return None if kind == "Ready" else f"ModelServer {name} is invalid: {condition.get('message', '')}"
    not_ready = conditions.get("Ready", {})
    why = not_ready.get("message") or not_ready.get("reason") or "the operator has not processed it yet"
    return f"ModelServer {name} is not ready: {why}"


def is_lost(seen: Observed) -> bool:
    """Whether the job's own ModelServer was deleted although the job has started and is not suspended."""
    return seen.owns_server and seen.model_server is None and seen.batch_job is not None and not seen.suspend


def release_accelerators(seen: Observed, *, ended: bool, paused: bool) -> Iterator[Action]:
    """Delete the job's own ModelServer when the job has ended. While the job may resume, scale it to 0, which keeps its
    policy; scale it up again when the job runs.
    """
    if not seen.owns_server or seen.server_ref is None or seen.model_server is None:
        return
    found = _replicas(seen.model_server["spec"])
    if ended:
        if "deletionTimestamp" not in seen.model_server["metadata"]:
            yield Delete(seen.server_ref, uid_of(seen.model_server))
    elif paused:
        if found != 0:
            yield _scale(seen.server_ref, 0)
    elif found == 0 and not seen.spec.get("suspend") and (wanted := _replicas(seen.spec["model"]["server"])):
        yield _scale(seen.server_ref, wanted)


def _replicas(spec: Manifest) -> int:
    return int(spec.get("replicas", 1))


def _scale(ref: Ref, replicas: int) -> Patch:
    return Patch(ref, {"spec": {"replicas": replicas}})
