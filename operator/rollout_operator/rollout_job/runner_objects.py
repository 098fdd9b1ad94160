"""The objects of a job's runners: Indexed Job, RBAC, Secret with the job, RolloutShards and NetworkPolicy.

Kubernetes' Job controller handles completion, restarts, suspension and eviction of the pods.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollout_api.base import API_GROUP, quantity_value
from rollout_api.cluster import (
    EXECUTOR_ANNOTATION,
    JOB_FILE,
    JOB_LABEL,
    JOB_UID_LABEL,
    KEY_FILE,
    MANAGED_BY,
    POOLS_FOLDER,
    ROLE_LABEL,
    RUNNER_FOLDER,
    RUNNER_METRICS_PORT,
    RUNNER_ROLE,
    SUSPEND_ANNOTATION,
    pool_secret_name,
    runner_name,
    shard_name,
)
from rollout_api.conditions import Metadata
from rollout_api.keys import named_keys
from rollout_api.on_cluster import template
from rollout_api.on_cluster.objects import Json, owned_object, owner_reference
from rollout_api.on_cluster.operator_config import OperatorConfig, RunnerDefaults
from rollout_api.on_cluster.resolve import RUNNER_PARTS, job_file
from rollout_api.rollout_job import RolloutJob
from rollout_operator.runner_pod import container_fields, pod_fields
from rollout_operator.world import NOT_SANDBOX, tcp


def labels(job: Metadata) -> dict[str, str]:
    """Return the labels of a job's runners and their objects."""
    return {**MANAGED_BY, JOB_LABEL: job.name, JOB_UID_LABEL: job.uid or "", ROLE_LABEL: RUNNER_ROLE}


def owned(
    job: Metadata, kind: str, name: str | None = None, labelled: Mapping[str, str] | None = None, **body: Any
) -> Json:
    """Return an object that garbage collection deletes with the job. Name and labels default to those of its runners."""
    owner = owner_reference("RolloutJob", job.name, job.uid)
    return owned_object(kind, name or runner_name(job.name), job.namespace, owner, labelled or labels(job), **body)


def secret(job: RolloutJob) -> Json:
    """Return the runners' Secret without its key. Its contents do not change after the start."""
    return owned(job.metadata, "Secret", type="Opaque", immutable=True, stringData={JOB_FILE: job_file(job)})


def service_account_name(job: RolloutJob) -> str:
    """Return the name of the runner pods' ServiceAccount: the user's, or the one that the operator creates."""
    return job.spec.runners.service_account_name or runner_name(job.metadata.name)


def access(job: RolloutJob, config: OperatorConfig) -> list[Json]:
    """Return Role, RoleBinding and, unless the user names one, ServiceAccount of the runners."""
    account = owned(job.metadata, "ServiceAccount", automountServiceAccountToken=False)
    account["metadata"]["annotations"] = config.runner.service_account_annotations
    subject = {"kind": "ServiceAccount", "name": service_account_name(job), "namespace": job.metadata.namespace}
    role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": runner_name(job.metadata.name)}
    role = owned(job.metadata, "Role", rules=_rules(job))
    binding = owned(job.metadata, "RoleBinding", roleRef=role_ref, subjects=[subject])
    return [role, binding] if job.spec.runners.service_account_name else [account, role, binding]


def shards(job: Metadata, replicas: int) -> list[Json]:
    """Return one RolloutShard for each runner's reports. A report in the job itself would rewrite all its tasks."""
    return [owned(job, "RolloutShard", shard_name(job.name, job.uid or "", index)) for index in range(replicas)]


def runner_policy(job: Metadata) -> Json:
    """Return the NetworkPolicy of the runner pods. Only metrics collectors can reach them; sandboxes cannot.

    Outgoing connections are unrestricted, because models and stores can be anywhere.
    """
    collectors = {"namespaceSelector": {}, "podSelector": {"matchExpressions": [NOT_SANDBOX]}}
    spec = {
        "podSelector": {"matchLabels": {JOB_UID_LABEL: job.uid, ROLE_LABEL: RUNNER_ROLE}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [collectors], "ports": [tcp(RUNNER_METRICS_PORT)]}],
    }
    return owned(job, "NetworkPolicy", spec=spec)


def _rules(job: RolloutJob) -> list[Json]:
    def rule(resource: str, *verbs: str, only: Sequence[str] = ()) -> Json:
        names = {"resourceNames": list(only)} if only else {}
        return {"apiGroups": [API_GROUP], "resources": [resource], "verbs": list(verbs), **names}

    own_shards = [shard["metadata"]["name"] for shard in shards(job.metadata, job.spec.runners.replicas)]
    return [
        rule("sandboxes", "get", "list", "watch", "create", "delete"),
        rule("sandboxpools", "get", "list", "watch"),
        rule("rolloutjobs", "get", only=[job.metadata.name]),
        rule("rolloutshards", "get", only=own_shards),
        rule("rolloutshards/status", "patch", only=own_shards),
        rule("modelservers", "get", "list", "watch"),
    ]


MOST_POOLS: Final = 256
"""Most SandboxPools that one job can use; a runner's report has as many (rollout_api.rollout_job)."""
KUEUE_PREFIX: Final = "kueue.x-k8s.io/"
"""Prefix of the labels that name a job's queue and priority."""

