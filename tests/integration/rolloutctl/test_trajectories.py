"""A program that reads its rollouts gets the tokens to train on, and recognises lost rollouts."""

from pathlib import Path
from typing import Any

import pytest

from agent_runtime.models.base import ModelError, ModelReply, ModelRequest
from agent_runtime.recording.reader import NoSuchRun
from rollout_api.base import API_VERSION
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client, Trajectory


class Model:
    """Calculates once, with token ids. The calls of one task fail."""

    name, token_capture = "m", "Chat"

    async def complete(self, request: ModelRequest) -> ModelReply:
        if request.task == "lost":
            raise ModelError("Unreachable", "the server is down")
        function = {"name": "calculator", "arguments": '{"expression": "1+1"}'}
        calls = [{"id": "a", "type": "function", "function": function}]
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
        first = ModelReply(message, "tool_calls", prompt_token_ids=[1, 2], completion_token_ids=[3], logprobs=[-0.5])
        second = ModelReply(
            {"role": "assistant", "content": "2"},
            "stop",
            prompt_token_ids=[1, 2, 3, 4],
            completion_token_ids=[5],
            logprobs=[-0.25],
        )
        return second if request.messages[-1]["role"] == "tool" else first

    async def check(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def job(tmp_path: Path) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "sums"},
            "spec": {
                "model": {"function": "unused:unused"},
                "agent": {"tools": ["calculator"]},
                "attempts": {"limit": 1},
                "tasks": {"inline": [{"name": "sum", "prompt": "1+1"}, {"name": "lost", "prompt": "1+1"}]},
                "output": {"uri": str(tmp_path / "out")},
            },
        }
    )


async def test_trajectories_have_masked_tokens_and_tell_lost_from_bad(job: RolloutJob) -> None:
    client = Client(model=Model())
    async for _ in client.run(job):
        pass
    trajectories: list[Trajectory] = [trajectory async for trajectory in client.trajectories(job)]
    done, lost = trajectories
    (branch,) = done.tokens
    assert (branch.token_ids, branch.mask, branch.logprobs) == (
        [1, 2, 3, 4, 5],
        [0, 0, 1, 0, 1],
        [0, 0, -0.5, 0, -0.25],
    )
    assert done.get_final_response() == "2"
    assert [call.tool_args for call in done.get_tool_calls()] == [{"expression": "1+1"}]
    assert (done.is_completed, lost.is_completed) == (True, False)
    assert lost.get_total_reward() is None
    assert lost.metadata["reason"] == "Unreachable"
    assert Trajectory.from_dict(done.to_dict()) == done


async def test_a_job_that_never_ran_has_no_trajectories(job: RolloutJob) -> None:
    with pytest.raises(NoSuchRun, match="no run of 'sums'"):
        await anext(Client().trajectories(job))
