"""Training data of a rollout whose conversation was cut: a branch for each part, with the ids that the model saw."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.token_exact.test_whole_rollouts import exported, truth
from tests.support.vllm_server import Answer, Prompt, ToolCall, VllmStandIn

STEPS = 12


def stepping() -> Any:
    """Return a model that takes this many steps, however its conversation is cut, and writes a summary on request."""
    taken = 0

    def script(prompt: Prompt) -> Answer | None:
        nonlocal taken
        if not prompt.session:
            return None
        if "Write down all that" in prompt.text.rsplit("user", 1)[-1]:
            return Answer(f"{taken} steps were taken.\n")
        if taken == STEPS:
            return Answer(tool_calls=[ToolCall("finish", {"message": "done"})])
        taken += 1
        return Answer(f"Step {taken}.\n", [ToolCall("bash", {"command": f"echo {taken} && ls --all"})])

    return script


@pytest.mark.parametrize("method", ["Truncate", "Summarize"])
async def test_each_cut_starts_a_branch_and_each_branch_is_the_sequence_of_the_server(
    tmp_path: Path, run_one: Any, method: str
) -> None:
    agent = {"tools": ["bash", "finish"], "maxTurns": 60, "context": {"maxMessages": 10, "method": method}}
    async with VllmStandIn(script=stepping()) as server:
        ran = await run_one(server, tmp_path, agent=agent)
        requests = server.served_in("rollout-0")
    assert (ran.result["outcome"], ran.result["stopReason"]) == ("Completed", "Finished")
    sequences = truth(requests)
    assert len(sequences) == ran.result["branches"] > 2
    assert await exported(ran) == sequences
    assert ran.result["tokenForks"] == 0, "no token was encoded anew: the agent itself rewrote its history"
    sampled = sum(mask for sequence in sequences for _, mask, _ in sequence)
    assert sampled == sum(len(request.ids) for request in requests), "every sampled token is trained once"
