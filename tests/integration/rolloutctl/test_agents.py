"""One agent on one prompt, in Python: what comes back, and what is recorded."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.agents.base import AgentContext
from rolloutctl.agents import GeneralAgent, RolloutFailed, create_agent, create_llm_client, create_tool
from tests.support.vllm_server import Answer, VllmStandIn

KEY = "sk-nobody-may-read-this"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
async def server() -> AsyncIterator[VllmStandIn]:
    async with VllmStandIn(script=lambda prompt: Answer("Final Answer: 42") if prompt.session else None) as standing:
        yield standing


def says(*answers: str) -> Any:
    """A model that says one after another."""
    left = list(answers)

    async def generate(messages: Sequence[Mapping[str, Any]], temperature: float = 0.0) -> str:
        return left.pop(0)

    return generate


async def test_tokens_of_a_server_are_recorded_and_its_key_is_not(folder: Path, server: VllmStandIn) -> None:
    client = create_llm_client(KEY, f"{server.url}/v1", "policy")
    trajectory = await GeneralAgent().run_trajectory("What is 6 * 7?", client.generate, "Six times seven!")
    assert trajectory.get_final_response() == "42"
    assert (trajectory.request_id, trajectory.get_total_reward()) == ("Six times seven!", None)
    (branch,) = trajectory.tokens
    (request,) = server.served_in("rollout-0")
    assert branch.token_ids[-len(request.ids) :] == request.ids
    assert Path(trajectory.metadata["uri"]).parent == folder / "out"
    assert Path(trajectory.metadata["uri"]).name.startswith("six-times-seven-")
    recorded = [path for path in folder.rglob("*") if path.is_file()]
    assert recorded
    assert not any(KEY.encode() in path.read_bytes() for path in recorded)
    assert KEY not in repr(client)


async def test_trajectories_of_one_agent_run_side_by_side_and_each_gets_its_own(server: VllmStandIn) -> None:
    async def echo(prompt: str) -> str:
        trajectory = await agent.run_trajectory(prompt, generate, "the-same-id")
        return trajectory.get_final_response()

    async def generate(messages: Sequence[Mapping[str, Any]]) -> str:
        await asyncio.sleep(0.1)
        return f"Final Answer: {messages[-1]['content']}"

    agent = GeneralAgent()
    prompts = [f"number {number}" for number in range(4)]
    assert await asyncio.gather(*map(echo, prompts)) == prompts


async def test_a_tool_that_is_named_so_ends_the_work_and_finish_alone_does_not(folder: Path) -> None:
    async def hand_in(answer: str) -> str:
        """Hand the answer in."""
        return f"handed in: {answer}"

    agent = GeneralAgent(termination_tool_names=["hand_in"])
    agent.set_tools({"hand_in": hand_in, "finish": create_tool("Finish")})
    model = says(
        'Action: finish\nAction Input: {"message": "no"}', 'Action: hand_in\nAction Input: {"answer": "42"}', "unasked"
    )
    trajectory = await agent.run_trajectory("p", model, "t")
    assert [call.tool_name for call in trajectory.get_tool_calls()] == ["finish", "hand_in"]
    assert (trajectory.get_final_response(), trajectory.metadata["turns"]) == ("handed in: 42", 2)


async def test_rounds_are_model_calls_and_the_sandbox_is_as_asked_for(folder: Path) -> None:
    agent = GeneralAgent(tool_names=["calculator"], max_rounds=2, sandbox={"workspaces": {"mode": "Plain"}})
    action = 'Action: calculator\nAction Input: {"expression": "1"}'
    trajectory = await agent.run_trajectory("p", says(action, action, action), "t")
    assert (trajectory.metadata["stopReason"], trajectory.metadata["turns"]) == ("MaxTurns", 2)
    assert trajectory.metadata["sandbox"]["mode"] == "Plain"


async def test_a_model_that_fails_raises_with_what_there_was_until_then(folder: Path) -> None:
    agent = GeneralAgent(tool_names=["calculator"])
    model = says('Thought: so\nAction: calculator\nAction Input: {"expression": "1"}')
    with pytest.raises(RolloutFailed, match=r"t: FunctionFailed: .*generate raised IndexError") as failure:
        await agent.run_trajectory("p", model, "t")
    trajectory = failure.value.trajectory
    assert (trajectory.is_completed, trajectory.get_total_reward()) == (False, None)
    assert [step.content for step in trajectory.steps][-1] == "1"


async def test_an_agent_that_breaks_is_told_and_is_no_failure_of_infrastructure(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        async def run(self, context: AgentContext) -> str | None:
            raise KeyError("its own mistake")

    trajectory = await GeneralAgent(loop=Broken).run_trajectory("p", says(), "t")
    assert trajectory.metadata["stopReason"] == "AgentError"
    assert "t: the agent failed: KeyError: 'its own mistake'" in caplog.text


async def test_debug_logs_what_the_model_is_told_and_answers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rolloutctl.agents")
    agent = GeneralAgent("Be brief.", tool_names=["calculator"], debug=True)
    model = says('Action: calculator\nAction Input: {"expression": "40 + 2"}', "Final Answer: 42")
    await agent.run_trajectory("How much?", model, "t")
    logged = [record.getMessage() for record in caplog.records if record.name == "rolloutctl.agents"]
    assert [line.partition(":")[0] for line in logged] == ["system", "user", "assistant", "user", "assistant"]
    assert logged[0].startswith("system: Be brief.")
    assert logged[3] == "user: Observation: 42"
    assert json.loads(logged[4].partition(": ")[2])["content"] == "Final Answer: 42"


async def test_native_tool_calls_of_a_function_are_run(folder: Path) -> None:
    offered = []

    async def generate(messages: Sequence[Mapping[str, Any]], **options: Any) -> str | dict[str, Any]:
        offered.append([tool["function"]["name"] for tool in options["tools"]])
        assert set(options) == {"temperature", "tools"}, "no more than what other functions know"
        if messages[-1]["role"] == "tool":
            return f"It is {messages[-1]['content']}."
        function = {"name": "calculator", "arguments": '{"expression": "6 * 7"}'}
        return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}

    trajectory = await create_agent("Tool", {"tool_names": ["calculator"]}).run_trajectory("p", generate, "t")
    assert (trajectory.get_final_response(), offered) == ("It is 42.", [["calculator"]] * 2)
