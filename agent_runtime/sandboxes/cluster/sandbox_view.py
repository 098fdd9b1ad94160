"""A Sandbox as its runner sees it: what its status says, and whether it is one of a runner's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.sandbox import SandboxStatus

# Read by key and not as a model: an operator that is newer than this runner may say more.
POD_IP = str(SandboxStatus.model_fields["pod_ip"].alias)
# Conditions that are False while a Sandbox is on its way, the one that explains most first.
START_CONDITIONS = ("ImagePulled", "Scheduled", "Ready")


@dataclass(frozen=True)
class Reason:
    """Why something is so: one CamelCase word, and words for people."""

    word: str
    message: str


@dataclass(frozen=True)
class SandboxView:
    """One Sandbox. `finished` is why it has ended, `problem` what its start waits for where that is known."""

    name: str
    uid: str
    spec: Mapping[str, Any]
    is_ready: bool = False
    pod_ip: str | None = None
    mode: str | None = None
    places: int | None = None
    finished: Reason | None = None
    overlay: Reason | None = None
    """Why its mode is what it is."""
    problem: Reason | None = None

    @property
    def ending(self) -> Reason | None:
        """Why it has ended, for whoever waits: of a start that took too long, what it was waiting for."""
        if self.finished is not None and self.finished.word == "StartDeadlineExceeded" and self.problem is not None:
            return Reason(self.problem.word, self.finished.message)
        return self.finished

    @property
    def can_be_reached(self) -> bool:
        """Its pod runs and has an address."""
        return self.is_ready and self.pod_ip is not None and self.finished is None


def sandbox_view(sandbox: Mapping[str, Any]) -> SandboxView:
    """The view of a Sandbox object as the API server gives it; status may be missing, wholly or in part."""
    metadata, status = sandbox["metadata"], sandbox.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    finished = _reason(conditions, "Finished", "True")
    if finished is None and metadata.get("deletionTimestamp"):
        finished = deleted(metadata["name"])
    ready = conditions.get("Ready", {}).get("status") == "True"
    return SandboxView(
        name=metadata["name"],
        uid=metadata["uid"],
        spec=sandbox.get("spec") or {},
        is_ready=ready,
        pod_ip=status.get(POD_IP),
        mode=status.get("mode"),
        places=(status.get("places") or {}).get("total"),
        finished=finished,
        overlay=_reason(conditions, "Overlay", "True") or _reason(conditions, "Overlay", "False"),
        problem=None if ready else _first(_reason(conditions, kind, "False") for kind in START_CONDITIONS),
    )


def deleted(name: str) -> Reason:
    """The end of a Sandbox whose object is gone."""
    return Reason("SandboxDeleted", f"Sandbox {name} was deleted while it was in use")


def owner_uid(sandbox: Mapping[str, Any]) -> str | None:
    """Uid of the RolloutJob that owns a Sandbox."""
    owners: Sequence[Mapping[str, Any]] = sandbox["metadata"].get("ownerReferences") or []
    return next((owner["uid"] for owner in owners if owner.get("kind") == "RolloutJob"), None)


def _reason(conditions: Mapping[str, Mapping[str, Any]], kind: str, status: str) -> Reason | None:
    condition = conditions.get(kind)
    if condition is None or condition.get("status") != status:
        return None
    return Reason(condition.get("reason") or kind, condition.get("message") or "")


def _first(reasons: Any) -> Reason | None:
    return next((reason for reason in reasons if reason is not None), None)
