"""The loop of the built-in agents, and the hooks of custom ones."""

import itertools
import json
from typing import Any

import pytest

from agent_runtime.agents.base import Stop
from agent_runtime.agents.base_class import BaseAgent, ParsedAnswer
from agent_runtime.agents.registry import find_agent
from agent_runtime.agents.tool_calling import NOTHING_DONE, SWE, Coding, ToolCalling
from agent_runtime.agents.without_model import Nop, Oracle
from rollout_api.records import StopReason


def compute(expression: Any, **more: Any) -> Any:
    return {"toolCalls": [{"name": "calculator", "arguments": {"expression": expression}}], **more}


def calling(name: Any, arguments: Any) -> Any:
    return {"toolCalls": [{"name": name, "arguments": arguments}]}


async def stopped(agent: Any, context: Any) -> Any:
    with pytest.raises(Stop) as caught:
        await agent.run(context)
    return caught.value


async def test_tools_are_called_until_the_model_answers_in_text(attempt: Any) -> None:
    context = attempt(compute("6 * 7", content="Let me see."), {"content": "It is 42."})
    assert await ToolCalling().run(context) == "It is 42."
    messages, tools = context.requests[1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[1]["content"] == "Solve it."
    assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"]
    assert messages[3]["content"] == "42"
    assert [tool["function"]["name"] for tool in tools] == ["calculator", "finish"]


async def test_each_of_several_calls_gets_its_own_result(attempt: Any) -> None:
    turn = {"toolCalls": [{"name": "calculator", "arguments": {"expression": text}} for text in ("1+1", "2+2", "3+3")]}
    context = attempt(turn, {"content": "done"})
    await ToolCalling().run(context)
    sent = {message.get("tool_call_id"): message["content"] for message in context.requests[1][0][3:]}
    assert list(sent.values()) == ["2", "4", "6"]
    assert len(sent) == 3


async def test_each_call_extends_the_conversation_before_it_so_that_no_branch_is_recorded(attempt: Any) -> None:
    context = attempt(compute("1"), {"content": ""}, calling("nope", "{"), {"content": "end"})
    await ToolCalling().run(context)
    conversations = [messages for messages, _ in context.requests]
    for earlier, later in itertools.pairwise(conversations):
        assert later[: len(earlier)] == earlier


async def test_a_tool_can_end_the_rollout(attempt: Any) -> None:
    assert (
        await stopped(ToolCalling(), attempt(calling("finish", {"message": "did it"})))
    ).reason is StopReason.FINISHED


async def test_the_agent_for_repositories_is_not_done_before_it_has_looked(attempt: Any) -> None:
    context = attempt({"content": "Fixed it."}, compute("1"), {"content": "Fixed it."})
    assert await SWE().run(context) == "Fixed it."
    assert len(context.requests) == 3
    assert context.requests[1][0][-1] == {"role": "user", "content": NOTHING_DONE}
    words = [{"content": "Fixed it."}] * 3
    assert (await stopped(SWE(), attempt(*words))).reason is StopReason.TOOL_FORMAT


async def test_the_system_prompt_of_the_manifest_replaces_the_agents_own(attempt: Any) -> None:
    for spec, roles in (({"systemPrompt": "Mine."}, ["system", "user"]), ({"systemPrompt": ""}, ["user"])):
        context = attempt(**spec)
        await Coding().run(context)
        assert [message["role"] for message in context.requests[0][0]] == roles
    context = attempt()
    await Coding().run(context)
    assert "software engineer" in context.requests[0][0][0]["content"]


@pytest.mark.parametrize("turn", [calling("nope", {}), calling("calculator", '{"exp'), calling("calculator", {"x": 1})])
async def test_malformed_calls_are_explained_and_end_the_rollout_when_repeated(turn: Any, attempt: Any) -> None:
    context = attempt(turn, maxFormatErrors=3)
    stop = await stopped(ToolCalling(), context)
    assert stop.reason is StopReason.TOOL_FORMAT
    assert len(context.requests) == 3
    assert all(observation.error for observation in context.observations)
    assert context.observations[0].content in stop.message


async def test_a_valid_call_resets_the_count_of_malformed_ones(attempt: Any) -> None:
    bad, good = calling("nope", {}), compute("1")
    context = attempt(bad, bad, good, bad, bad, {"content": "end"}, maxFormatErrors=3)
    assert await ToolCalling().run(context) == "end"


async def test_refusal_of_a_tool_is_not_a_format_error(attempt: Any) -> None:
    context = attempt(*[compute("1 / 0")] * 5, {"content": "end"}, maxFormatErrors=2)
    assert await ToolCalling().run(context) == "end"


async def test_one_good_call_among_several_is_progress(attempt: Any) -> None:
    mixed = {"toolCalls": [{"name": "nope"}, {"name": "calculator", "arguments": {"expression": "1"}}]}
    context = attempt(mixed, mixed, {"content": "end"}, maxFormatErrors=1)
    assert await ToolCalling().run(context) == "end"


async def test_truncated_call_is_reported_to_the_model(attempt: Any) -> None:
    context = attempt(calling("calculator", '{"expression": "1 +'), {"content": "end"}, finish_reasons=["length"])
    await ToolCalling().run(context)
    *_, assistant, result = context.requests[1][0]
    assert "cut off at its token limit" in result["content"]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {
        "malformed_arguments": '{"expression": "1 +'
    }


async def test_an_empty_answer_is_reminded_once_and_ends_the_rollout_when_repeated(attempt: Any) -> None:
    context = attempt({"content": " \n"}, {"content": "end"})
    assert await ToolCalling().run(context) == "end"
    assert context.requests[1][0][-1]["role"] == "user"
    assert (await stopped(ToolCalling(), attempt({"content": ""}))).reason is StopReason.EMPTY_ANSWER


async def test_the_content_filter_ends_the_rollout_with_its_own_reason(attempt: Any) -> None:
    stop = await stopped(ToolCalling(), attempt({"content": "x"}, finish_reasons=["content_filter"]))
    assert stop.reason is StopReason.CONTENT_FILTER


async def test_errors_of_the_context_are_raised(attempt: Any) -> None:
    assert (await stopped(ToolCalling(), attempt(compute("1"), maxTurns=4))).reason is StopReason.MAX_TURNS


async def test_a_second_run_asks_exactly_the_same_so_that_it_can_be_replayed(attempt: Any) -> None:
    turns = [compute("1"), calling("nope", "{"), {"content": ""}, compute("2", content="hm"), {"content": "end"}]
    for kind in (ToolCalling, Coding, find_agent("ReAct")):
        first, second = (attempt(*turns, maxTurns=9) for _ in range(2))
        for context in (first, second):
            try:
                await kind().run(context)
            except Stop:
                assert context.requests
        assert first.requests == second.requests


class Careful(BaseAgent):
    """Overrides every hook."""

    def set_tools(self, tools: Any) -> Any:
        super().set_tools({name: tool for name, tool in tools.items() if name != "finish"})

    def should_continue(self, trajectory: Any) -> Any:
        return super().should_continue(trajectory) and len(trajectory.messages) < 8

    def format_messages_for_llm(self, trajectory: Any) -> Any:
        return [*trajectory.messages, {"role": "user", "content": "Be careful."}]

    def parse_llm_output(self, reply: Any) -> Any:
        return ParsedAnswer(complaint="Say please.") if reply.text == "rude" else super().parse_llm_output(reply)

    async def execute_tool_call(self, calls: Any) -> Any:
        return [
            one.model_copy(update={"content": f"<{one.content}>"}) for one in await super().execute_tool_call(calls)
        ]

    def finalize_trajectory(self, trajectory: Any) -> Any:
        return f"carefully: {trajectory.final}"


async def test_every_hook_of_the_base_class_is_really_called(attempt: Any) -> None:
    context = attempt({"content": "rude"}, compute("1 + 1"), {"content": "end"})
    assert await Careful().run(context) == "carefully: end"
    messages, tools = context.requests[2]
    assert [tool["function"]["name"] for tool in tools] == ["calculator"]
    assert messages[-1]["content"] == "Be careful."
    assert messages[-2]["content"] == "<2>"
    assert {"role": "user", "content": "Say please."} in messages


async def test_should_continue_can_end_the_work(attempt: Any) -> None:
    context = attempt(compute("1"))
    assert await Careful().run(context) == "carefully: None"
    assert len(context.requests) == 3


async def test_the_oracle_runs_the_solution_in_order(attempt: Any, tmp_path: Any) -> None:
    commands = [f"echo one > {tmp_path}/a", f"cat {tmp_path}/a > {tmp_path}/b"]
    context = attempt(task={"solution": commands})
    assert "solution" in (await Oracle().run(context) or "")
    assert (tmp_path / "b").read_text() == "one\n"
    assert not context.requests


async def test_the_oracle_brings_the_files_that_the_solution_needs(attempt: Any, tmp_path: Any) -> None:
    files = [{"path": f"{tmp_path}/solve.sh", "content": f"echo done > {tmp_path}/b\n"}]
    await Oracle().run(attempt(task={"solution": [f"sh {tmp_path}/solve.sh"], "solutionFiles": files}))
    assert (tmp_path / "b").read_text() == "done\n"


async def test_failing_solution_names_the_command_and_its_error(attempt: Any, tmp_path: Any) -> None:
    context = attempt(task={"solution": ["true", "echo reason >&2; exit 4", f"touch {tmp_path}/never"]})
    stop = await stopped(Oracle(), context)
    assert stop.reason is StopReason.AGENT_ERROR
    assert "solution[1]" in stop.message
    assert "exit code 4: reason" in stop.message
    assert not (tmp_path / "never").exists()
    assert "no solution" in (await stopped(Oracle(), attempt())).message


async def test_nop_does_nothing(attempt: Any) -> None:
    context = attempt()
    assert await Nop().run(context) is None
    assert not context.requests
