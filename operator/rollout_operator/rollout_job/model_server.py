"""The ModelServer that a job uses: its own, which it makes and takes away, or one that it names."""

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_api.cluster import JOB_LABEL, JOB_UID_LABEL, MANAGED_BY, own_model_server_name
from rollout_api.rollout_job import RolloutJob
from rollout_operator.actions import Action, Delete, Manifest, Patch, Ref
from rollout_operator.cache import uid_of
from rollout_operator.rollout_job.observe import Observed
from rollout_operator.rollout_job.runner_objects import owned


def own_server(job: RolloutJob) -> dict[str, Any] | None:
    """The ModelServer of `model.server`, as it is made once. Its policy and its size are its own from then on."""
    if job.spec.model is None or job.spec.model.server is None:
        return None
    labels = {**MANAGED_BY, JOB_LABEL: job.metadata.name, JOB_UID_LABEL: job.metadata.uid or ""}
    name = own_model_server_name(job.metadata.name)
    return owned(job.metadata, "ModelServer", name, labels, spec=job.spec.model.server.wire())


def waiting(seen: Observed) -> str | None:
    """Why runners have to wait for their model, for people; None when they need not."""
    if seen.server_ref is None:
        return None
    name = seen.server_ref.name
    if seen.model_server is None:
        made = (
            "is being made" if seen.owns_server else "is not there; create it, or name another in spec.model.serverRef"
        )
        return f"ModelServer {name} {made}"
    conditions = {c["type"]: c for c in (seen.model_server.get("status") or {}).get("conditions", ())}
    for kind in ("Invalid", "Ready"):
        condition: Mapping[str, Any] = conditions.get(kind, {})
        if condition.get("status") == "True":
            return None if kind == "Ready" else f"ModelServer {name} is invalid: {condition.get('message', '')}"
    said = conditions.get("Ready", {})
    return f"ModelServer {name} is not ready: {said.get('message') or said.get('reason') or 'it was not looked at yet'}"


def give_back(seen: Observed, *, ended: bool, drained: bool) -> Iterator[Action]:
    """Accelerators are given back when nobody works: for good at the end, for a while when the job is suspended."""
    if not seen.owns_server or seen.server_ref is None or seen.model_server is None:
        return
    found = _replicas(seen.model_server["spec"])
    if ended:
        if "deletionTimestamp" not in seen.model_server["metadata"]:
            yield Delete(seen.server_ref, uid_of(seen.model_server))
    elif drained and found != 0:
        yield _scale(seen.server_ref, 0)
    elif found == 0 and not seen.spec.get("suspend") and (wanted := _replicas(seen.spec["model"]["server"])):
        yield _scale(seen.server_ref, wanted)


def _replicas(spec: Manifest) -> int:
    return int(spec.get("replicas", 1))


def _scale(ref: Ref, replicas: int) -> Patch:
    return Patch(ref, {"spec": {"replicas": replicas}})
