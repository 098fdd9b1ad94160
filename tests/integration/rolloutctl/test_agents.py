"""One agent on one prompt, in Python: its result and its record."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_rollouts.agentic_rollout_library import (
    AgenticRollout,
    AgenticRolloutConfig,
    BaseAgent,
    GeneralAgent,
    RolloutFailed,
    StepType,
    Trajectory,
    TrajectoryStep,
    create_agent,
    create_llm_client,
    create_tool,
)
from agent_runtime.agents.base import AgentContext
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


@dataclass
class Batch:
    """A batch like verl's DataProto, without tensors."""

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)


async def test_rows_of_a_batch_become_responses_with_a_mask(server: VllmStandIn) -> None:
    rows = [[{"role": "user", "content": text}] for text in ("What is 6 * 7?", "And 7 * 6?")]
    prompts = Batch({"input_ids": [[1], [2]]}, {"raw_prompt": rows, "uid": ["a", "b"]})
    client = create_llm_client(KEY, f"{server.url}/v1", "policy")
    config = AgenticRolloutConfig(include_trajectory_in_output=False)
    output = await AgenticRollout(config, client.generate).generate_sequences(prompts)
    columns = output.non_tensor_batch
    assert (output.batch, columns["uid"], columns["responses"]) == (prompts.batch, ["a", "b"], ["42", "42"])
    assert all(
        ids in [list(request.ids) for request in server.served_in("rollout-0")] for ids in columns["response_ids"]
    )
    assert columns["response_mask"] == [[1] * len(ids) for ids in columns["response_ids"]]
    assert "trajectories" not in columns


async def test_equal_prompts_are_samples_of_their_own(server: VllmStandIn) -> None:
    client = create_llm_client(KEY, f"{server.url}/v1", "policy")
    for _ in range(2):
        await client.generate([{"role": "user", "content": "Hi"}], temperature=1.0)
    prompts = Batch({}, {"raw_prompt": ["Hi", "Hi"]}, {})
    await AgenticRollout(AgenticRolloutConfig(), client.generate).generate_sequences(prompts)
    seeds = [request.seed for request in server.served if request.seed]
    assert len(seeds) == len(set(seeds)) == 4


async def test_lost_row_of_a_batch_has_no_reward_and_affects_no_other() -> None:
    async def generate(messages: Sequence[Mapping[str, Any]], temperature: float = 0.0) -> str:
        if "lost" in messages[-1]["content"]:
            raise RuntimeError("away")
        return "Final Answer: 42"

    column = np.empty(2, dtype=object)
    column[:] = ["lost", "What is 6 * 7?"]
    output = await AgenticRollout(AgenticRolloutConfig(), generate).generate_sequences(Batch({}, {"messages": column}))
    columns = output.non_tensor_batch
    assert all(isinstance(values, np.ndarray) for values in columns.values())
    assert columns["responses"][1] == "42"
    assert "away" in columns["errors"][0]
    assert columns["errors"][1] is None
    assert [*columns["final_rewards"], *columns["response_mask"]] == [None] * 4
    assert columns["trajectories"][1]["steps"]
    with pytest.raises(ValueError, match="expected messages or raw_prompt"):
        await AgenticRollout(AgenticRolloutConfig(), generate).generate_sequences(Batch({}, {}))


def says(*answers: str) -> Any:
    """Return a model that gives these answers in order."""
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


async def test_concurrent_trajectories_of_an_agent_are_separate(server: VllmStandIn) -> None:
    async def echo(prompt: str) -> str:
        trajectory = await agent.run_trajectory(prompt, generate, "the-same-id")
        return trajectory.get_final_response()

    async def generate(messages: Sequence[Mapping[str, Any]]) -> str:
        await asyncio.sleep(0.1)
        return f"Final Answer: {messages[-1]['content']}"

    agent = GeneralAgent()
    prompts = [f"number {number}" for number in range(4)]
    assert await asyncio.gather(*map(echo, prompts)) == prompts


async def test_only_tools_in_termination_tool_names_end_the_work(folder: Path) -> None:
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


async def test_rounds_are_model_calls_and_the_sandbox_is_as_requested(folder: Path) -> None:
    agent = GeneralAgent(tool_names=["calculator"], max_rounds=2, sandbox={"workspaces": {"mode": "Plain"}})
    action = 'Action: calculator\nAction Input: {"expression": "1"}'
    trajectory = await agent.run_trajectory("p", says(action, action, action), "t")
    assert (trajectory.metadata["stopReason"], trajectory.metadata["turns"]) == ("MaxTurns", 2)
    assert trajectory.metadata["sandbox"]["mode"] == "Plain"