ROLLOUT_MEBIBYTES: Final = 2
"""Memory requested for each concurrent rollout. A short conversation took 0.13 MB (docs/performance.md). A long
one with token ids and logprobs takes several MB.
"""

UNLIMITED: Final = 2**31 - 1
"""Restarts that Kubernetes allows. The operator sets the limit instead, by the runners' progress (verdict.py)."""


def runner_job(
    job: RolloutJob,
    config: OperatorConfig,
    *,
    suspend: bool,
    job_labels: Mapping[str, str] = {},
    pools: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the batch/v1 Job of a resolved RolloutJob. Kueue queues it by the `job_labels` of the RolloutJob.

    Args:
        pools: names of the SandboxPools of its namespace.
    """
    replicas = job.spec.runners.replicas
    queue = {key: value for key, value in job_labels.items() if key.startswith(KUEUE_PREFIX)}
    spec = {
        "completionMode": "Indexed",
        "completions": replicas,
        "parallelism": replicas,
        "backoffLimit": UNLIMITED,
        # `Failed` would wait for ever for a pod on a dead node.
        "podReplacementPolicy": "TerminatingOrFailed",
        "suspend": suspend,
        "template": template.merge(
            {"metadata": {"labels": labels(job.metadata)}, "spec": _pod(job, config, _usable(job, pools))},
            template.without_nulls(job.spec.runners.pod_template or {}),
        ),
    }
    body = owned(job.metadata, "Job", labelled=labels(job.metadata) | queue, spec=spec)
    body["metadata"] |= suspension(suspend=suspend)["metadata"]
    body["metadata"]["annotations"][EXECUTOR_ANNOTATION] = config.images.executor
    return body


def suspension(*, suspend: bool) -> dict[str, Any]:
    """Return the fields that suspend or resume a Job: `suspend`, and an annotation with the value that the operator set."""
    return {"metadata": {"annotations": {SUSPEND_ANNOTATION: str(suspend).lower()}}, "spec": {"suspend": suspend}}


def runner_count(replicas: int) -> dict[str, Any]:
    """Return the fields that set the number of runners. Kubernetes accepts a new number of completions only with an equal
    parallelism.
    """
    return {"spec": {"completions": replicas, "parallelism": replicas}}


def _usable(job: RolloutJob, pools: Sequence[str]) -> list[str]:
    """Return the pools whose keys its runners get. A job uses those that existed at its start."""
    match job.spec.sandbox.pool:
        case "None":
            return []
        case "Auto":
            return sorted(pools)[:MOST_POOLS]
        case name:
            return [name]


def _pools_volume(pools: Sequence[str]) -> dict[str, Any]:
    # Optional, because a pool may be deleted, or just have been created.
    sources = [
        {
            "secret": {
                "name": pool_secret_name(pool),
                "items": [{"key": KEY_FILE, "path": f"{pool}/{KEY_FILE}"}],
                "optional": True,
            }
        }
        for pool in pools
    ]
    return {"name": "pools", "projected": {"sources": sources, "defaultMode": 0o440}}


def _pod(job: RolloutJob, config: OperatorConfig, pools: Sequence[str]) -> dict[str, Any]:
    runners = job.spec.runners
    return {
        **pod_fields(),
        "serviceAccountName": service_account_name(job),
        "automountServiceAccountToken": True,
        "imagePullSecrets": [{"name": name} for name in runners.image_pull_secrets],
        "containers": [_container(job, config, has_pools=bool(pools))],
        "volumes": [
            # 0440: the runner reads it through fsGroup, and no process may write it.
            {"name": "job", "secret": {"secretName": runner_name(job.metadata.name), "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
            *([_pools_volume(pools)] if pools else []),
        ],
    }


def _container(job: RolloutJob, config: OperatorConfig, *, has_pools: bool) -> dict[str, Any]:
    own_image = job.spec.runners.image
    return {
        **container_fields(job.spec.output.secret_ref),
        "name": RUNNER_PARTS.container,
        "image": own_image or config.images.runtime,
        # Kubernetes' default applies to a user's image: Always for :latest, else IfNotPresent.
        **({} if own_image else {"imagePullPolicy": config.images.pull_policy}),
        "env": [{"name": "HOME", "value": "/tmp"}, *_keys(job)],
        "ports": [{"name": "metrics", "containerPort": RUNNER_METRICS_PORT, "protocol": "TCP"}],
        "resources": {"requests": _requests(config.runner, job.spec.runners.concurrency)},
        "volumeMounts": [
            {"name": "job", "mountPath": RUNNER_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *([{"name": "pools", "mountPath": POOLS_FOLDER, "readOnly": True}] if has_pools else []),
        ],
    }


def _keys(job: RolloutJob) -> list[dict[str, Any]]:
    return [
        {"name": key.variable, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
        for key in named_keys(job)
        if (secret := key.source.secret_key_ref) is not None
    ]


def _requests(base: RunnerDefaults, concurrency: int) -> dict[str, str]:
    mebibytes = math.ceil(quantity_value(base.memory) / 2**20) + ROLLOUT_MEBIBYTES * concurrency
    return {"cpu": base.cpu, "memory": f"{mebibytes}Mi"}
