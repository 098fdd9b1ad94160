"""No sandbox can connect to a runner, which holds the job's credentials."""

from rollout_api.on_cluster.resolve import resolve
from rollout_operator.rollout_job.runner_objects import runner_policy
from tests.unit.rollout_operator.rollout_job.scenes import CONFIG, UID, manifest


def test_only_metrics_are_open_and_not_to_sandboxes() -> None:
    job = resolve(manifest(), CONFIG).job
    assert job is not None
    spec = runner_policy(job.metadata)["spec"]
    assert spec["podSelector"]["matchLabels"] == {"rollout.dev/job-uid": UID, "rollout.dev/role": "runner"}
    assert spec["policyTypes"] == ["Ingress"], "models and stores may be anywhere"
    (rule,) = spec["ingress"]
    (peer,) = rule["from"]
    assert rule["ports"] == [{"port": 9090, "protocol": "TCP"}]
    assert peer["podSelector"]["matchExpressions"] == [
        {"key": "rollout.dev/role", "operator": "NotIn", "values": ["sandbox"]}
    ]
