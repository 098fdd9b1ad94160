"""A conversation that is cut keeps its task, its latest turn and every result with its call, and is really shorter."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.agents.base_class import LEFT_OUT, SUMMARISE, Size, is_over, truncated
from agent_runtime.agents.tool_calling import ToolCalling
from rollout_api.records import Message
from rollout_api.rollout_job import Agent, ContextLimit


def conversation(turns: list[tuple[int, int]], head: int) -> list[Message]:
    """Return `head` messages, then turns with this many tool calls and results, each result this long."""
    messages: list[Message] = [{"role": "user", "content": f"head {number}"} for number in range(head)]
    for number, (calls, length) in enumerate(turns):
        ids = [f"{number}.{call}" for call in range(calls)]
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": call} for call in ids]})
        messages += [{"role": "tool", "tool_call_id": call, "content": "x" * length} for call in ids]
    return messages


limits = st.one_of(
    st.integers(4, 60).map(lambda number: ContextLimit(max_messages=number)),
    st.integers(1, 500).map(lambda number: ContextLimit(max_tokens=number)),
)


@given(
    limit=limits,
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=20),
    head=st.integers(1, 3),
    tokens=st.integers(0, 1000),
)
def test_a_cut_keeps_head_and_latest_turn_and_leaves_no_result_without_its_call(
    limit: ContextLimit, turns: list[tuple[int, int]], head: int, tokens: int
) -> None:
    messages = conversation(turns, head)
    cut = truncated(limit, messages, head, tokens)
    assert cut[:head] == messages[:head]
    assert cut[head + 1 :] == messages[len(messages) - len(cut) + head + 1 :], "what stays is the end, unchanged"
    if cut == messages:
        return
    assert cut[head] == {"role": "user", "content": LEFT_OUT}
    asked = {call["id"] for message in cut for call in message.get("tool_calls", [])}
    assert {message["tool_call_id"] for message in cut if message["role"] == "tool"} == asked
    assert cut[head + 1]["role"] == "assistant"
    if limit.max_messages is not None:
        only_the_latest = [message["role"] for message in cut].count("assistant") == 1
        assert only_the_latest or not is_over(limit, Size(len(cut), 0))


@pytest.mark.parametrize("fields", [{}, {"maxTokens": 1, "maxMessages": 4}, {"maxMessages": 3}])
def test_context_limit_without_exactly_one_bound_is_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match=r"exactly one|greater than or equal to 4"):
        ContextLimit.model_validate(fields)


def test_context_limit_is_refused_for_agents_without_a_managed_conversation() -> None:
    with pytest.raises(ValueError, match="context is not for type Oracle"):
        Agent.model_validate({"type": "Oracle", "context": {"maxMessages": 10}})


def computes(number: int) -> dict[str, Any]:
    return {"toolCalls": [{"name": "calculator", "arguments": {"expression": f"{number} + 0"}}]}


async def test_summary_replaces_all_earlier_turns(attempt: Any) -> None:
    turns = [*map(computes, range(3)), {"content": "I had 0, 1 and 2."}, computes(3), {"content": "done"}]
    context = attempt(*turns, context={"maxMessages": 7, "method": "Summarize"})
    assert await ToolCalling().run(context) == "done"
    asked, _ = context.requests[3]
    assert asked[-1] == {"role": "user", "content": SUMMARISE}
    assert len(asked) == 9, "what is summarised is all that the model had"
    after, _ = context.requests[4]
    assert [message["role"] for message in after] == ["system", "user", "user"]
    assert "I had 0, 1 and 2." in after[2]["content"]


async def test_without_a_summary_the_oldest_turns_are_left_out(attempt: Any) -> None:
    turns = [*map(computes, range(3)), computes(9), computes(3), {"content": "done"}]
    context = attempt(*turns, context={"maxMessages": 7, "method": "Summarize"})
    assert await ToolCalling().run(context) == "done"
    after, _ = context.requests[4]
    assert [message.get("content") for message in after][2] == LEFT_OUT
    assert len(context.observations) == 4, "a call in place of a summary is not made"