async def test_failing_model_raises_an_error_with_the_partial_trajectory(folder: Path) -> None:
    agent = GeneralAgent(tool_names=["calculator"])
    model = says('Thought: so\nAction: calculator\nAction Input: {"expression": "1"}')
    with pytest.raises(RolloutFailed, match=r"t: FunctionFailed: .*generate raised IndexError") as failure:
        await agent.run_trajectory("p", model, "t")
    trajectory = failure.value.trajectory
    assert (trajectory.is_completed, trajectory.get_total_reward()) == (False, None)
    assert [step.content for step in trajectory.steps][-1] == "1"


async def test_failing_agent_is_reported_and_is_not_an_infrastructure_failure(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        async def run(self, context: AgentContext) -> str | None:
            raise KeyError("its own mistake")

    trajectory = await GeneralAgent(loop=Broken).run_trajectory("p", says(), "t")
    assert trajectory.metadata["stopReason"] == "AgentError"
    assert "t: the agent failed: KeyError: 'its own mistake'" in caplog.text


async def test_debug_logs_the_prompts_and_the_answers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
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


class Thinker(BaseAgent):
    """Calls the model until there is a final answer. The first call may have a separate limit."""

    async def run_trajectory(self, prompt: Any, llm_generate_func: Any, request_id: str, **kwargs: Any) -> Trajectory:
        trajectory = Trajectory(request_id=request_id)
        trajectory.add_step(TrajectoryStep(step_type=StepType.OBSERVATION, content=prompt))
        while self.should_continue(trajectory):
            answer = await llm_generate_func(self.format_messages_for_llm(trajectory), **kwargs)
            trajectory.add_step(self.parse_llm_output(answer))
        self.finalize_trajectory(trajectory)
        return trajectory


async def test_own_trajectory_stops_at_max_steps_and_has_the_verifiers_reward(folder: Path) -> None:
    trajectory = await Thinker(max_steps=3).run_trajectory(
        "Go.", says("one", "two", "three"), "thinker", verifier={"commands": ["true"]}
    )
    assert [step.content for step in trajectory.steps] == ["Go.", "one", "two"]
    assert (trajectory.get_total_reward(), trajectory.is_completed) == (1.0, True)
    assert trajectory.metadata["turns"] == 2
    assert Trajectory.from_dict(trajectory.to_dict()) == trajectory


async def test_agents_with_own_trajectories_run_side_by_side() -> None:
    agent = Thinker(max_steps=2)
    prompts = [f"number {number}" for number in range(3)]

    async def generate(messages: Sequence[Mapping[str, Any]]) -> str:
        await asyncio.sleep(0.1)
        return str(messages[-1]["content"])

    ran = await asyncio.gather(*(agent.run_trajectory(prompt, generate, "same") for prompt in prompts))
    assert [trajectory.get_final_response() for trajectory in ran] == prompts


async def test_max_tokens_of_a_trajectory_is_refused_with_the_setting_to_use(caplog: pytest.LogCaptureFixture) -> None:
    trajectory = await Thinker().run_trajectory("Go.", says("one"), "thinker", max_tokens=99)
    assert trajectory.metadata["stopReason"] == "AgentError"
    assert "max_tokens is 99" in caplog.text
    assert "set max_tokens_per_step of Thinker" in caplog.text


async def test_plugins_of_an_agent_are_called() -> None:
    agent = GeneralAgent(plugins=["SafetyFilter"])
    agent.set_tools({"bash": create_tool("BashExecutor")})
    model = says('Action: bash\nAction Input: {"command": "rm -rf /"}', "Final Answer: no")
    trajectory = await agent.run_trajectory("Remove all.", model, "unsafe")
    (result,) = [step for step in trajectory.steps if step.step_type is StepType.ACTION_RESULT]
    assert result.is_error
    assert "SafetyFilter" in result.content


@pytest.mark.parametrize("by_variable", [True, False])
async def test_trajectory_is_not_kept_on_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("AGENTIC_SAVE_TRAJECTORIES", "false")
    agent = GeneralAgent(save=None if by_variable else False)
    trajectory = await agent.run_trajectory("Go.", says("Final Answer: 42"), "unsaved")
    assert trajectory.get_final_response() == "42"
    assert not list(folder.iterdir())


async def test_client_answers_with_tool_calls_when_given_tools(server: VllmStandIn) -> None:
    client = create_llm_client(KEY, f"{server.url}/v1", "policy")
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    message = await client.generate(
        [{"role": "user", "content": "x"}], tools=[{"type": "function", "function": function}]
    )
    assert isinstance(message, dict)
    assert message["role"] == "assistant"
    assert isinstance(await client.generate([{"role": "user", "content": "x"}]), str)
