"""What keeps the pods: a StatefulSet, or a LeaderWorkerSet where one server spans several nodes."""

from typing import Any, Final

from rollout_api.model_server import ModelServer
from rollout_operator.config import OperatorConfig
from rollout_operator.model_server.owned import metadata, selector, with_digest
from rollout_operator.model_server.pod import pod_template

OF_PODS: Final = {
    *("model", "engine", "parallelism", "accelerator", "resources", "cache", "sleep", "lora", "tool_call_parser"),
    *("extra_args", "env", "pod_template"),
}
"""Fields of the spec that pods are made of, beside some of `weightTransfer`.

Only a change of these makes new pods: neither a new operator, nor a new policy, nor another number of servers may restart an
engine that takes 45 minutes to start."""

Json = dict[str, Any]


def workload(server: ModelServer, config: OperatorConfig) -> Json:
    """The object, with the digest of what its pods are made of."""
    body = _leader_worker_set(server, config) if server.spec.parallelism.nodes > 1 else _stateful_set(server, config)
    transfer = server.spec.weight_transfer
    how = [transfer.mode, transfer.pull.form, transfer.pull.secret_ref, transfer.push and transfer.push.backend]
    return with_digest(body, [server.spec.model_dump(mode="json", by_alias=True, include=OF_PODS), how])


def _stateful_set(server: ModelServer, config: OperatorConfig) -> Json:
    name = server.metadata.name
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(server, name),
        "spec": {
            "replicas": server.spec.replicas,
            "serviceName": name,
            # Servers need not wait for each other.
            "podManagementPolicy": "Parallel",
            # One at a time, and none beyond their number: there may be no accelerator to spare (LLMKube issue 192).
            "updateStrategy": {"type": "RollingUpdate"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector(server)},
            "template": pod_template(server, config),
        },
    }


def _leader_worker_set(server: ModelServer, config: OperatorConfig) -> Json:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(server, server.metadata.name),
        "spec": {
            "replicas": server.spec.replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "leaderWorkerTemplate": {
                "size": server.spec.parallelism.nodes,
                # An engine that has lost one of its nodes answers no more.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": pod_template(server, config),
                "workerTemplate": pod_template(server, config, worker=True),
            },
        },
    }
