"""A job that works on a laptop works in the cluster too, or the problem names the field and the change."""

import json
import sys
from typing import Any

import pytest

from rollout_api.on_cluster.resolve import SECRET_BYTES, resolve
from tests.unit.rollout_operator.rollout_job.scenes import CONFIG, UID, config, manifest, task

ENDPOINT = {"baseURL": "https://models.example/v1", "name": "small"}
CHART_MODEL = {"endpoint": {"baseURL": "http://gateway.models:8000/v1", "name": "shared"}}
TOOL_CALLING = {"agent": {"type": "ToolCalling"}}


def problems(**spec: Any) -> dict[str, str]:
    return {problem.path: problem.message for problem in resolve(manifest(**spec), CONFIG).problems}


def endpoint(**changes: Any) -> dict[str, Any]:
    return {**TOOL_CALLING, "model": {"endpoint": ENDPOINT | changes}}


def mcp(**changes: Any) -> dict[str, Any]:
    server = {"name": "tickets", "url": "https://tickets.example/mcp", **changes}
    return {**endpoint(), "agent": {"type": "ToolCalling", "mcpServers": [server]}}


@pytest.mark.parametrize(
    ("spec", "field", "advice"),
    [
        ({"output": {"uri": "out"}}, "spec.output.uri", "s3://"),
        ({"output": {"uri": "/data/out"}}, "spec.output.uri", "defaults.output"),
        ({"output": {"uri": "file:///data/out"}}, "spec.output.uri", "s3://"),
        ({"output": {"uri": "ftp://host/out"}}, "spec.output.uri", "'ftp'"),
        ({"output": {"uri": "s3:///prefix"}}, "spec.output.uri", "names no bucket"),
        ({"tasks": {"from": {"uri": "tasks.jsonl"}}}, "spec.tasks.from.uri", "tasks.inline"),
        (
            {"tasks": {"branch": [{"job": "out/run", "index": 0, "turn": 0, "count": 4}]}},
            "spec.tasks.branch[0].job",
            "that runners can read",
        ),
        (endpoint(baseURL="http://localhost:8000/v1"), "spec.model.endpoint.baseURL", "defaults.model"),
        (endpoint(baseURL="http://127.0.0.7/v1"), "spec.model.endpoint.baseURL", "defaults.model"),
        (endpoint(baseURL="http://[::1]:8000/v1"), "spec.model.endpoint.baseURL", "defaults.model"),
        (endpoint(baseURL="http://0.0.0.0:8000"), "spec.model.endpoint.baseURL", "defaults.model"),
        (endpoint(apiKeyFrom={"env": "API_KEY"}), "spec.model.endpoint.apiKeyFrom.env", "secretKeyRef"),
        (mcp(url="http://localhost/mcp"), "spec.agent.mcpServers[0].url", "that pods can reach"),
        (mcp(apiKeyFrom={"env": "API_KEY"}), "spec.agent.mcpServers[0].apiKeyFrom.env", "secretKeyRef"),
        ({"sandbox": {}}, "spec.sandbox.image", "sandbox.image"),
        ({"security": "Privileged"}, "spec.security", "privilegedNamespaces"),
        (
            {"sandbox": {"image": "tasks:1", "podTemplate": {"spec": {"hostNetwork": True}}}},
            "spec.sandbox.podTemplate.spec.hostNetwork",
            "",
        ),
    ],
)
def test_field_that_works_only_on_a_laptop_is_reported_with_advice(
    spec: dict[str, Any], field: str, advice: str
) -> None:
    found = problems(**spec)
    assert list(found) == [field]
    assert advice in found[field]


def test_all_problems_are_reported() -> None:
    found = problems(output={"uri": "out"}, sandbox={}, **endpoint(baseURL="http://localhost", apiKeyFrom={"env": "K"}))
    assert list(found) == [
        "spec.output.uri",
        "spec.model.endpoint.baseURL",
        "spec.model.endpoint.apiKeyFrom.env",
        "spec.sandbox.image",
    ]


def test_value_that_the_schema_accepts_is_refused_with_the_field() -> None:
    found = problems(sandbox={"image": "tasks:1", "network": {"agent": "Everything"}})
    assert list(found) == ["spec.sandbox.network.agent"]


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/prefix/", "gs://bucket/a/b", "az://container/prefix"])
def test_object_storage_uri_is_kept(uri: str) -> None:
    resolved = resolve(manifest(output={"uri": uri, "secretRef": "store"}), CONFIG)
    assert resolved.job is not None
    assert resolved.job.spec.output.uri == uri
    assert resolved.result_uri == f"{uri.rstrip('/')}/sums-{UID[:8]}"


