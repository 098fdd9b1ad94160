"""Rows for verl: their messages, tokens and rewards."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.export.verl import first_trained, write_conversations, write_tokens
from rollout_api.records import Message, Record
from tests.support.recorded_run import ASK, OTHER, SYSTEM, TOOLS, record_run
from tests.support.records import answered, asked, completed

Rows = list[dict[str, Any]]


@pytest.fixture
async def conversations(tmp_path: Path) -> Rows:
    await write_conversations(await record_run(tmp_path / "out"), tmp_path / "verl.parquet")
    rows: Rows = pq.read_table(tmp_path / "verl.parquet").to_pylist()
    return rows


@pytest.fixture
async def tokens(tmp_path: Path) -> Rows:
    await write_tokens(await record_run(tmp_path / "other"), tmp_path / "tokens.parquet")
    rows: Rows = pq.read_table(tmp_path / "tokens.parquet").to_pylist()
    return rows


def samples(rows: Rows) -> list[tuple[int, int, float | None, str]]:
    return [(row["extra_info"]["rollout"], row["extra_info"]["branch"], row["reward"], row["mode"]) for row in rows]


EXPECTED = [(0, 0, 0.0, "Eval"), (1, 0, 1.0, "Train"), (1, 1, 1.0, "Train"), (2, 0, None, "Train")]


def test_each_branch_is_a_row_with_its_rollouts_reward_and_a_lost_one_has_none(
    conversations: Rows, tokens: Rows
) -> None:
    assert samples(conversations) == EXPECTED
    assert samples(tokens) == EXPECTED


def test_a_prompt_ends_before_the_first_answer_and_the_messages_have_all_of_it(conversations: Rows) -> None:
    assert [row["prompt"] for row in conversations] == [[SYSTEM, ASK], [SYSTEM, ASK], [OTHER], [SYSTEM, ASK]]
    roles = [message["role"] for message in conversations[0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert conversations[0]["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'


async def test_calls_whose_ids_and_arguments_are_no_text_are_exported_as_text(tmp_path: Path) -> None:
    odd: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": None, "function": {"name": "bash", "arguments": {"command": "ls"}}}],
    }
    records: list[Record] = [asked(0, 0, ASK, odd, {"role": "tool", "tool_call_id": 7, "content": "a"})]
    run = await record_run(tmp_path / "out", [(completed(0), [*records, answered(0, {"role": "assistant"})])])
    await write_conversations(run, tmp_path / "verl.parquet")
    messages = pq.read_table(tmp_path / "verl.parquet").to_pylist()[0]["messages"]
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    assert messages[1]["tool_calls"] == [{"id": "call-0", "type": "function", "function": function}]
    assert messages[2]["tool_call_id"] == "7"


def test_reasoning_of_the_model_is_exported(conversations: Rows) -> None:
    assert [row["messages"][-1]["reasoning_content"] for row in conversations[:3]] == ["I saw it."] * 3
    assert conversations[3]["messages"][-1]["reasoning_content"] is None


def test_tools_keep_their_own_parameters(conversations: Rows) -> None:
    assert json.loads(conversations[0]["tools_json"]) == TOOLS


def test_rows_name_the_task_they_are_of(conversations: Rows) -> None:
    assert [row["extra_info"]["task_name"] for row in conversations] == ["first", "first", "first", "second"]
    assert {row["data_source"] for row in conversations} == {"files"}
    assert {row["ability"] for row in conversations} == {"shell"}


def test_sampled_tokens_are_trained_and_tool_results_are_not(tokens: Rows) -> None:
    fields = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
    assert [[row[name] for name in fields] for row in tokens] == [
        [[1, 2], [3, 4, 5, 6], [1, 1, 0, 1], [-0.5, -0.5, 0.0, -0.5]],
        [[1, 2], [3, 4, 5, 6], [1, 1, 0, 1], [-0.5, -0.5, 0.0, -0.5]],
        [[9], [6, 7], [1, 1], [-0.5, -0.5]],
        [[1, 2], [3, 4], [1, 1], [-0.5, -0.5]],
    ]


@given(st.lists(st.sampled_from((0, 1))))
def test_no_token_to_train_on_is_in_a_prompt_and_a_response_begins_with_one(mask: list[int]) -> None:
    start = first_trained(mask)
    assert not any(mask[:start])
    assert mask[start:][:1] in ([], [1])
