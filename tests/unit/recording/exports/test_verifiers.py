"""Lines in the format of `vf-eval`."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.export.formats import Format, export
from tests.support.recorded_run import ASK, BRANCHED, DELEGATED, OTHER, ROLLOUTS, SHORTENED, SYSTEM, TOOLS, record_run

Lines = list[dict[str, Any]]


@pytest.fixture
async def lines(tmp_path: Path) -> Lines:
    run = await record_run(tmp_path / "out")
    return [json.loads(line) async for line in export(run, Format.VERIFIERS)]


def test_a_lost_rollout_has_an_error_and_no_reward_and_a_failed_one_has_0(lines: Lines) -> None:
    assert [line["reward"] for line in lines] == [0.0, 1.0, None, None]
    assert [line["error"] and line["error"]["error"] for line in lines] == [None, None, "SandboxLost", "SandboxLost"]
    assert [line["is_completed"] for line in lines] == [True, True, False, False]


def test_prompt_and_completion_are_from_the_last_turn(lines: Lines) -> None:
    assert [line["prompt"] for line in lines] == [[SYSTEM, ASK], [OTHER], [SYSTEM, ASK], []]
    assert [message["role"] for message in lines[0]["completion"]] == ["assistant", "tool", "assistant"]
    assert lines[0]["completion"][2]["reasoning_content"] == "I saw it."
    assert json.loads(lines[0]["completion"][0]["tool_calls"][0]) == {
        "id": "call-0",
        "name": "bash",
        "arguments": '{"command": "ls"}',
    }


def test_rollouts_of_a_task_share_an_example_and_have_their_mode(lines: Lines) -> None:
    assert [line["example_id"] for line in lines] == [0, 0, 1, 1]
    assert [line["info"]["mode"] for line in lines] == ["Eval", "Train", "Train", "Train"]


def test_times_of_the_rollout_are_exported(lines: Lines) -> None:
    timing = lines[0]["timing"]
    assert timing["setup"] == {"start": 100.0, "end": 101.0, "duration": 1.0}
    assert timing["generation"] == {"start": 101.0, "end": 103.0, "duration": 2.0}
    assert timing["scoring"] == {"start": 108.0, "end": 110.0, "duration": 2.0}
    assert timing["model"]["duration"] == 2.0
    assert lines[3]["timing"]["scoring"]["end"] == 0


async def test_conversation_tools_and_end_are_of_the_agent_and_not_of_its_sub_agent(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out", [(ROLLOUTS[0][0], DELEGATED)])
    [line] = [json.loads(line) async for line in export(run, Format.VERIFIERS)]
    [traces] = [json.loads(line) async for line in export(run, Format.VERIFIERS_TRACES)]
    assert line["completion"][-1]["content"] == "There is a.txt."
    assert line["timing"]["generation"]["end"] == traces["traces"][0]["timing"]["agent"]["end"] == 104.0
    assert [tool["name"] for tool in line["tool_defs"]] == [tool["function"]["name"] for tool in TOOLS]
    assert len(traces["traces"][0]["tools"]) == len(TOOLS)


async def test_copied_turns_are_context_and_not_sampled_again(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out", [(ROLLOUTS[0][0], BRANCHED)])
    [line] = [json.loads(line) async for line in export(run, Format.VERIFIERS)]
    assert [message["role"] for message in line["prompt"]] == ["system", "user", "assistant", "tool"]
    assert [message["content"] for message in line["completion"]] == ["There is a.txt."]
    assert line["timing"]["model"]["duration"] == 1.0
    [traces] = [json.loads(line) async for line in export(run, Format.VERIFIERS_TRACES)]
    [trace] = traces["traces"]
    assert [node["message"]["content"] for node in trace["nodes"] if node["sampled"]] == ["There is a.txt."]
    assert len(trace["calls"]) == 1


async def test_copied_answer_in_a_shortened_conversation_is_part_of_the_prompt(tmp_path: Path) -> None:
    run = await record_run(tmp_path / "out", [(ROLLOUTS[0][0], SHORTENED)])
    [line] = [json.loads(line) async for line in export(run, Format.VERIFIERS)]
    assert [message["role"] for message in line["prompt"]] == ["user", "assistant", "tool"]
    assert [message["content"] for message in line["completion"]] == ["There is a.txt."]
