"""The Sandbox that a runner creates, and its status. Sandboxes that differ only in their names have the same kind."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agent_runtime.sandboxes.base import WorkspaceSpec
from rollout_api.base import API_VERSION
from rollout_api.cluster import JOB_LABEL, JOB_UID_LABEL, MANAGED_BY, RUNNER_LABEL
from rollout_api.measured_memory import declared_spec
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import (
    PUBLIC_ONLY,
    START_CONDITIONS,
    Network,
    NetworkAccess,
    Phase,
    SandboxSpec,
    SandboxStatus,
    WorkspaceMode,
    Workspaces,
)

# Longest part of the job's name in a Sandbox's name, so that index and eight digits fit into 52 characters.
JOB_PART = 38


def places_of(job: RolloutJob) -> int:
    """Return how many workspaces a sandbox of this job should host, at most a runner's concurrent rollouts."""
    if job.spec.sandbox.workspaces.mode is WorkspaceMode.PLAIN:
        return 1
    return min(job.spec.per_sandbox, job.spec.runners.concurrency)


def sandbox_spec(job: RolloutJob, workspace: WorkspaceSpec) -> SandboxSpec:
    """Return the Sandbox for such workspaces. It excludes settings that each workspace has itself (env, working
    folder).
    """
    template = job.spec.sandbox
    mode = template.workspaces.mode
    return SandboxSpec(
        image=workspace.image,
        # In Overlay each workspace has its own user; a Plain pod has one.
        user=None if mode is WorkspaceMode.OVERLAY else workspace.user,
        resources=workspace.resources,
        network=Network(
            setup=_access(workspace, "setup"),
            agent=_access(workspace, "agent"),
            verifier=_access(workspace, "verifier"),
        ),
        start_seconds=template.start_seconds,
        idle_seconds=template.idle_seconds,
        lifetime_seconds=template.lifetime_seconds,
        runtime_class_name=template.runtime_class_name,
        workspaces=Workspaces(mode=mode, per_sandbox=1 if workspace.alone else places_of(job)),
    )


def _access(workspace: WorkspaceSpec, phase: Phase) -> NetworkAccess:
    """Return what pods may reach. Which of it must be public is known to their executors."""
    access: NetworkAccess = workspace.network.get(phase, "None")
    return access if isinstance(access, str) else [pair.removeprefix(PUBLIC_ONLY) for pair in access]


def kind_of(spec: SandboxSpec) -> str:
    """Return a key that is equal for equal specs."""
    return hashlib.sha256(json.dumps(spec.wire(), sort_keys=True).encode()).hexdigest()[:16]


def found_spec(spec: Mapping[str, Any]) -> SandboxSpec | None:
    """Return the spec of a Sandbox read from the API server, with its defaults filled in and not draining; None if it is not
    understood.
    """
    try:
        return SandboxSpec.model_validate({**spec, "drain": False})
    except ValidationError:
        return None


def found_kind(spec: Mapping[str, Any]) -> str | None:
    """Return the kind of a Sandbox read from the API server; None if it is not understood."""
    found = found_spec(spec)
    return None if found is None else kind_of(found)


def new_name(job: str, runner: int) -> str:
    """Return a new unique name."""
    return f"{job[:JOB_PART].rstrip('-')}-{runner}-{secrets.token_hex(4)}"


def selector(job_uid: str, runner: int) -> str:
    return f"{JOB_UID_LABEL}={job_uid},{RUNNER_LABEL}={runner}"


def sandbox_object(job: RolloutJob, runner: int, name: str, spec: SandboxSpec) -> dict[str, Any]:
    owner = {
        "apiVersion": API_VERSION,
        "kind": "RolloutJob",
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    labels = {JOB_LABEL: job.metadata.name, JOB_UID_LABEL: job.metadata.uid, RUNNER_LABEL: str(runner), **MANAGED_BY}
    return {
        "apiVersion": API_VERSION,
        "kind": "Sandbox",
        "metadata": {"name": name, "namespace": job.metadata.namespace, "labels": labels, "ownerReferences": [owner]},
        "spec": spec.wire(),
    }


# Read by key and not as a model: a newer operator may write additional fields.
POD_IP = str(SandboxStatus.model_fields["pod_ip"].alias)


@dataclass(frozen=True)
class Reason:
    """A reason: one CamelCase word, and a message for people."""

    word: str
    message: str


@dataclass(frozen=True)
class SandboxView:
    """One Sandbox. `spec` is what its job or pool declares, without a measured memory request. `finished` is why it has
    ended, `problem` why its start is delayed, if known.
    """

    name: str
    uid: str
    spec: Mapping[str, Any]
    is_ready: bool = False
    pod_ip: str | None = None
    finished: Reason | None = None
    overlay: Reason | None = None
    """Why the Sandbox has its mode."""
    problem: Reason | None = None

    @property
    def is_draining(self) -> bool:
        """Whether it must get no further workspaces."""
        return bool(self.spec.get("drain"))

    @property
    def ending(self) -> Reason | None:
        """Return why it has ended; for a start that timed out, what it was waiting for."""
        if self.finished is not None and self.finished.word == "StartDeadlineExceeded" and self.problem is not None:
            return Reason(self.problem.word, self.finished.message)
        return self.finished

    @property
    def can_be_reached(self) -> bool:
        return self.is_ready and self.pod_ip is not None and self.finished is None


def sandbox_view(sandbox: Mapping[str, Any]) -> SandboxView:
    """Parse a Sandbox object of the API server; its status may be missing or incomplete."""
    metadata, status = sandbox["metadata"], sandbox.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    finished = _reason(conditions, "Finished", "True")
    if finished is None and metadata.get("deletionTimestamp"):
        finished = deleted(metadata["name"])
    ready = conditions.get("Ready", {}).get("status") == "True"
    return SandboxView(
        name=metadata["name"],
        uid=metadata["uid"],
        spec=declared_spec(sandbox),
        is_ready=ready,
        pod_ip=status.get(POD_IP),
        finished=finished,
        overlay=_reason(conditions, "Overlay", "True") or _reason(conditions, "Overlay", "False"),
        problem=None if ready else _first(_reason(conditions, kind, "False") for kind in START_CONDITIONS),
    )


def deleted(name: str) -> Reason:
    return Reason("SandboxDeleted", f"Sandbox {name} was deleted while it was in use")


def _reason(conditions: Mapping[str, Mapping[str, Any]], kind: str, status: str) -> Reason | None:
    condition = conditions.get(kind)
    if condition is None or condition.get("status") != status:
        return None
    return Reason(condition.get("reason") or kind, condition.get("message") or "")


def _first(reasons: Any) -> Reason | None:
    return next((reason for reason in reasons if reason is not None), None)
