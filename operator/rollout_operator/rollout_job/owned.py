"""The metadata that everything made for a RolloutJob carries."""

from typing import Any

from rollout_api.base import API_VERSION
from rollout_api.cluster import JOB_LABEL, JOB_UID_LABEL, MANAGED_BY, ROLE_LABEL, RUNNER_ROLE, runner_name
from rollout_api.conditions import Metadata


def labels(job: Metadata) -> dict[str, str]:
    """Labels of whatever belongs to a job's runners."""
    return {**MANAGED_BY, JOB_LABEL: job.name, JOB_UID_LABEL: job.uid or "", ROLE_LABEL: RUNNER_ROLE}


def owned_metadata(job: Metadata, name: str | None = None) -> dict[str, Any]:
    """Metadata of an object that garbage collection removes with the job. `name` defaults to that of its runners."""
    return {
        "name": name or runner_name(job.name),
        "namespace": job.namespace,
        "labels": labels(job),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": "RolloutJob",
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                # Nobody waits for these to go: deleting a job never hangs.
                "blockOwnerDeletion": False,
            }
        ],
    }
