"""What runners may do at the API server, where they report, and the Secret that says what they run."""

import json
from collections.abc import Sequence
from typing import Any

from rollout_api.base import API_GROUP, API_VERSION
from rollout_api.cluster import JOB_FILE, runner_name, shard_name
from rollout_api.conditions import Metadata
from rollout_api.rollout_job import RolloutJob
from rollout_operator.config import OperatorConfig
from rollout_operator.rollout_job.owned import owned_metadata


def job_file(job: RolloutJob) -> str:
    """The job as its runners run it, as JSON."""
    return json.dumps(job.wire(), ensure_ascii=False, separators=(",", ":"))


def secret(job: RolloutJob) -> dict[str, Any]:
    """The runners' Secret without its key. It is fixed at the start: what runs does not change under way."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned_metadata(job.metadata),
        "type": "Opaque",
        "immutable": True,
        "stringData": {JOB_FILE: job_file(job)},
    }


def service_account_name(job: RolloutJob) -> str:
    """The account of the runner pods: the user's own, or one of the job's."""
    return job.spec.runners.service_account_name or runner_name(job.metadata.name)


def access(job: RolloutJob, config: OperatorConfig) -> list[dict[str, Any]]:
    """ServiceAccount (unless the user names one), Role and RoleBinding of the runners."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {**owned_metadata(job.metadata), "annotations": config.runner.service_account_annotations},
        "automountServiceAccountToken": False,
    }
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": owned_metadata(job.metadata),
        "rules": _rules(job),
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": owned_metadata(job.metadata),
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


def shards(job: Metadata, replicas: int) -> list[dict[str, Any]]:
    """The objects in which the runners report, one for each: reports must not rewrite the job with all its tasks."""
    names = [shard_name(job.name, job.uid or "", index) for index in range(replicas)]
    return [
        {"apiVersion": API_VERSION, "kind": "RolloutShard", "metadata": owned_metadata(job, name)} for name in names
    ]


def _rules(job: RolloutJob) -> list[dict[str, Any]]:
    def rule(resource: str, *verbs: str, only: Sequence[str] = ()) -> dict[str, Any]:
        names = {"resourceNames": list(only)} if only else {}
        return {"apiGroups": [API_GROUP], "resources": [resource], "verbs": list(verbs), **names}

    own_shards = [shard["metadata"]["name"] for shard in shards(job.metadata, job.spec.runners.replicas)]
    return [
        rule("sandboxes", "get", "list", "watch", "create", "delete"),
        rule("rolloutjobs", "get", only=[job.metadata.name]),
        rule("rolloutshards", "get", only=own_shards),
        rule("rolloutshards/status", "patch", only=own_shards),
        rule("modelservers", "get", "list", "watch"),
    ]
