"""The job for a requested run, and the answer from the job's result."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.integrations.harbor_server.plan import (
    PlannedRun,
    RunRefused,
    ServedJob,
    details_of,
    plan_run,
    without_provider,
)
from agent_runtime.integrations.harbor_server.schemas import RunRequest, RunResult
from agent_runtime.integrations.harbor_server.trials import rewards_of
from agent_runtime.sandboxes.base import Evidence, SandboxFailure
from rollout_api.records import ResponseRecord
from rollout_api.tasks import Task, TaskVerifier
from tests.support.harbor_server import job


def served(name: str, agent: dict[str, Any], **spec: Any) -> ServedJob:
    return ServedJob(job(name, agent, **spec), Path("/manifests") / name)


JOBS = {
    "mini-swe-agent": served("mini-swe-agent", {"type": "Command", "command": ["mini"]}, groupSize=4),
    "coding": served("coding", {"type": "Coding", "maxTurns": 9}),
}
TASK = Task(name="t", prompt="Do it.", verifier=TaskVerifier(commands=["true"]))


def planned(**request: Any) -> Any:
    return plan_run("run-1", RunRequest.model_validate(request), TASK, JOBS)


def test_the_agents_name_chooses_the_job_and_without_one_it_is_the_first() -> None:
    places = [planned(agent={"name": "mini_swe_agent"}).base_dir, planned().base_dir]
    assert places == [JOBS["mini-swe-agent"].base_dir] * 2
    coding = planned(agent={"name": "coding"}).job
    assert coding.spec.output.uri == "/manifests/coding/out"
    assert (coding.metadata.name, coding.spec.agent.max_turns, coding.spec.group_size) == ("run-1", 9, 1)


def test_each_run_draws_its_own_answers_and_the_jobs_seed_decides_which() -> None:
    other = served("coding", {"type": "Coding", "maxTurns": 9}, seed=1)
    runs = [(name, jobs) for name in ("run-1", "run-2") for jobs in (JOBS, {"coding": other})]
    request = RunRequest.model_validate({"agent": {"name": "coding"}})
    seeds = [plan_run(name, request, TASK, jobs).job.spec.seed for name, jobs in runs]
    assert len(set(seeds)) == 4


def test_session_of_the_client_is_the_model_and_its_key_is_in_no_manifest() -> None:
    plan = planned(
        agent={"name": "coding", "model_name": "openai/qwen", "llm_proxy_url": "http://proxy/t-1/v1"},
        environment_overrides={"OPENAI_API_KEY": "k-of-it", "OPENAI_BASE_URL": "http://proxy/t-1/v1", "LANG": "C"},
    )

    assert (plan.model.base_url, plan.model.name, plan.model.key) == ("http://proxy/t-1/v1", "qwen", "k-of-it")
    assert "k-of-it" not in plan.job.model_dump_json() + plan.task.model_dump_json()
    assert [(variable.name, variable.value) for variable in plan.task.sandbox.env] == [("LANG", "C")]


@pytest.mark.parametrize("session", [{}, {"llm_proxy_url": "http://proxy/t-1/v1"}])
def test_plan_is_equal_after_it_was_stored(session: dict[str, str]) -> None:
    plan = planned(agent={"name": "coding", "kwargs": {"temperature": 0.3}, **session}, environment_overrides={"A": 1})

    assert PlannedRun.model_validate_json(plan.model_dump_json(exclude_none=True)) == plan


def test_limits_and_resources_are_those_of_the_request() -> None:
    plan = planned(
        agent={"override_timeout_sec": 100, "max_timeout_sec": 150, "kwargs": {"temperature": 0.3, "top_p": 0.9}},
        verifier={"override_timeout_sec": 10},
        timeout_multiplier=2,
        environment_overrides={"override_cpus": 2, "override_memory_mb": 512, "override_gpus": 1},
    )

    assert (plan.task.timeouts.agent_seconds, plan.task.timeouts.verifier_seconds) == (150, 20)
    assert plan.task.sandbox.resources is not None
    assert (plan.task.sandbox.resources.cpu, plan.task.sandbox.resources.memory) == ("2", "512Mi")
    assert (plan.job.spec.sampling.temperature, plan.job.spec.sampling.top_p) == (0.3, 0.9)
    assert [line.split()[0] for line in plan.warnings] == ["environment_overrides.override_gpus"]


def test_usable_environment_settings_are_applied_and_others_reported() -> None:
    plan = planned(
        environment_kwargs={"docker_image": "registry/swe:1", "cpus": 2, "claim_timeout": 90, "registry": "r"}
    )

    assert (plan.task.sandbox.image, plan.task.sandbox.resources.cpu) == ("registry/swe:1", "2")
    assert plan.job.spec.sandbox.start_seconds == 90
    assert [line.split()[0] for line in plan.warnings] == ["environment_kwargs.registry"]


def test_an_environment_cannot_make_a_folder_of_the_server_its_image() -> None:
    for image in ("/", "oci:/srv/images", "../secrets"):
        with pytest.raises(RunRefused, match="is a path of the server"):
            planned(environment_kwargs={"image": image})


def test_a_run_without_verifier_is_not_graded() -> None:
    assert planned(verifier={"disable": True}).task.verifier is None


def test_unknown_agent_is_refused_with_the_served_ones() -> None:
    with pytest.raises(RunRefused, match="mini-swe-agent, coding"):
        planned(agent={"name": "claude_code"})


def turn(number: int, keep: int, prompt: list[int], answer: list[int], logprobs: bool = True) -> ResponseRecord:
    return ResponseRecord(
        time=0.0, turn=number, message={"role": "assistant", "content": "x"}, finish_reason="stop", model="m",
        prompt_keep=keep, prompt_token_ids=prompt, completion_token_ids=answer,
        logprobs=[-1.0] * len(answer) if logprobs else None, seconds=0.0,
    )  # fmt: skip


def test_rollout_details_have_whole_prompts_and_restart_with_conversations() -> None:
    details = details_of([turn(0, 0, [1, 2], [3]), turn(1, 3, [4], [5, 6]), turn(2, 1, [9], [8])])

    assert [detail.prompt_token_ids for detail in details] == [[[1, 2], [1, 2, 3, 4]], [[1, 9]]]
    assert [detail.completion_token_ids for detail in details] == [[[3], [5, 6]], [[8]]]
    assert [detail.logprobs for detail in details] == [[[-1.0], [-1.0, -1.0]], [[-1.0]]]


@given(st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.floats(-3, 3), max_size=3)), st.text(max_size=9))
def test_incomplete_run_of_a_server_never_has_a_reward_of_zero(rewards: Any, error: str) -> None:
    with pytest.raises(SandboxFailure) as lost:
        rewards_of(RunResult(run_id="r", status="error", rewards=rewards, error=error))

    assert lost.value.evidence is Evidence.OUTSIDE, "the policy is not to blame for it"


@pytest.mark.parametrize(
    "error",
    [
        "NonZeroAgentExitCodeError", "ApiRateLimitError", "UnknownApiError", "NetworkConnectionError",
        "VerifierTimeoutError", "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError",
        "SandboxLikelyOutOfMemoryError", "ValidationError",
    ],
)  # fmt: skip
def test_trial_has_failed_when_policy_can_cause_its_error(error: str) -> None:
    assert rewards_of(RunResult(run_id="r", status="error", rewards=None, error=f"{error}: text")) is None


def test_a_reward_is_the_sum_that_pr_83_trains_with() -> None:
    found = rewards_of(RunResult(run_id="r", status="completed", rewards={"a": 0.5, "b": 0.25}))
    assert found == {"a": 0.5, "b": 0.25, "reward": 0.75}
    with pytest.raises(SandboxFailure):
        rewards_of(RunResult(run_id="r", status="completed", rewards=None))


def test_policy_cannot_discard_its_trial_by_a_reward_file_without_rewards() -> None:
    assert rewards_of(RunResult(run_id="r", status="completed", rewards={})) is None


@pytest.mark.parametrize(("told", "reward"), [(1.5, 1.0), (-9.0, -1.0), (math.inf, 1.0), (math.nan, None)])
def test_a_policy_cannot_discard_its_trial_by_a_reward_out_of_range(told: float, reward: float | None) -> None:
    found = rewards_of(RunResult(run_id="r", status="completed", rewards={"a": told}))
    assert (found or {}).get("reward") == reward


@pytest.mark.parametrize("rewards", ['{"reward": null}', '{"reward": 0.5, "style": null}', '{"reward": NaN}'])
def test_policy_cannot_discard_its_trial_by_a_reward_that_json_lacks(rewards: str) -> None:
    """FastAPI writes null for NaN."""
    result = RunResult.model_validate_json(f'{{"run_id": "r", "status": "completed", "rewards": {rewards}}}')
    assert rewards_of(result) is None


def test_model_name_has_no_litellm_provider() -> None:
    assert [without_provider(name) for name in ("openai/qwen", "hosted_vllm/org/m", "org/m")] == [
        "qwen",
        "org/m",
        "org/m",
    ]


def test_an_answer_of_pr_83s_own_server_is_read() -> None:
    text = json.dumps({"run_id": "r", "status": "completed", "rewards": {"reward": 1}, "rollout_details": None,
                       "error": None, "result_uri": "s3://b/r", "else": 1})  # fmt: skip
    assert RunResult.model_validate_json(text).result_uri == "s3://b/r"
