"""The rights of a runner: what it needs for its own job, and nothing else."""

import json

from rollout_api.manifest import validate
from rollout_api.on_cluster.resolve import resolve
from rollout_api.rollout_job import RolloutJob
from rollout_operator.rollout_job.runner_objects import access, secret, shards
from tests.unit.rollout_operator.rollout_job.scenes import CONFIG, UID, config, manifest

SHARDS = ("sums-5f0c2c1e-0", "sums-5f0c2c1e-1")


def resolved(**spec: object) -> RolloutJob:
    job = resolve(manifest(**spec), CONFIG).job
    assert job is not None
    return job


def test_runner_has_no_access_to_pods_secrets_or_other_jobs() -> None:
    _, role, _ = access(resolved(runners={"replicas": 2}), CONFIG)
    allowed = {(r["resources"][0], tuple(r["verbs"]), tuple(r.get("resourceNames", ()))) for r in role["rules"]}
    assert allowed == {
        ("sandboxes", ("get", "list", "watch", "create", "delete"), ()),
        ("sandboxpools", ("get", "list", "watch"), ()),
        ("rolloutjobs", ("get",), ("sums",)),
        ("rolloutshards", ("get",), SHARDS),
        ("rolloutshards/status", ("patch",), SHARDS),
        ("modelservers", ("get", "list", "watch"), ()),
    }
    assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"rollout.dev"}


def test_workload_identity_account_gets_the_runners_role() -> None:
    role, binding = access(resolved(runners={"serviceAccountName": "cloud"}), CONFIG)
    assert (role["kind"], binding["kind"]) == ("Role", "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "cloud", "namespace": "team"}]


def test_runners_get_the_workload_identity_that_the_chart_names() -> None:
    annotations = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/rollouts"}
    account, *others = access(resolved(), config(runner={"serviceAccountAnnotations": annotations}))
    assert account["metadata"]["annotations"] == annotations
    assert not any("annotations" in body["metadata"] for body in others)


def test_all_objects_are_deleted_with_their_job_without_delaying_it() -> None:
    for body in (secret(resolved()), *access(resolved(), CONFIG), *shards(resolved().metadata, 2)):
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (UID, True, False)
        assert "finalizers" not in body["metadata"]


def test_runners_read_back_the_very_job_that_was_resolved() -> None:
    job = resolved(tasks={"inline": [{"name": "sums", "prompt": "日本", "verifier": {"commands": ["true"]}}]})
    body = secret(job)
    assert validate(RolloutJob, json.loads(body["stringData"]["job.json"])) == job
    assert body["immutable"] is True
    assert "key" not in body["stringData"], "the loop makes the key"
