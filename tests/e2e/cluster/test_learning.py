"""The training example on real pods: runners run the rollouts, a ModelServer serves the policy, S3 stores the weights."""

import asyncio
import json

import pytest
from kubernetes.aio import client, config

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from examples.train.cluster import learn
from examples.train.trainer import Settings
from rolloutctl.policy import PolicyNotServed
from tests.support.cluster import STORAGE_SECRET, Cluster, Object, eventually

pytestmark = [pytest.mark.long, pytest.mark.full]

POLICY_IMAGE = "agent-rollouts-lake-policy:test"


def test_a_policy_learns_from_a_jobs_rollouts_while_its_model_server_is_updated(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{cluster.bucket}/{namespace}"
    settings = Settings(enough=0.5)

    async def train() -> list[float]:
        async with await config.new_client_from_config(str(cluster.kubeconfig)) as api:
            objects = client.CustomObjectsApi(api)
            return await learn(objects, namespace, POLICY_IMAGE, uri, STORAGE_SECRET, settings)

    def job() -> Object:
        return cluster.get("rolloutjob", "lake", namespace) or {}

    try:
        curve = asyncio.run(train())
    except (TimeoutError, PolicyNotServed) as error:
        events = cluster.kubectl("get", "modelservers,rolloutjobs,pods,events", "-n", namespace, check=False).stdout
        raise AssertionError(f"{error}\n{json.dumps(job().get('status'))}\n{events}") from error
    assert curve[0] < 0.05, "it begins with a policy that knows nothing"
    assert curve[-1] >= 0.5

    def succeeded() -> bool | None:
        found = job()["status"]["conditions"]
        return any(entry["type"] == "Succeeded" and entry["status"] == "True" for entry in found) or None

    eventually(succeeded, 120, lambda: json.dumps(job()["status"]))
    where, name = job()["status"]["resultURI"].rsplit("/", 1)
    run = asyncio.run(open_run(Store.open(where, cluster.environ, patience_seconds=30), name))
    assert len(run.results()) == len(curve) * settings.groups * 8
    for result in run.results():
        assert (result.token_capture, result.token_forks) == ("Tokens", 0)
        assert result.policy_versions == [(result.batch or "").removeprefix("update-")]
    eventually(lambda: True if cluster.get("modelserver", "lake", namespace) is None else None, 60)
