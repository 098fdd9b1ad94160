"""The text protocol."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.agents.base import Stop
from agent_runtime.agents.react import ReAct, ReActStep, call_arguments, parse_step
from rollout_api.records import StopReason

ACTION = ReActStep("think", "bash", '{"command": "ls"}')


@pytest.mark.parametrize(
    "text",
    [
        'Thought: think\nAction: bash\nAction Input: {"command": "ls"}',
        'think\nAction: `bash`\nAction Input:\n```json\n{"command": "ls"}\n```',
        '**Thought:** think\n**Action:** bash\n**Action Input:** {"command": "ls"}',
        'thought: think\naction: [bash]\naction_input: {"command": "ls"}  \n',
        'Thought: think\r\nAction: bash\r\nAction Input: {"command": "ls"}',
        'Thought: think\nAction: bash\nAction Input: {"command": "ls"}\nObservation: a b\nFinal Answer: made up',
        'Thought: think\nAction: bash\nAction Input: {"command": "ls"} and then I will\nAction: editor',
        'Thought: think\nAction:\n{\n  "name": "bash",\n  "parameters": {"command": "ls"}\n}',
        'Thought: think\nAction: ```json\n{"tool_name": "bash", "arguments": {"command": "ls"}}\n```\nObservation: a b',
    ],
)
def test_action_is_parsed_in_every_form_that_models_write(text: Any) -> None:
    assert parse_step(text) == ACTION


def test_json_over_several_lines_with_lines_that_look_like_labels_is_read_whole() -> None:
    arguments = json.dumps({"text": "x", "note": "Action: no"}, indent=2)
    assert parse_step(f"Action: f\nAction Input: {arguments}\nObservation: none").action_input == arguments
    raw = '{"command": "cat\nObservation: file"}'
    assert parse_step(f"Action: f\nAction Input: {raw}").action_input == raw


def test_input_of_a_million_blanks_in_an_open_fence_is_read_at_once() -> None:
    # Time that grew with their square would be many minutes, in which the engine does nothing for other rollouts.
    assert parse_step("Action: f\nAction Input: ```\n" + " " * 1_000_000 + "x").action == "f"


def test_a_final_answer_keeps_all_its_lines() -> None:
    text = "Thought: done\nFinal Answer: first\nAction: is a word here\n\nlast"
    assert parse_step(text) == ReActStep("done", final_answer="first\nAction: is a word here\n\nlast")


def test_observation_invented_by_the_model_is_not_an_action() -> None:
    assert parse_step("Observation: I see\nAction: bash\nAction Input: {}").action is None


words = st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), min_size=1).map(str.strip).filter(bool)
plain = words.filter(lambda text: ":" not in text)
names = st.from_regex(r"\A[A-Za-z][\w.-]{0,20}\Z").filter(lambda name: not name.endswith("_"))


@given(plain, names, st.dictionaries(words, words | st.integers() | st.lists(words)))
def test_text_in_the_documented_form_is_parsed_exactly(thought: Any, name: Any, arguments: Any) -> None:
    dumped = json.dumps(arguments, ensure_ascii=False)
    step = parse_step(f"Thought: {thought}\nAction: {name}\nAction Input: {dumped}")
    assert step.thought.lstrip("*_ \t") == thought.lstrip("*_ \t")
    assert step.action == name
    assert json.loads(step.action_input) == arguments


@given(
    st.text()
    | st.lists(st.sampled_from(["Thought:", "Action:", "Action Input:", "Final Answer:", "\n", "{", "```", "x"])).map(
        "".join
    )
)
def test_no_text_breaks_the_parser_and_a_step_is_never_both(text: Any) -> None:
    step = parse_step(text)
    assert step.action is None or step.final_answer is None


SHELL = {"properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}, "required": ["command"]}
TWO = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "parameters", "arguments"),
    [
        ('{"command": "ls"}', SHELL, '{"command": "ls"}'),
        ("ls -la | head", SHELL, '{"command": "ls -la | head"}'),
        ('"ls"', SHELL, '{"command": "ls"}'),
        ("42", SHELL, '{"command": "42"}'),
        ('{"command": "ls', SHELL, '{"command": "ls'),
        ("", SHELL, ""),
        ("a and b", TWO, "a and b"),
        ("x", {}, "x"),
    ],
)
def test_plain_text_is_the_argument_of_a_tool_that_needs_just_one_text(
    text: Any, parameters: Any, arguments: Any
) -> None:
    assert call_arguments(text, parameters) == arguments


async def test_rollout_uses_the_text_protocol(attempt: Any) -> None:
    context = attempt(
        {"content": "Thought: compute\nAction: calculator\nAction Input: 6 * 7"},
        {"content": "Thought: now I know\nFinal Answer: 42"},
    )
    assert await ReAct().run(context) == "42"
    (first, tools), (second, _) = context.requests
    assert tools == [], "tools are told in the prompt alone"
    assert "calculator" in first[0]["content"]
    assert "Final Answer" in first[0]["content"]
    assert second[-1] == {"role": "user", "content": "Observation: 42"}


async def test_wrong_form_is_explained_and_ends_the_rollout_when_repeated(attempt: Any) -> None:
    context = attempt({"content": "I would say 42."}, maxFormatErrors=2)
    with pytest.raises(Stop) as caught:
        await ReAct().run(context)
    assert caught.value.reason is StopReason.TOOL_FORMAT
    assert "Action Input" in context.requests[1][0][-1]["content"]


async def test_unknown_tools_are_named_and_empty_answers_reminded(attempt: Any) -> None:
    context = attempt(
        {"content": "Action: calculater\nAction Input: 1"}, {"content": ""}, {"content": "Final Answer: x"}
    )
    assert await ReAct().run(context) == "x"
    assert "did you mean 'calculator'" in context.requests[1][0][-1]["content"]
    assert "empty" in context.requests[2][0][-1]["content"]


async def test_the_prompt_of_the_manifest_is_kept_and_the_protocol_added(attempt: Any) -> None:
    for prompt, start in (("Mine.", "Mine.\n\nTools:"), ("", "Tools:")):
        context = attempt({"content": "Final Answer: x"}, systemPrompt=prompt)
        await ReAct().run(context)
        assert context.requests[0][0][0]["content"].startswith(start)
