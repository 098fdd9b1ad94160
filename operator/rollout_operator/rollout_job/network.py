"""Who may speak to the runners: whoever collects metrics, and no sandbox."""

from typing import Any

from rollout_api.cluster import JOB_UID_LABEL, ROLE_LABEL, RUNNER_METRICS_PORT, RUNNER_ROLE, SANDBOX_ROLE
from rollout_api.rollout_job import RolloutJob
from rollout_operator.rollout_job.owned import owned_metadata


def runner_policy(job: RolloutJob) -> dict[str, Any]:
    """The NetworkPolicy of the runner pods. What they may reach is open: models and stores are anywhere."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owned_metadata(job.metadata),
        "spec": {
            "podSelector": {"matchLabels": {JOB_UID_LABEL: job.metadata.uid, ROLE_LABEL: RUNNER_ROLE}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [
                        {
                            "namespaceSelector": {},
                            "podSelector": {
                                # Pods without the label are meant too.
                                "matchExpressions": [{"key": ROLE_LABEL, "operator": "NotIn", "values": [SANDBOX_ROLE]}]
                            },
                        }
                    ],
                    "ports": [{"port": RUNNER_METRICS_PORT, "protocol": "TCP"}],
                }
            ],
        },
    }
