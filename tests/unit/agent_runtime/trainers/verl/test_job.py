"""verl's settings as a job: its `custom` dict is the spec, and fields that verl determines cannot be set twice."""

from typing import Any

import pytest

from agent_runtime.integrations.verl.job import Kind, rollout_job, uses_verls_client
from rollout_api.manifest import ManifestError
from rollout_api.rollout_job import Mode


def config(**custom: Any) -> dict[str, Any]:
    rollout = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "val_kwargs": {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
        "custom": {"agent_rollouts": custom, "of_others": {"x": 1}} if custom else None,
    }
    return {
        "actor_rollout_ref": {"rollout": rollout},
        "trainer": {"default_local_dir": "checkpoints/x", "experiment_name": "My Run (2)"},
    }


def test_the_custom_dict_is_the_spec_of_the_job() -> None:
    job = rollout_job(
        config(agent={"maxTurns": 7}, attempts={"limit": 2}), Kind(4, validate=False, system_prompt="Hi.")
    )

    assert job.metadata.name == "my-run-2-train"
    assert (job.spec.agent.max_turns, job.spec.agent.system_prompt, job.spec.attempts.limit) == (7, "Hi.", 2)
    assert (job.spec.mode, job.spec.group_size) == (Mode.TRAIN, 4)
    assert job.spec.output.uri == "checkpoints/x/rollouts"


@pytest.mark.parametrize(
    ("kind", "sampled"),
    [
        (Kind(1, validate=False), (0.7, 0.9, 20)),
        (Kind(1, validate=True), (0.0, 1.0, -1)),
        (Kind(1, validate=False, greedy=True), (0.0, 1.0, -1)),
    ],
)
def test_training_validation_and_greedy_baselines_sample_as_verl_says(
    kind: Kind, sampled: tuple[float, float, int]
) -> None:
    sampling = rollout_job(config(sampling={"maxTokens": 64}), kind).spec.sampling

    assert (sampling.temperature, sampling.top_p, sampling.extra["top_k"]) == sampled
    assert sampling.max_tokens == 64


def test_all_errors_of_the_custom_dict_are_reported_under_verls_names() -> None:
    wrong = config(groupSize=4, sampling={"temperature": 1.0}, agent={"maxTurn": 7}, atempts={})

    with pytest.raises(ManifestError) as caught:
        rollout_job(wrong, Kind(1, validate=False))

    told = str(caught.value)
    for field in ("groupSize", "sampling.temperature", "agent.maxTurn", "atempts"):
        assert f"actor_rollout_ref.rollout.custom.agent_rollouts.{field}" in told


def test_model_in_the_custom_dict_answers_instead_of_verls_servers() -> None:
    endpoint = {"endpoint": {"baseURL": "http://models:8000/v1", "name": "qwen"}}

    assert uses_verls_client(config(agent={}))
    assert not uses_verls_client(config(model=endpoint))
    job = rollout_job(config(model=endpoint), Kind(1, validate=False))
    assert job.spec.model is not None
    assert job.spec.model.endpoint is not None


def test_router_replay_with_a_model_of_ours_needs_routed_experts() -> None:
    endpoint = {"endpoint": {"baseURL": "http://10.0.0.1:8000/v1", "name": "policy"}}
    for model, is_complete in ((None, True), (endpoint, False), (endpoint | {"routedExperts": {}}, True)):
        given = config(**({"agent": {"maxTurns": 7}} | ({"model": model} if model else {})))
        given["actor_rollout_ref"]["rollout"]["enable_rollout_routing_replay"] = True
        if is_complete:
            rollout_job(given, Kind(1, validate=False))
            continue
        with pytest.raises(ManifestError, match=r"model\.routedExperts: is needed for .*enable_rollout_routing_replay"):
            rollout_job(given, Kind(1, validate=False))
