"""The metadata that everything made for a RolloutJob carries."""

from typing import Any

from rollout_api.base import API_VERSION
from rollout_api.cluster import JOB_LABEL, JOB_UID_LABEL, MANAGED_BY, ROLE_LABEL, RUNNER_ROLE, runner_name
from rollout_api.rollout_job import RolloutJob


def labels(job: RolloutJob) -> dict[str, str]:
    """Labels of whatever belongs to a job's runners."""
    return {**MANAGED_BY, JOB_LABEL: job.metadata.name, JOB_UID_LABEL: job.metadata.uid or "", ROLE_LABEL: RUNNER_ROLE}


def owned_metadata(job: RolloutJob) -> dict[str, Any]:
    """Metadata of an object named after the job's runners, which garbage collection removes with the job."""
    return {
        "name": runner_name(job.metadata.name),
        "namespace": job.metadata.namespace,
        "labels": labels(job),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": "RolloutJob",
                "name": job.metadata.name,
                "uid": job.metadata.uid,
                "controller": True,
                # Nobody waits for these to go: deleting a job never hangs.
                "blockOwnerDeletion": False,
            }
        ],
    }