def test_a_task_may_bring_its_image_when_the_job_has_none() -> None:
    tasks = {"inline": [task("one", sandbox={"image": "one:1"})]}
    assert resolve(manifest(sandbox={}, tasks=tasks), CONFIG).job is not None


@pytest.mark.parametrize("address", ["http://localhost:1/v1", "https://models.example/v1"])
def test_model_of_the_chart_replaces_one_that_only_a_laptop_reaches(address: str) -> None:
    asked = manifest(**endpoint(baseURL=address, apiKeyFrom={"env": "KEY"}))
    resolved = resolve(asked, config(defaults={"model": CHART_MODEL}))
    assert resolved.job is not None
    assert resolved.job.spec.model is not None
    assert resolved.job.spec.model.wire()["endpoint"]["name"] == "shared"


def test_defaults_of_the_chart_replace_no_working_field() -> None:
    defaults = config(defaults={"model": CHART_MODEL, "output": {"uri": "s3://shared"}})
    asked = manifest(**endpoint(apiKeyFrom={"secretKeyRef": {"name": "keys", "key": "k"}}))
    resolved = resolve(asked, defaults)
    assert resolved.job is not None
    assert resolved.job.spec.output.uri == "s3://bucket/runs"
    assert resolved.job.spec.model is not None
    assert resolved.job.spec.model.wire()["endpoint"]["name"] == "small"


def test_privileged_sandboxes_are_allowed_only_in_the_charts_namespaces() -> None:
    asked = manifest(security="Privileged")
    assert resolve(asked, config(privilegedNamespaces=["team"])).job is not None
    (problem,) = resolve(asked, config(privilegedNamespaces=["lab", "trusted"])).problems
    assert "not allowed in namespace team" in problem.message
    assert "(lab, trusted)" in problem.message


def test_runners_get_the_job_without_fields_that_change_while_they_run() -> None:
    asked = manifest(suspend=True, ttlSecondsAfterFinished=5)
    before = resolve(manifest(), CONFIG).job
    resolved = resolve(asked, CONFIG).job
    assert resolved == before
    assert resolved is not None
    assert resolved.wire()["metadata"] == {
        "name": "sums",
        "namespace": "team",
        "uid": UID,
        "labels": {},
        "annotations": {},
    }


def test_a_job_too_large_for_a_secret_is_refused_before_the_api_server_does() -> None:
    turn = {"content": "x" * 200_000}
    script = {"tasks": [{"task": "one", "members": [{"turns": [turn] * 6}]}]}
    asked = manifest(model={"scripted": script})
    assert len(json.dumps(asked)) > SECRET_BYTES
    (problem,) = resolve(asked, CONFIG).problems
    assert "tasks.from" in problem.message


def _calls_to_resolve(tasks: int) -> int:
    """Return how many Python calls it takes to report problems of this many tasks."""
    network = {"agent": ["no port"] * 256}
    inline = [task(f"t{number}", sandbox={"network": network}) for number in range(tasks)]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = resolve(manifest(tasks={"inline": inline}), CONFIG).problems
    finally:
        sys.setprofile(None)
    assert [problem.path for problem in found] == [
        f"spec.tasks.inline[{number}].sandbox.network.agent[0]" for number in range(tasks)
    ]
    return calls


def test_a_manifest_with_thousands_of_wrong_fields_does_not_stop_the_operator() -> None:
    _calls_to_resolve(1)  # Schemas are made once.
    assert _calls_to_resolve(400) < 2.5 * _calls_to_resolve(200)


def test_a_job_runs_in_a_namespace_with_the_longest_name() -> None:
    job = manifest()
    job["metadata"]["namespace"] = "n" * 63
    assert not resolve(job, CONFIG).problems


def test_task_with_a_dockerfile_needs_no_image() -> None:
    task = {"name": "t", "prompt": "p", "dockerfile": {"text": "FROM x\n"}, "verifier": {"commands": ["true"]}}
    assert problems(sandbox={}, tasks={"inline": [task]}) == {}
    assert list(problems(sandbox={}, tasks={"inline": [task, {"name": "u", "prompt": "p"}]})) == ["spec.sandbox.image"]
