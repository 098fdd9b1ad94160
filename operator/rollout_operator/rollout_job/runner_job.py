"""The Indexed Job of runner pods. Completion, restart of an index, suspension and eviction are Kubernetes' own."""

import math
from collections.abc import Mapping
from typing import Any, Final

from rollout_api.base import quantity_value
from rollout_api.cluster import RUNNER_FOLDER, RUNNER_METRICS_PORT, SUSPEND_ANNOTATION, runner_name
from rollout_api.keys import named_keys
from rollout_api.rollout_job import RolloutJob
from rollout_operator.config import OperatorConfig, RunnerDefaults
from rollout_operator.rollout_job.access import service_account_name
from rollout_operator.rollout_job.owned import labels, owned_metadata
from rollout_operator.sandbox import template

PARTS: Final = template.OwnParts("runner", ("job", "tmp"), RUNNER_FOLDER)
"""What `runners.podTemplate` may not replace."""

KUEUE_PREFIX: Final = "kueue.x-k8s.io/"
"""Of the labels that name a job's queue and priority."""

USER: Final = 65532
"""The user of the runtime image, by number: `runAsNonRoot` cannot check a name."""

ROLLOUT_MEBIBYTES: Final = 2
"""Memory of one rollout in a runner. A short conversation was measured at 0.13 MB (docs/benchmarks.md); a long one, with
token ids and logprobs, holds a few."""

UNLIMITED: Final = 2**31 - 1
"""Restarts that Kubernetes grants. How many are too many is decided by what the runners achieve (progress.py)."""

LOST_NODE_SECONDS: Final = 30
"""How long a node may be silent before its runner is started elsewhere; Kubernetes' own default is 300."""

GRACE_SECONDS: Final = 30
"""A runner finishes its turns within 25 s of SIGTERM."""


def runner_job(
    job: RolloutJob, config: OperatorConfig, *, suspend: bool, job_labels: Mapping[str, str] = {}
) -> dict[str, Any]:
    """The batch/v1 Job of a resolved RolloutJob. Kueue queues it as the `job_labels` of the RolloutJob say."""
    replicas = job.spec.runners.replicas
    metadata = owned_metadata(job.metadata)
    metadata["labels"] |= {key: value for key, value in job_labels.items() if key.startswith(KUEUE_PREFIX)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**metadata, **suspension(suspend=suspend)["metadata"]},
        "spec": {
            "completionMode": "Indexed",
            "completions": replicas,
            "parallelism": replicas,
            "backoffLimit": UNLIMITED,
            # Not `Failed`: it would wait for ever for a pod on a dead node.
            "podReplacementPolicy": "TerminatingOrFailed",
            "suspend": suspend,
            "template": template.merge(
                {"metadata": {"labels": labels(job.metadata)}, "spec": _pod(job, config)},
                template.without_nulls(job.spec.runners.pod_template or {}),
            ),
        },
    }


def suspension(*, suspend: bool) -> dict[str, Any]:
    """The fields of a Job that suspend or resume it: the value, and a note that the operator set it."""
    return {"metadata": {"annotations": {SUSPEND_ANNOTATION: str(suspend).lower()}}, "spec": {"suspend": suspend}}


def _pod(job: RolloutJob, config: OperatorConfig) -> dict[str, Any]:
    runners = job.spec.runners
    return {
        "restartPolicy": "Never",
        "serviceAccountName": service_account_name(job),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": name} for name in runners.image_pull_secrets],
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{trouble}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": LOST_NODE_SECONDS,
            }
            for trouble in ("not-ready", "unreachable")
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, config)],
        "volumes": [
            # 0440: through fsGroup the runner reads it, and nobody writes it.
            {"name": "job", "secret": {"secretName": runner_name(job.metadata.name), "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _container(job: RolloutJob, config: OperatorConfig) -> dict[str, Any]:
    own_image = job.spec.runners.image
    return {
        "name": PARTS.container,
        "image": own_image or config.images.runtime,
        # A user's image keeps Kubernetes' own rule: Always for :latest, else IfNotPresent.
        **({} if own_image else {"imagePullPolicy": config.images.pull_policy}),
        "env": [{"name": "HOME", "value": "/tmp"}, *_keys(job)],
        "envFrom": [{"secretRef": {"name": job.spec.output.secret_ref}}] if job.spec.output.secret_ref else [],
        "ports": [{"name": "metrics", "containerPort": RUNNER_METRICS_PORT, "protocol": "TCP"}],
        "resources": {"requests": _requests(config.runner, job.spec.runners.concurrency)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "job", "mountPath": RUNNER_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
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
