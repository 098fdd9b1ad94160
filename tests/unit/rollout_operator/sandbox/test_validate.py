"""Problems of a Sandbox are found before anything is created, and reported by field."""

from typing import Any

import pytest

from rollout_api.sandbox import SandboxSpec, Security
from rollout_operator.sandbox.validate import Owner, parse_spec, problems

JOB = Owner("RolloutJob", "j", "uid-j", {}, Security.STANDARD)
DANGEROUS = {"spec": {"hostNetwork": True}}


def told(job: Owner | None = None, namespace: str = "lab", **spec: Any) -> list[str]:
    return problems(SandboxSpec.model_validate({"image": "x:1", **spec}), job, namespace, ["trusted"])


def test_valid_sandbox_has_no_problems() -> None:
    assert told() == told(JOB) == []


def test_parking_needs_storage_that_pods_share_and_a_sandbox_without_owner() -> None:
    stored = {"uri": "s3://bucket/prefix"}
    assert told(parking=stored, running=False) == []
    (local,) = told(parking={"uri": "/tmp/here"})
    assert local.startswith("spec.parking.uri: '/tmp/here' is a local folder")
    assert told(JOB, parking=stored) == ["spec.parking: a Sandbox of RolloutJob j cannot be parked; remove it"]
    (nowhere,) = parse_spec({"image": "x:1", "running": False})
    assert "running: false needs parking" in nowhere


def test_missing_image_is_reported() -> None:
    (problem,) = told(image=None)
    assert problem.startswith("spec.image: is missing")


@pytest.mark.parametrize("field", [{"podTemplate": {}}, {"clients": {}}, {"security": "Privileged"}])
def test_runner_cannot_set_fields_that_a_sandbox_takes_from_its_job(field: dict[str, Any]) -> None:
    (problem,) = told(JOB, **field)
    assert problem.startswith(f"spec.{next(iter(field))}: a Sandbox takes it from its RolloutJob j")


def test_refused_template_is_named_by_its_object_and_field() -> None:
    assert told(podTemplate=DANGEROUS)[0].startswith("spec.podTemplate.spec.hostNetwork: refused: ")
    job = Owner("RolloutJob", "j", "uid-j", DANGEROUS, Security.STANDARD)
    assert told(job)[0].startswith("RolloutJob j spec.sandbox.podTemplate.spec.hostNetwork: refused: ")


def test_privileged_is_allowed_only_in_the_charts_namespaces() -> None:
    job = Owner("RolloutJob", "j", "uid-j", DANGEROUS, Security.PRIVILEGED)
    assert told(job, "trusted") == []
    (problem,) = told(job, "lab")
    assert problem.startswith("RolloutJob j spec.security: Privileged is not allowed in namespace lab")
    assert "trusted" in problem
    assert told(namespace="trusted", security="Privileged", podTemplate=DANGEROUS) == []


def test_refusal_names_the_setting_that_allows_the_field() -> None:
    assert "spec.security: Privileged" in told(podTemplate=DANGEROUS)[-1]


def test_invalid_label_selector_of_clients_is_reported_by_field() -> None:
    good = {"matchLabels": {"a.b/app": "notebook"}, "matchExpressions": [{"key": "team", "operator": "Exists"}]}
    assert told(clients=good) == []
    wrong: dict[str, Any] = {
        "spec.clients.labels": {"labels": {"app": "notebook"}},
        "spec.clients.matchLabels": {"matchLabels": 5},
        "spec.clients.matchExpressions": {"matchExpressions": "x"},
        'spec.clients.matchLabels["a b"]': {"matchLabels": {"a b": "c"}},
        "spec.clients.matchExpressions[0]": {"matchExpressions": [{"key": "a", "operator": "In"}]},
        "spec.clients.matchExpressions[0].operator": {"matchExpressions": [{"key": "a", "operator": "Gt"}]},
    }
    for field, clients in wrong.items():
        problems = parse_spec({"image": "x", "clients": clients})
        assert isinstance(problems, list), clients
        assert problems[0].startswith(field), problems


def test_value_that_the_crd_schema_cannot_check_is_reported_by_field() -> None:
    found = parse_spec({"image": "x", "network": {"agent": ["example.org"]}, "env": [{"name": "A"}, {"name": "A"}]})
    assert isinstance(found, list)
    assert any(problem.startswith("spec.network.agent") for problem in found)
    assert any("A is set twice" in problem for problem in found)
