"""The engine as verl's workers use it, without verl: real sandboxes, and a policy in this process instead of its
servers.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime.engine.groups import JobAborted
from agent_runtime.engine.session import FinishedGroup
from agent_runtime.integrations.verl.job import Kind
from agent_runtime.integrations.verl.model import LLMClientModel
from agent_runtime.integrations.verl.rollouts import Rollouts, _OpenJob
from agent_runtime.integrations.verl.rows import Row, read_row
from agent_runtime.models.base import TokenPrefix
from rollout_api.records import Message, Outcome
from tests.support.vllm_server import Answer, Prompt, ToolCall, VllmStandIn

pytestmark = pytest.mark.full

TRAIN, VALIDATE = Kind(2, validate=False), Kind(1, validate=True)


@dataclass
class Output:
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None = "completed"
    extra_fields: Mapping[str, Any] = field(default_factory=lambda: {"global_steps": 1})
    routed_experts: Any = None


class Letters:
    """A token is a character; the policy's only answer is its text."""

    stop_token_ids = ()

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefix: TokenPrefix | None
    ) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    async def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        return "".join(map(chr, ids)), []


class Policy:
    """Answers `ok` while its server is up."""

    def __init__(self) -> None:
        self.up = True
        self.temperatures: list[float] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        self.temperatures.append(sampling_params["temperature"])
        if not self.up:
            raise RuntimeError("the replica is gone")
        return Output([ord(letter) for letter in "ok"], [-1.0, -1.0])

    def model(self) -> LLMClientModel:
        return LLMClientModel(self.generate, Letters(), context=512)


def row(number: int, **task: Any) -> Row:
    fields = {"uid": f"uid-{number}", "raw_prompt": [{"role": "user", "content": "Say ok."}], "index": number}
    return read_row(fields | {"extra_info": {"task": task}})


@pytest.fixture
def policy() -> Policy:
    return Policy()


def config(folder: Path, **custom: Any) -> dict[str, Any]:
    """Return the part of verl's configuration that the engine reads."""
    sampled = {"temperature": 0.5, "top_p": 1.0, "top_k": -1}
    rollout = sampled | {
        "val_kwargs": sampled | {"temperature": 0.0},
        "prompt_length": 4096,
        "response_length": 256,
        "custom": {
            "agent_rollouts": {"attempts": {"limit": 1}, "sandbox": {"workspaces": {"perSandbox": 64}}, **custom}
        },
    }
    return {
        "actor_rollout_ref": {"rollout": rollout},
        "trainer": {"default_local_dir": str(folder), "experiment_name": "e"},
    }


@pytest.fixture
async def rollouts(tmp_path: Path, policy: Policy) -> AsyncIterator[Rollouts]:
    running = Rollouts(config(tmp_path, agent={"tools": []}), policy.model)
    yield running
    await running.close()


async def test_group_is_returned_complete_with_the_tokens_of_each_member(rollouts: Rollouts) -> None:
    members = await rollouts.run(row(0, verifier={"commands": ["true"]}), TRAIN)

    assert [member.result.member for member in members] == [0, 1]
    for member in members:
        assert member.result.reward == 1.0
        assert "uid-0" in member.result.tags
        (sample,) = member.samples
        assert sample.response_ids == [ord("o"), ord("k")]
        assert sample.response_mask == [1, 1]
        assert (sample.min_version, sample.max_version) == (1, 1)


async def test_rollouts_see_no_files_of_the_dataset(tmp_path: Path, policy: Policy) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # every workspace has a /tmp of its own
        file = Path(folder, "train.parquet")
        file.write_text("hidden tests")
        data = {"train_files": [str(file)], "val_files": "nowhere.parquet"}
        running = Rollouts({**config(tmp_path, agent={"tools": []}), "data": data}, policy.model)
        try:
            (member,) = await running.run(row(0, setup=[f"! cat {file}"]), VALIDATE)
        finally:
            await running.close()
    assert member.result.outcome is Outcome.COMPLETED, member.result.message


async def test_training_and_validation_are_jobs_of_their_own_with_their_own_sampling(
    rollouts: Rollouts, policy: Policy
) -> None:
    (validated,) = await rollouts.run(row(0), VALIDATE)
    trained = await rollouts.run(row(0), TRAIN)

    assert (validated.result.mode, [member.result.mode for member in trained]) == ("Eval", ["Train", "Train"])
    assert policy.temperatures == [0.0, 0.5, 0.5]


async def test_lost_server_loses_members_and_then_ends_the_work_with_its_reason(
    rollouts: Rollouts, policy: Policy
) -> None:
    policy.up = False
    lost = [member for number in range(9) for member in await rollouts.run(row(number), TRAIN)]

    assert {member.result.outcome for member in lost} == {Outcome.INFRA_FAILED}
    assert all(member.is_lost and not member.samples for member in lost)
    assert "the replica is gone" in lost[0].result.message
    rollouts.raise_failure()
    with pytest.raises(JobAborted, match="lost to infrastructure"):
        await rollouts.run(row(9), TRAIN)  # the 20th lost one
    with pytest.raises(JobAborted):
        rollouts.raise_failure()
    with pytest.raises(JobAborted):
        await rollouts.run(row(10), TRAIN)


def writing(prompt: Prompt) -> Answer:
    """Answer as the model server: a command that writes the word, then the end."""
    if prompt.turn:
        return Answer("Done.")
    return Answer("Writing.", [ToolCall("bash", {"command": "echo apple > out.txt"})])


async def test_model_server_can_answer_instead_of_verls_own(tmp_path: Path) -> None:
    async with VllmStandIn(script=writing) as server:
        endpoint = {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy"}}
        served = Rollouts(config(tmp_path, model=endpoint, agent={"tools": ["bash"]}), None)
        (member, _) = await served.run(row(0, verifier={"commands": ["grep -qx apple out.txt"]}), TRAIN)
        await served.close()
        asked = {(tuple(request.prompt_ids), tuple(request.ids)) for request in server.served}

    (sample,) = member.samples
    assert member.result.reward == 1.0
    ids = [*sample.prompt_ids, *sample.response_ids]
    first = sample.response_mask.index(0)
    assert (tuple(sample.prompt_ids), tuple(sample.response_ids[:first])) in asked
    last = len(ids) - sample.response_mask[::-1].index(0)
    assert (tuple(ids[:last]), tuple(ids[last:])) in asked


async def test_cancelled_caller_of_a_group_ends_no_other_group() -> None:
    """The group ends between the cancellation of its future and the end of its caller."""
    first, second = (FinishedGroup(number, row(number).task.name, None, ()) for number in range(2))

    class Session:
        def __init__(self) -> None:
            self.submitted = 0

        async def submit(self, task: Any, label: str) -> int:
            self.submitted += 1
            return self.submitted - 1

        async def __aiter__(self) -> AsyncIterator[FinishedGroup]:
            while self.submitted < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            calls[0].cancel()
            yield first
            yield second

    job = _OpenJob(cast(Any, Session()))
    calls = [asyncio.create_task(job.run(row(number))) for number in range(2)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1] is second
    job.raise_failure()
