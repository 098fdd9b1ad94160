"""Whole jobs on vLLM itself and on its stand-in: a trainer's data, compared with what the server read and sampled."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client
from tests.integration.vllm.conftest import ASK_SECONDS, MODEL, InferenceServer
from tests.integration.vllm.recorder import Recorder, extends, sequences
from tests.support.vllm_environment import forward_pass

TURNS = 128
TOKENS = 8
"""Tokens of each answer."""
MEMBERS = 2
TOLERANCE = 1e-2


def job(url: str, folder: Path, turns: int, *, model: Mapping[str, Any] | None = None, **sampling: Any) -> RolloutJob:
    environment = {"id": "tests.support.talk:Talk", "maxSteps": turns}
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "talk"},
            "spec": {
                "mode": "Train",
                "groupSize": MEMBERS,
                "seed": 3,
                "tasks": {"inline": [{"name": "t", "prompt": "{observation}", "environment": environment}]},
                "agent": {"type": "Environment", "maxTurns": turns},
                "model": {"endpoint": {"baseURL": f"{url}/v1", "name": MODEL, "callSeconds": ASK_SECONDS}}
                | dict(model or {}),
                "sampling": {"temperature": 1.0, "maxTokens": TOKENS, "extra": sampling},
                "attempts": {"limit": 1},
                "output": {"uri": str(folder)},
            },
        }
    )


async def run(job: RolloutJob) -> RunReader:
    groups = [group async for group in Client().run(job)]
    assert len(groups) == 1
    return await open_run(Store.open(job.spec.output.uri or "", {}), "talk")


async def assert_records_what_was_sampled(reader: RunReader, recorder: Recorder, member: int) -> int:
    """Return the number of prompts that do not extend the sequence before them."""
    result = reader.results()[member]
    answers = recorder.of(f"rollout-{member}")
    assert result.outcome == "Completed", result
    assert len(answers) == result.turns
    branches = await reader.tokens(member)
    assert all(branch.logprobs is not None for branch in branches)
    recorded = [list(zip(b.token_ids, b.mask, b.logprobs or [], strict=True)) for b in branches]
    assert recorded == sequences(answers)
    mismatches = sum(not extends(later, earlier) for earlier, later in itertools.pairwise(answers))
    assert (result.token_forks, result.branches) == (mismatches, mismatches + 1)
    return mismatches


async def test_128_turns_have_no_mismatch(recorder: Recorder, tmp_path: Path) -> None:
    reader = await run(job(recorder.url, tmp_path, TURNS))
    for member in range(MEMBERS):
        result = reader.results()[member]
        assert (result.turns, result.token_capture) == (TURNS, "Tokens")
        assert await assert_records_what_was_sampled(reader, recorder, member) == 0
    assert reader.stats()["tokenForks"] == 0


async def test_plain_chat_counts_each_mismatch_as_a_fork(recorder: Recorder, tmp_path: Path) -> None:
    recorder.hidden = frozenset({"/render", "/derender", "/generate"})
    reader = await run(job(recorder.url, tmp_path, 24))
    forks = [await assert_records_what_was_sampled(reader, recorder, member) for member in range(MEMBERS)]
    assert [result.token_capture for result in reader.results()] == ["Chat"] * MEMBERS
    assert min(forks) > 0, "no answer encodes to other ids than were sampled"
    assert reader.stats()["tokenForks"] == sum(forks)


async def test_recorded_logprobs_are_those_of_transformers(
    server: InferenceServer, recorder: Recorder, tmp_path: Path
) -> None:
    if not server.real:
        pytest.skip("the stand-in has no weights")
    reader = await run(job(recorder.url, tmp_path, 16))
    branches = [branch for member in range(MEMBERS) for branch in await reader.tokens(member)]
    computed = forward_pass(server.checkpoint(0), [branch.token_ids for branch in branches])
    differences = [
        abs(mine - theirs)
        for branch, logprobs in zip(branches, computed, strict=True)
        for mine, theirs, mask in zip(branch.logprobs or [], logprobs, branch.mask, strict=True)
        if mask
    ]
    assert len(differences) > 16 * MEMBERS
    assert max(differences) < TOLERANCE
