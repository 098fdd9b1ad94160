"""A program's own trajectory is converted to exact ATIF, and no file that a policy can write harms the run."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.program_trajectory import UnreadableTrajectory, to_atif
from agent_runtime.recording.trajectory_steps import Conversation, Steps
from rollout_api.rollout_job import TrajectoryFormat
from tests.unit.recording.strategies import json_values
from tests.unit.recording.test_atif import AtifTrajectory


def converted(content: Any, form: TrajectoryFormat | None = None) -> dict[str, Any]:
    _, data = to_atif(json.dumps(content).encode(), form, "run/0")
    AtifTrajectory.model_validate_json(data)
    trajectory: dict[str, Any] = json.loads(data)
    return trajectory


def mini(*messages: Any) -> dict[str, Any]:
    return {
        "trajectory_format": "mini-swe-agent-1.1",
        "info": {
            "mini_version": "2.4.6",
            "config": {"model": {"model_name": "openai/policy"}},
            "exit_status": "Submitted",
        },
        "messages": list(messages),
    }


def called(call_id: str, command: str, **extra: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        "extra": {
            "timestamp": 1700000000.5,
            "response": {"usage": {"prompt_tokens": 7, "completion_tokens": 3}},
            **extra,
        },
    }


def test_each_command_of_mini_swe_agent_has_its_own_result() -> None:
    trajectory = converted(
        mini(
            {"role": "system", "content": "You help."},
            {"role": "user", "content": [{"type": "text", "text": "Do it."}]},
            called("a", "ls"),
            called("b", "pwd"),
            {"role": "tool", "tool_call_id": "a", "content": "files"},
            {"role": "tool", "tool_call_id": "b", "content": "/here"},
            {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}},
        )
    )
    steps = trajectory["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent", "user"]
    assert steps[1]["message"] == "Do it."
    for step, call_id, command, text in ((steps[2], "a", "ls", "files"), (steps[3], "b", "pwd", "/here")):
        assert step["tool_calls"][0]["arguments"] == {"command": command}
        assert step["observation"]["results"] == [{"source_call_id": call_id, "content": text}]
    assert steps[2]["timestamp"] == "2023-11-14T22:13:20.500000Z"
    assert trajectory["final_metrics"] == {"total_prompt_tokens": 14, "total_completion_tokens": 6, "total_steps": 5}


def test_mini_swe_agent_on_the_responses_api_is_read_as_well() -> None:
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "c", "name": "bash", "arguments": '{"command": "ls"}'},
    ]
    answer = {"object": "response", "output": output, "usage": {"input_tokens": 5, "output_tokens": 2}}
    step = converted(mini(answer, {"type": "function_call_output", "call_id": "c", "output": "files"}))["steps"][0]
    assert (step["message"], step["reasoning_content"]) == ("Look.", "hm")
    assert step["observation"]["results"] == [{"source_call_id": "c", "content": "files"}]
    assert step["metrics"] == {"prompt_tokens": 5, "completion_tokens": 2}


def test_swe_agent_file_has_actions_observations_and_costs() -> None:
    trajectory = converted(
        {
            "environment": "swe_main",
            "history": [
                {"role": "system", "content": "SETTING"},
                {"role": "user", "content": "a demonstration", "is_demo": True},
                {"role": "user", "content": "Mend it."},
                {"role": "assistant", "content": "not again"},
            ],
            "trajectory": [
                {
                    "action": "ls",
                    "observation": "a.py",
                    "response": "I look.",
                    "thought": "look",
                    "state": {"open_file": "n/a"},
                },
                {"action": "submit", "observation": "", "response": "", "thought": "done", "execution_time": 0.5},
            ],
            "info": {
                "exit_status": "submitted",
                "model_stats": {"instance_cost": 0.5, "tokens_sent": 10, "tokens_received": 4},
            },
        }
    )
    assert [step["source"] for step in trajectory["steps"]] == ["system", "user", "user", "agent", "agent"]
    assert trajectory["steps"][1]["is_copied_context"]
    assert trajectory["steps"][3]["observation"]["results"][0]["content"] == "a.py"
    assert trajectory["final_metrics"] == {
        "total_prompt_tokens": 10, "total_completion_tokens": 4, "total_cost_usd": 0.5, "total_steps": 5,
    }  # fmt: skip


def test_atif_file_is_not_changed() -> None:
    own = converted(mini({"role": "user", "content": "hi"})) | {"session_id": "its own"}
    assert converted(own) == own


def test_time_to_read_grows_linearly_with_the_steps() -> None:
    read = list[str]()

    class Counted(str):
        def __eq__(self, other: object) -> bool:
            read.append(self)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    steps = Steps()
    for number in range(1000):
        call_id = Counted(f"call-{number}")
        steps.add({"source": "agent", "tool_calls": [{"tool_call_id": call_id}]})
        steps.observe(call_id, "own")
        steps.observe("of no call", "latest")
    assert len(read) < 10_000
    assert [result["content"] for result in steps.all[0]["observation"]["results"]] == ["own", "latest"]


@pytest.mark.parametrize("content", [{"A" * 100_000: 1}, mini({"role": "user", "extra": {"timestamp": "A" * 100_000}})])
def test_message_about_a_file_is_short_when_its_texts_are_long(content: Any) -> None:
    with pytest.raises(UnreadableTrajectory) as raised:
        to_atif(json.dumps(content).encode(), None, "run/0")
    assert len(str(raised.value)) < 1000


def test_answer_of_many_parts_is_joined_once() -> None:
    written = 0

    class Step(dict[str, Any]):
        def __setitem__(self, name: str, text: str) -> None:
            nonlocal written
            written += len(text)
            super().__setitem__(name, text)

    conversation, step = Conversation(), Step(source="agent", message="")
    for _ in range(1000):
        conversation.say(step, "more")
    conversation.finish()
    assert step["message"] == "\n".join(["more"] * 1000)
    assert written == len(step["message"])


SESSIONS = {
    "claude-code.jsonl": (TrajectoryFormat.CLAUDE_CODE, "Claude Code", "2.1.332"),
    "codex.jsonl": (TrajectoryFormat.CODEX, "Codex", "0.171.0"),
    "qwen-code.jsonl": (TrajectoryFormat.QWEN_CODE, "Qwen Code", "0.24.4"),
    "pi.jsonl": (TrajectoryFormat.PI, "Pi", "unknown"),
    "open-code.json": (TrajectoryFormat.OPEN_CODE, "OpenCode", "1.18.33"),
    "gemini-cli.jsonl": (TrajectoryFormat.GEMINI_CLI, "Gemini CLI", "unknown"),
    "open-hands.jsonl": (TrajectoryFormat.OPEN_HANDS, "OpenHands", "unknown"),
}
"""Files that the agents wrote in tests/integration/agents/test_catalog.py, shortened to three answers."""


def session(name: str) -> bytes:
    return (Path(__file__).parent / "sessions" / name).read_bytes()


@pytest.mark.parametrize("name", SESSIONS)
def test_session_file_of_a_coding_agent_is_converted(name: str) -> None:
    wanted, agent, version = SESSIONS[name]
    form, data = to_atif(session(name), None, "run/0")
    assert form is wanted
    AtifTrajectory.model_validate_json(data)
    trajectory = json.loads(data)
    assert trajectory["agent"] == {"name": agent, "version": version, "model_name": "policy"}
    steps = [step for step in trajectory["steps"] if step["source"] == "agent"]
    assert [step["message"] for step in steps] == ["I look at it.", "It sorts its argument.", "median() is right now."]
    assert [len(step.get("tool_calls", [])) for step in steps] == [2, 1, 0]
    for step in steps[:2]:
        answered = [result["source_call_id"] for result in step["observation"]["results"]]
        assert answered == [call["tool_call_id"] for call in step["tool_calls"]]
    assert "values.sort()" in steps[0]["observation"]["results"][0]["content"]
    assert "sorted(values)" in json.dumps(steps[1]["tool_calls"][0]["arguments"])
    assert all(step["metrics"]["prompt_tokens"] > step["metrics"]["completion_tokens"] > 0 for step in steps)
    (task,) = [step["message"] for step in trajectory["steps"] if step["source"] == "user"]
    assert task.startswith("median.py should return the median")


@pytest.mark.parametrize("name", [name for name in SESSIONS if name.endswith(".jsonl")])
def test_session_file_whose_last_line_was_cut_off_is_converted(name: str) -> None:
    whole, cut = json.loads(to_atif(session(name), None, "")[1]), json.loads(to_atif(session(name)[:-40], None, "")[1])
    assert cut["steps"][:-1] == whole["steps"][: len(cut["steps"]) - 1]


@given(data=st.data(), name=st.sampled_from(sorted(SESSIONS)))
def test_no_session_file_that_a_policy_can_write_does_more_than_be_unreadable(data: st.DataObject, name: str) -> None:
    def changed(value: Any) -> Any:
        if data.draw(st.integers(0, 15)) == 0:
            return data.draw(json_values)
        if isinstance(value, dict):
            return {key: changed(part) for key, part in value.items()}
        return [changed(part) for part in value] if isinstance(value, list) else value

    whole = name.endswith(".json")
    lines = [
        json.dumps(changed(json.loads(line))) for line in ([session(name)] if whole else session(name).splitlines())
    ]
    try:
        _, atif = to_atif("\n".join(lines).encode(), SESSIONS[name][0], "run/0")
    except UnreadableTrajectory:
        return
    AtifTrajectory.model_validate_json(atif)


ATIF = {"schema_version": "ATIF-v1.5", "agent": {"name": "a", "version": "1"}}


@pytest.mark.parametrize(
    ("data", "form", "said"),
    [
        (b"", None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b'{"messages": NaN}', None, "NaN is not a JSON number"),
        (b"[" * 100_000, None, "not JSON"),
        (b"[]", None, "got list"),
        (b'{"a": 1}', None, "'a'.*no supported format.*MiniSWEAgent"),
        (json.dumps(mini()).encode(), TrajectoryFormat.ATIF, "match MiniSWEAgent, expected ATIF"),
        (b'{"messages": [], "info": 5}', None, "'messages', 'info'.*no supported format"),
        (b'{"type": "x", "messages": [], "info": true}\n{"a": 1}', None, "no supported format"),
        (b'{"a": [' + b"{}," * 1_000_000 + b"1]}", None, "more than 1000000 values and lines"),
        (b"\n" * 1_000_001, None, "more than 1000000 values and lines"),
        (json.dumps(mini()).encode(), None, "no steps"),
        (json.dumps(mini({"role": "tool", "content": "of what?"})).encode(), None, "precedes the first answer"),
        (json.dumps({**ATIF, "steps": []}).encode(), None, "required"),
        (json.dumps({**ATIF, "steps": [{"step_id": 2, "source": "user"}]}).encode(), None, "step_id 1"),
        (
            json.dumps({**ATIF, "steps": [{"step_id": 1, "source": "user", "message": "", "extra": 1}]})
            .replace('"extra": 1', '"extra": 1e999').encode(),
            None,
            "not a valid ATIF trajectory",
        ),
    ],
)  # fmt: skip
def test_error_in_a_trajectory_file_is_described(data: bytes, form: TrajectoryFormat | None, said: str) -> None:
    with pytest.raises(UnreadableTrajectory, match=said):
        to_atif(data, form, "run/0")


def test_error_in_a_trajectory_file_is_short_when_it_quotes_the_file() -> None:
    step = {"role": "assistant", "content": "", "extra": {"timestamp": "never" * 1_000_000}}
    with pytest.raises(UnreadableTrajectory) as raised:
        to_atif(json.dumps(mini(step)).encode(), None, "run/0")
    assert len(str(raised.value)) < 1000


@given(
    content=json_values,
    shape=st.sampled_from(["messages", "session", "steps", "trajectory"]),
    pieces=st.lists(
        st.one_of(
            json_values,
            st.fixed_dictionaries(
                {"role": st.sampled_from(["system", "user", "assistant", "tool", "exit"])},
                optional={
                    "content": json_values,
                    "tool_calls": json_values,
                    "extra": json_values,
                    "tool_call_id": json_values,
                },
            ),
        )
    ),
)
def test_no_file_that_a_policy_can_write_does_more_than_be_unreadable(
    content: Any, shape: str, pieces: list[Any]
) -> None:
    whole = {
        "messages": mini(*pieces) | {"info": content},
        "session": {"messages": pieces, "info": content},
        "steps": {**ATIF, "steps": pieces},
        "trajectory": {"trajectory": pieces, "history": pieces, "info": content},
    }
    for data in (content, whole[shape]):
        try:
            _, atif = to_atif(json.dumps(data).encode(), None, "run/0")
        except UnreadableTrajectory:
            continue
        json.loads(atif)
