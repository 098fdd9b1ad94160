"""Training data of a long rollout with tools, compared with the server's own log of what it read and sampled."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.session import RolloutSession
from agent_runtime.models.base import ModelConfigError
from agent_runtime.recording.reader import NoSuchRun, sealed_tokens
from rollout_api.model import ModelSpec
from rollout_api.rollout_job import RolloutJob
from tests.support.dummy_sandboxes import DummyProvider
from tests.support.vllm_server import Answer, Faults, Prompt, Request, ToolCall, VllmStandIn

TURNS = 128


def working(prompt: Prompt) -> Answer:
    """Return text and a tool call for every turn, in a form that a second rendering would change."""
    if prompt.turn == TURNS - 1:
        return Answer("All is counted.\n", [ToolCall("finish", {"message": "done"})])
    command = f"echo 'Schritt für Schritt: {prompt.turn}' && ls --all"
    return Answer(f"Step {prompt.turn}: let me look around first.\n", [ToolCall("bash", {"command": command})])


def done(prompt: Prompt) -> Answer:
    return Answer(tool_calls=[ToolCall("finish", {"message": "done"})])


def extends(later: Request, earlier: Request) -> bool:
    seen = [*earlier.prompt_ids, *earlier.ids]
    return later.prompt_ids[: len(seen)] == seen


def truth(requests: list[Request]) -> list[list[tuple[int, int, float]]]:
    """Return (id, mask, logprob) of each sequence that the server saw. A prompt that does not continue the last one
    begins another.
    """
    sequences: list[list[tuple[int, int, float]]] = []
    for number, request in enumerate(requests):
        goes_on = number > 0 and extends(request, requests[number - 1])
        if not goes_on:
            sequences.append([])
        known = len(sequences[-1])
        sequences[-1] += [(token, 0, 0.0) for token in request.prompt_ids[known:]]
        sequences[-1] += [(token, 1, logprob) for token, logprob in zip(request.ids, request.logprobs, strict=True)]
    return sequences


async def exported(ran: Any) -> list[list[tuple[int, int, float]]]:
    branches = await ran.run.tokens(0)
    assert await sealed_tokens(ran.run.store, 0) == branches, "a trainer that follows a stream reads the same"
    with pytest.raises(NoSuchRun, match=r"rollout 1 of .* is not sealed"):
        await sealed_tokens(ran.run.store, 1)
    assert all(branch.logprobs is not None for branch in branches)
    return [list(zip(b.token_ids, b.mask, b.logprobs, strict=True)) for b in branches]


async def test_128_turns_are_one_sequence_of_exactly_the_prompted_and_sampled_ids(tmp_path: Path, run_one: Any) -> None:
    async with VllmStandIn(script=working, max_model_len=200_000) as server:
        ran = await run_one(server, tmp_path)
        requests = server.served_in("rollout-0")
    assert (ran.result["outcome"], ran.result["stopReason"]) == ("Completed", "Finished")
    assert len(requests) == TURNS == ran.result["turns"]
    assert {request.route for request in requests} == {"/inference/v1/generate"}
    assert all(extends(later, earlier) for earlier, later in pairwise(requests))
    assert (ran.result["tokenCapture"], ran.result["tokenForks"], ran.result["branches"]) == ("Tokens", 0, 1)
    assert await exported(ran) == truth(requests)
    stored = sum(
        len(record.prompt_token_ids or []) + len(record.completion_token_ids or [])
        for record in await ran.run.records(0)
        if record.type == "response"
    )
    assert stored == len(requests[-1].prompt_ids) + len(requests[-1].ids), "the journal has each token once"


async def test_plain_chat_counts_mismatches_as_forks_and_trains_sampled_tokens(tmp_path: Path, run_one: Any) -> None:
    async with VllmStandIn(script=working, max_model_len=200_000, scale_out=False) as server:
        ran = await run_one(server, tmp_path)
        requests = server.served_in("rollout-0")
    assert len(requests) == TURNS
    mismatches = sum(not extends(later, earlier) for earlier, later in pairwise(requests))
    assert mismatches > TURNS / 2, "the stand-in's tokenizer must have given other ids for what was sampled"
    assert (ran.result["tokenCapture"], ran.result["tokenForks"]) == ("Chat", mismatches)
    assert ran.result["branches"] == mismatches + 1
    assert await exported(ran) == truth(requests)
    assert ran.run.stats()["tokenForks"] == mismatches


async def test_training_on_a_model_without_ids_is_refused_before_the_first_rollout(
    tmp_path: Path, run_one: Any
) -> None:
    async with VllmStandIn(script=done, faults=Faults(no_token_ids=True)) as server:
        with pytest.raises(
            ModelConfigError,
            match=r"mode: Train needs token ids.*set mode: Eval \(the default is Train\).*allowTextOnly: true",
        ):
            await run_one(server, tmp_path)
        assert not server.served_in("rollout-0")
        ran = await run_one(server, tmp_path, model={"allowTextOnly": True})
    assert (ran.result["outcome"], ran.result["tokenCapture"]) == ("Completed", "TextOnly")
    assert await ran.run.tokens(0) == []


async def test_ids_without_logprobs_are_refused_for_training_too(tmp_path: Path, run_one: Any) -> None:
    async with VllmStandIn(faults=Faults(no_logprobs=True)) as server:
        with pytest.raises(ModelConfigError, match="token ids with logprobs"):
            await run_one(server, tmp_path)


async def test_logprobs_that_go_missing_later_are_infrastructure_and_never_reward_0(
    tmp_path: Path, run_one: Any
) -> None:
    async with VllmStandIn() as server:

        def switch_off(prompt: Prompt) -> Answer | None:
            server.faults.no_logprobs = True
            return working(prompt)

        server.script = lambda prompt: switch_off(prompt) if prompt.session else None
        ran = await run_one(server, tmp_path, completion={"maxInfraFailureFraction": 1.0})
    assert (ran.result["outcome"], ran.result["reason"]) == ("InfraFailed", "NoLogprobs")
    assert "reward" not in ran.result or ran.result["reward"] is None


@pytest.mark.parametrize("scale_out", [True, False])
async def test_prompt_over_the_context_completes_the_rollout_with_context_exceeded(
    scale_out: bool, tmp_path: Path, run_one: Any
) -> None:
    async with VllmStandIn(script=working, max_model_len=1000, scale_out=scale_out) as server:
        task = {"name": "t", "prompt": "Count to ten. " * 500, "verifier": {"commands": ["grade"]}}
        ran = await run_one(server, tmp_path, tasks={"inline": [task]})
        # Only the test request, which shows that the server does not refuse everything.
        assert [request.finish for request in server.served_in("rollout-0")] == ["length"]
    assert (ran.result["outcome"], ran.result["stopReason"]) == ("Completed", "ContextExceeded")


@pytest.mark.parametrize("scale_out", [True, False])
async def test_answer_is_limited_by_the_remaining_context_and_trained_up_to_there(
    scale_out: bool, tmp_path: Path, run_one: Any
) -> None:
    async with VllmStandIn(script=working, max_model_len=1500, scale_out=scale_out) as server:
        ran = await run_one(server, tmp_path)
        requests = server.served_in("rollout-0")
    assert ran.result["outcome"] == "Completed"
    assert requests[-1].finish == "length"
    assert len(requests[-1].prompt_ids) + len(requests[-1].ids) == 1500
    assert await exported(ran) == truth(requests)


async def test_a_tool_call_cut_off_in_its_json_is_a_format_error_that_the_policy_can_mend(
    tmp_path: Path, run_one: Any
) -> None:
    async with VllmStandIn(script=working, faults=Faults(cut_tool_call=True)) as server:
        ran = await run_one(server, tmp_path)
        requests = server.served_in("rollout-0")
    assert ran.result["outcome"] == "Completed"
    assert ran.result["stopReason"] in ("ToolFormat", "Finished")
    assert await exported(ran) == truth(requests)


async def test_server_without_a_tool_parser_is_reported_with_the_option_to_set(tmp_path: Path, run_one: Any) -> None:
    async with VllmStandIn(script=working, tool_parser=False) as server:
        ran = await run_one(server, tmp_path, completion={"maxInfraFailureFraction": 1.0})
    assert (ran.result["outcome"], ran.result["reason"]) == ("InfraFailed", "NoToolParser")
    assert "--tool-call-parser" in ran.result["message"]


async def test_a_trainer_cannot_go_over_to_a_model_without_ids_in_the_middle_of_a_job(tmp_path: Path) -> None:
    async with VllmStandIn() as exact, VllmStandIn(faults=Faults(no_token_ids=True)) as text:
        manifest = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "session"},
            "spec": {
                "mode": "Train",
                "tasks": {"stream": {}},
                "model": {"endpoint": {"baseURL": f"{exact.url}/v1", "name": "policy"}},
                "output": {"uri": str(tmp_path)},
            },
        }
        job = RolloutJob.model_validate(manifest)
        other = ModelSpec.model_validate({"endpoint": {"baseURL": f"{text.url}/v1", "name": "policy"}})
        provider = DummyProvider("token-exact-session")
        async with RolloutSession(job, base_dir=tmp_path, provider=provider) as session:
            with pytest.raises(ModelConfigError, match="allowTextOnly"):
                await session.use_model(other)


def endless(prompt: Prompt) -> str:
    return "ok" if "Say ok" in prompt.text else "and again, " * 3000


async def test_rollout_whose_first_answer_never_ends_is_graded(tmp_path: Path, run_one: Any) -> None:
    async with VllmStandIn(scale_out=False, tokens_per_second=50, script=endless) as server:
        model = {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy", "callSeconds": 3}}
        ran = await run_one(server, tmp_path, model=model, sampling={})
    assert (ran.result["outcome"], ran.result["stopReason"]) == ("Completed", "AgentError"), ran.result
    assert [failed["reason"] for failed in ran.result["failedAttempts"]] == ["Timeout"]
