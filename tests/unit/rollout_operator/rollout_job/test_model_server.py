"""A job with a ModelServer waits for its model, holds accelerators only while it works, and reports what is missing."""

from typing import Any

import pytest

from rollout_api.on_cluster.resolve import resolve
from rollout_operator.rollout_job.plan import needs_spec
from tests.unit.rollout_operator.rollout_job.scenes import CONFIG, Scene, manifest, report

ENGINE = {"image": "vllm:0.26", "version": "0.27.0"}
OWN = {"model": {"name": "small"}, "engine": ENGINE, "replicas": 3, "toolCallParser": "hermes"}
TOOLS = {"type": "ToolCalling"}
DONE = {"total": 8, "sealed": 8, "outcomes": {"Completed": 8}, "rewardSum": 6.0, "rewarded": 8}


def with_own_server() -> Scene:
    scene = Scene(manifest(agent=TOOLS, model={"server": OWN}))
    scene.settle()
    return scene


def serves(scene: Scene) -> None:
    scene.model_server_says("Ready", "True")
    scene.settle()


def test_runners_are_made_when_their_model_is_ready_and_not_before() -> None:
    scene = with_own_server()
    assert scene.made == ["Secret", "ModelServer"]
    assert scene.condition("Progressing")["reason"] == "WaitingForModel"
    scene.model_server_says("Ready", "False", "1 of 3 servers are ready")
    scene.passes(60)
    scene.settle()
    assert "1 of 3 servers are ready" in scene.condition("Progressing")["message"]
    assert scene.made == ["Secret", "ModelServer"]
    serves(scene)
    assert scene.made[2:] == ["ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "RolloutShard", "Job"]


def test_a_server_that_a_person_named_is_waited_for_also_before_it_exists() -> None:
    scene = Scene(manifest(agent=TOOLS, model={"serverRef": "shared"}))
    scene.settle()
    assert scene.made == ["Secret"]
    assert "ModelServer shared does not exist" in scene.condition("Progressing")["message"]


def test_invalid_server_is_reported_in_the_job() -> None:
    scene = with_own_server()
    scene.model_server_says("Invalid", "True", "spec.cache: is missing")
    scene.passes(60)
    scene.settle()
    assert "spec.cache: is missing" in scene.condition("Ready")["message"]


def test_own_model_server_is_deleted_when_the_job_ends() -> None:
    scene = with_own_server()
    serves(scene)
    scene.runner_ends(0, "Completed", **DONE)
    scene.settle()
    assert scene.condition("Succeeded")["status"] == "True"
    assert scene.model_server is None


def test_suspended_job_releases_accelerators_and_keeps_its_policy() -> None:
    scene = with_own_server()
    serves(scene)
    assert scene.model_server is not None
    scene.model_server["spec"]["policy"] = {"version": 4, "uri": "s3://p/4"}
    scene.job["spec"]["suspend"] = True
    scene.settle()
    assert scene.model_server["spec"]["replicas"] == 0
    scene.job["spec"]["suspend"] = False
    scene.settle()
    assert scene.model_server["spec"]["replicas"] == 3
    assert scene.model_server["spec"]["policy"] == {"version": 4, "uri": "s3://p/4"}


def test_own_model_server_keeps_its_policy_when_runners_fail_and_a_person_resumes() -> None:
    scene = with_own_server()
    serves(scene)
    assert scene.model_server is not None
    scene.model_server["spec"]["policy"] = {"version": 7, "uri": "s3://p/7"}
    for _ in range(10):
        scene.runner_fails()
        scene.settle()
    assert scene.condition("Failed")["reason"] == "RunnersFail"
    for pod in scene.runners:
        scene.cache.remove("Pod", "team", pod["metadata"]["name"])
    scene.settle()
    assert scene.model_server["spec"]["replicas"] == 0, "its accelerators are free"
    scene.passes(3600)
    scene.settle()
    for suspend in (True, False):
        scene.job["spec"]["suspend"] = suspend
        scene.settle()
        assert scene.model_server["spec"]["replicas"] == (0 if suspend else 3)
    assert scene.model_server["spec"]["policy"] == {"version": 7, "uri": "s3://p/7"}
    serves(scene)
    assert len(scene.runners) == 1


@pytest.mark.parametrize("suspended", [False, True])
def test_own_model_server_that_was_deleted_is_created_again_while_the_job_needs_it(suspended: bool) -> None:
    scene = with_own_server()
    serves(scene)
    scene.reports(report(0, sealed=3))
    scene.settle()
    scene.job["spec"]["suspend"] = suspended
    scene.settle()
    scene.cache.remove("ModelServer", "team", "sums-model")
    scene.settle()
    assert (scene.model_server is None) == suspended, "a suspended job needs no accelerators"
    scene.job["spec"]["suspend"] = False
    scene.settle()
    assert scene.model_server is not None
    assert scene.told().count("ModelServerDeleted") == 1
    serves(scene)
    assert len(scene.runners) == 1
    assert scene.condition("Progressing")["reason"] == "RolloutsRunning"


def test_own_model_server_is_not_created_again_when_the_job_has_ended() -> None:
    scene = with_own_server()
    serves(scene)
    scene.runner_ends(0, "Completed", **DONE)
    scene.settle()
    assert scene.model_server is None
    assert not needs_spec(scene.observe())


def test_a_job_that_is_resumed_has_no_runners_that_wait_for_accelerators() -> None:
    scene = with_own_server()
    serves(scene)
    scene.job["spec"]["suspend"] = True
    scene.settle()
    scene.model_server_says("Ready", "False", "spec.replicas is 0")
    scene.job["spec"]["suspend"] = False
    scene.settle()
    assert scene.batch_job is not None
    assert scene.batch_job["spec"]["suspend"]
    assert scene.condition("Progressing")["reason"] == "WaitingForModel"
    serves(scene)
    assert not scene.batch_job["spec"]["suspend"]


def test_number_of_servers_set_by_a_person_is_kept() -> None:
    scene = with_own_server()
    serves(scene)
    assert scene.model_server is not None
    scene.model_server["spec"]["replicas"] = 7
    scene.reports(report(0))
    scene.settle()
    assert scene.model_server["spec"]["replicas"] == 7


def test_the_server_of_an_earlier_job_of_that_name_is_not_used() -> None:
    scene = Scene(manifest(agent=TOOLS, model={"server": OWN}))
    old = {"controller": True, "kind": "RolloutJob", "name": "sums", "uid": "an-earlier-one"}
    metadata = {"name": "sums-model", "namespace": "team", "uid": "old", "ownerReferences": [old]}
    ready = {"conditions": [{"type": "Ready", "status": "True", "reason": "ServersReady"}]}
    scene.cache.put("ModelServer", {"metadata": metadata, "spec": OWN, "status": ready})
    assert scene.observe().model_server is None


def problems(server: dict[str, Any] | None = None, **spec: Any) -> dict[str, str]:
    return {problem.path: problem.message for problem in resolve(manifest(**spec), CONFIG, server).problems}


NO_PARSER = {key: value for key, value in OWN.items() if key != "toolCallParser"}


@pytest.mark.parametrize("agent", ["ToolCalling", "Coding", "SWE"])
def test_agent_with_tools_needs_a_server_with_a_parser(agent: str) -> None:
    found = problems({"spec": NO_PARSER}, agent={"type": agent}, model={"serverRef": "shared"})
    assert list(found) == ["spec.model.serverRef"]
    assert "spec.toolCallParser" in found["spec.model.serverRef"]


@pytest.mark.parametrize("agent", [{"type": "ReAct"}, {"type": "ToolCalling", "tools": []}])
def test_an_agent_that_calls_none_needs_none(agent: dict[str, Any]) -> None:
    assert problems({"spec": NO_PARSER}, agent=agent, model={"serverRef": "shared"}) == {}
    assert problems({"spec": NO_PARSER}, agent=agent, model={"serverRef": "shared"}) == {}


def test_error_of_the_server_names_the_jobs_own_field() -> None:
    found = problems(agent=TOOLS, model={"server": {**OWN, "podTemplate": {"spec": {"hostNetwork": True}}}})
    assert list(found) == ["spec.model.server.podTemplate.spec.hostNetwork"]


def test_name_too_long_for_its_servers_is_refused() -> None:
    job = manifest(agent=TOOLS, model={"server": OWN})
    job["metadata"]["name"] = "j" * 50
    [problem] = resolve(job, CONFIG).problems
    assert (problem.path, "4 characters too long" in problem.message) == ("metadata.name", True)
