"""What runners may do at the API server, and the Secret that tells them what to run."""

import json
from typing import Any

from rollout_api.base import API_GROUP
from rollout_api.cluster import JOB_FILE, runner_name
from rollout_api.rollout_job import RolloutJob
from rollout_operator.rollout_job.owned import owned_metadata


def job_file(job: RolloutJob) -> str:
    """The job as its runners run it, as JSON."""
    return json.dumps(job.wire(), ensure_ascii=False, separators=(",", ":"))


def secret(job: RolloutJob) -> dict[str, Any]:
    """The runners' Secret without its key. It is fixed at the start: what runs does not change under way."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned_metadata(job),
        "type": "Opaque",
        "immutable": True,
        "stringData": {JOB_FILE: job_file(job)},
    }


def service_account_name(job: RolloutJob) -> str:
    """The account of the runner pods: the user's own, or one of the job's."""
    return job.spec.runners.service_account_name or runner_name(job.metadata.name)


def access(job: RolloutJob) -> list[dict[str, Any]]:
    """ServiceAccount (unless the user names one), Role and RoleBinding of the runners."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owned_metadata(job),
        "automountServiceAccountToken": False,
    }
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": owned_metadata(job),
        "rules": _rules(job.metadata.name),
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": owned_metadata(job),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": runner_name(job.metadata.name),
        },
        "subjects": [
            {"kind": "ServiceAccount", "name": service_account_name(job), "namespace": job.metadata.namespace}
        ],
    }
    return [role, binding] if job.spec.runners.service_account_name else [account, role, binding]


def _rules(name: str) -> list[dict[str, Any]]:
    def rule(resource: str, *verbs: str, only: str | None = None) -> dict[str, Any]:
        names = {"resourceNames": [only]} if only else {}
        return {"apiGroups": [API_GROUP], "resources": [resource], "verbs": list(verbs), **names}

    return [
        rule("sandboxes", "get", "list", "watch", "create", "delete"),
        rule("rolloutjobs", "get", only=name),
        rule("rolloutjobs/status", "get", "patch", only=name),
        rule("modelservers", "get", "list", "watch"),
    ]
