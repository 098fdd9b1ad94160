"""Runner pods are admitted where Pod Security is restricted, are never given up by Kubernetes, and get only their own
credentials.
"""

from typing import Any

import pytest

from rollout_api.keys import MODEL_KEY_VARIABLE, mcp_key_variable
from rollout_api.on_cluster.resolve import resolve
from rollout_operator.rollout_job.runner_objects import runner_job
from tests.unit.rollout_operator.rollout_job.scenes import CONFIG, config, manifest


def made(*, suspend: bool = False, **spec: Any) -> dict[str, Any]:
    job = resolve(manifest(**spec), CONFIG).job
    assert job is not None
    found: dict[str, Any] = runner_job(job, CONFIG, suspend=suspend)["spec"]
    return found


def pod(**spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = made(**spec)["template"]["spec"]
    return found


def container(**spec: Any) -> dict[str, Any]:
    (only,) = pod(**spec)["containers"]
    assert isinstance(only, dict)
    return only


def test_every_runner_has_its_index_and_kubernetes_never_gives_the_job_up() -> None:
    spec = made(runners={"replicas": 3})
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimit"] == 2147483647
    assert spec["podReplacementPolicy"] == "TerminatingOrFailed", "`Failed` waits for pods of dead nodes for ever"
    assert "podFailurePolicy" not in spec


def test_a_suspended_job_is_made_without_pods() -> None:
    assert made(suspend=True)["suspend"] is True


def test_runner_pods_fit_the_restricted_profile() -> None:
    spec, runner = pod(), container()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert runner["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_the_model_key_is_where_the_runner_looks_for_it() -> None:
    source = {"secretKeyRef": {"name": "keys", "key": "small"}}
    model = {"endpoint": {"baseURL": "https://models.example/v1", "name": "small", "apiKeyFrom": source}}
    variables = {v["name"]: v for v in container(model=model)["env"]}
    assert variables[MODEL_KEY_VARIABLE]["valueFrom"] == source


def test_the_keys_of_mcp_servers_are_where_the_runner_looks_for_them() -> None:
    sources = [{"secretKeyRef": {"name": "keys", "key": name}} for name in ("a", "b")]
    servers = [
        {"name": f"web-{number}", "url": "https://tools.example/mcp", "apiKeyFrom": source}
        for number, source in enumerate(sources)
    ]
    model = {"endpoint": {"baseURL": "https://models.example/v1", "name": "small"}}
    agent = {"type": "ToolCalling", "mcpServers": servers}
    variables = {v["name"]: v for v in container(model=model, agent=agent)["env"]}
    assert [variables[mcp_key_variable(f"web-{number}")]["valueFrom"] for number in range(2)] == sources


def test_storage_credentials_come_only_from_the_jobs_own_secret() -> None:
    output = {"uri": "s3://bucket", "secretRef": "store"}
    assert container(output=output)["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert container()["envFrom"] == []
    secrets = [v["secret"]["secretName"] for v in pod()["volumes"] if "secret" in v]
    assert secrets == ["sums-runner"]


def test_a_users_own_image_and_pull_secrets_are_used() -> None:
    runners = {"image": "mine:2", "imagePullSecrets": ["registry"], "serviceAccountName": "cloud"}
    assert container(runners=runners)["image"] == "mine:2"
    assert "imagePullPolicy" not in container(runners=runners), "Kubernetes' own rule: Always for :latest"
    assert pod(runners=runners)["imagePullSecrets"] == [{"name": "registry"}]
    assert pod(runners=runners)["serviceAccountName"] == "cloud"


def test_memory_grows_with_concurrency_and_the_cpu_is_not_limited() -> None:
    assert container()["resources"] == {"requests": {"cpu": "250m", "memory": "384Mi"}}
    assert container(runners={"concurrency": 1000})["resources"]["requests"]["memory"] == "2256Mi"
    job = resolve(manifest(), CONFIG).job
    assert job is not None
    body = runner_job(job, config(runner={"cpu": "1", "memory": "1Gi"}), suspend=False)
    requests = body["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert requests == {"cpu": "1", "memory": "1152Mi"}


def test_pods_carry_the_labels_by_which_policies_and_the_operator_find_them() -> None:
    labels = made()["template"]["metadata"]["labels"]
    assert labels["rollout.dev/role"] == "runner"
    assert labels["rollout.dev/job"] == "sums"
    assert labels["app.kubernetes.io/managed-by"] == "agent-rollouts"


def test_names_have_at_most_the_length_that_kubernetes_accepts() -> None:
    long = manifest()
    long["metadata"]["name"] = "a" * 52
    job = resolve(long, CONFIG).job
    assert job is not None
    assert len(f"{runner_job(job, CONFIG, suspend=False)['metadata']['name']}-255") <= 63, "the pods' host name"


def test_runner_template_sets_limits_and_places_and_keeps_the_runner() -> None:
    given = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"pool": "cpu"},
            "priorityClassName": "high",
            "tolerations": [{"key": "pool", "operator": "Exists"}],
            "containers": [{"name": "runner", "resources": {"limits": {"memory": "2Gi"}}}],
        },
    }
    template = made(runners={"podTemplate": given})["template"]
    spec, plain = template["spec"], pod()
    (runner,) = spec["containers"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"].items() >= made()["template"]["metadata"]["labels"].items()
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"pool": "cpu"}, "high")
    assert spec["tolerations"] == [*plain["tolerations"], {"key": "pool", "operator": "Exists"}]
    assert runner["resources"]["limits"] == {"memory": "2Gi"}
    assert runner["resources"]["requests"] == container()["resources"]["requests"]
    assert (runner["image"], runner["securityContext"]) == (container()["image"], container()["securityContext"])


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"spec": {"hostNetwork": True}}, "spec.runners.podTemplate.spec.hostNetwork"),
        ({"spec": {"serviceAccountName": "admin"}}, "spec.runners.podTemplate.spec.serviceAccountName"),
        ({"spec": {"containers": [{"name": "other"}]}}, "spec.runners.podTemplate.spec.containers[0].name"),
        ({"spec": {"volumes": [{"name": "job", "emptyDir": {}}]}}, "spec.runners.podTemplate.spec.volumes[0].name"),
        (
            {"metadata": {"labels": {"rollout.dev/role": "sandbox"}}},
            "spec.runners.podTemplate.metadata.labels[rollout.dev/role]",
        ),
    ],
)
def test_runner_template_that_grants_privileges_or_hides_the_runner_is_refused(
    given: dict[str, Any], path: str
) -> None:
    problems = resolve(manifest(runners={"podTemplate": given}), CONFIG).problems
    assert path in [problem.path for problem in problems]
