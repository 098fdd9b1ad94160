"""A person's program finds in a trajectory everything that happened, once, and under its own name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.branches import Branch
from rollout_api.records import Message, Record, Result, StopReason
from rolloutctl.trajectories import StepType, Trajectory, TrajectoryStep, steps_of
from tests.support.records import asked, call, completed, gave, said, told

TASK: list[Message] = [{"role": "system", "content": "be good"}, {"role": "user", "content": "fix it"}]


def result(message: str = "", stop: StopReason = StopReason.FINISHED) -> Result:
    return completed(message=message, stop_reason=stop)


def brief(records: list[Record], ended: Result) -> list[tuple[str, str]]:
    return [(step.step_type.value, step.content) for step in steps_of(records, ended)]


def test_native_tool_calls_are_steps_with_their_results_and_logprobs() -> None:
    records: list[Record] = [
        asked(0, 0, *TASK),
        said(0, "I look.", call("a", '{"command": "ls"}'), call("b", "{no json"), logprobs=[-0.5, -0.25]),
        gave(0, ("a", "x.py"), ("b", "no JSON")),
        asked(1, 3, told("a", "x.py"), told("b", "no JSON")),
        said(1, "Done.", logprobs=[-1.0]),
    ]
    steps = steps_of(records, result("Done."))
    assert [(step.step_type.value, step.content) for step in steps] == [
        ("observation", "be good"),
        ("observation", "fix it"),
        ("thought", "I look."),
        ("action", '{"command": "ls"}'),
        ("action", "{no json"),
        ("action_result", "x.py"),
        ("action_result", "no JSON"),
        ("final_answer", "Done."),
    ]
    assert [step.tool_args for step in steps if step.step_type is StepType.ACTION] == [{"command": "ls"}, None]
    assert [step.log_probs for step in steps if step.log_probs] == [[-0.5, -0.25], [-1.0]]


def test_calls_in_text_are_tool_calls_too_and_their_results_stand_once() -> None:
    records: list[Record] = [
        asked(0, 0, *TASK),
        said(0, 'Thought: look\nAction: bash\nAction Input: {"command": "ls"}'),
        gave(0, ("action", "x.py")),
        asked(1, 3, {"role": "user", "content": "Observation: x.py"}),
        said(1, "<function=bash>ls</function>"),
        gave(1, ("call", "x.py")),
        asked(2, 5, {"role": "user", "content": "Observation: x.py"}),
        said(2, "Thought: I know.\nFinal Answer: one file"),
    ]
    assert brief(records, result("one file"))[2:] == [
        ("thought", "look"),
        ("action", '{"command": "ls"}'),
        ("action_result", "x.py"),
        ("action", "<function=bash>ls</function>"),
        ("action_result", "x.py"),
        ("thought", "I know."),
        ("final_answer", "one file"),
    ]


@pytest.mark.parametrize(
    ("text", "message", "expected"),
    [
        ("It is 4. ", "It is 4. ", ["final_answer"]),
        ("Final Answer: 4", "4", ["final_answer"]),
        ("Thought: two twos\nFinal Answer: 4", "4", ["thought", "final_answer"]),
        ("It is 4.", "4", ["thought", "final_answer"]),
        ("It is 4.", "", ["thought"]),
    ],
)
def test_final_answer_is_the_agents_and_the_text_of_the_model_is_kept(
    text: str, message: str, expected: list[str]
) -> None:
    steps = steps_of([asked(0, 0), said(0, text, logprobs=[-1.0])], result(message))
    assert [step.step_type.value for step in steps] == expected
    assert steps[0].log_probs == [-1.0]
    assert message in (steps[-1].content, "")


def test_results_in_a_programs_conversation_are_steps_of_type_result() -> None:
    records: list[Record] = [
        asked(0, 0, *TASK),
        said(0, None, call("a", "{}")),
        asked(1, 3, told("a", "x.py")),
        said(1, "ok"),
    ]
    steps = steps_of(records, result("exit code 0"))
    assert [(step.step_type, step.tool_name) for step in steps[3:4]] == [(StepType.ACTION_RESULT, "bash")]
    assert steps[-1].content == "exit code 0"


def test_repeated_history_is_shown_once_and_a_reminder_twice() -> None:
    reminder = {"role": "user", "content": "go on"}
    records: list[Record] = [
        asked(0, 0, *TASK),
        said(0, "hm"),
        asked(1, 3, reminder),
        said(1, "hm"),
        asked(2, 5, reminder),
        said(2, "hm"),
        asked(3, 0, *TASK, {"role": "user", "content": "summary"}, branch=1),
        said(3, "hm"),
    ]
    found = [text for kind, text in brief(records, result("", StopReason.MAX_TURNS)) if kind == "observation"]
    assert found == ["be good", "fix it", "go on", "go on", "summary"]


def trajectory(steps: list[TrajectoryStep], **fields: Any) -> Trajectory:
    return Trajectory(request_id="run/0", steps=steps, is_completed=True, **fields)


def test_ungraded_rollout_has_no_reward_instead_of_zero() -> None:
    assert trajectory([]).get_total_reward() is None
    assert trajectory([], final_reward=0.0).get_total_reward() == 0


def test_response_of_an_unfinished_rollout_is_the_last_output_of_the_model() -> None:
    records: list[Record] = [asked(0, 0, *TASK), said(0, "I look.", call("a", "{}")), gave(0, ("a", "x.py"))]
    steps = steps_of(records, result("", StopReason.MAX_TURNS))
    assert trajectory(steps).get_final_response() == "{}"
    assert [step.tool_name for step in trajectory(steps).get_tool_calls()] == ["bash"]
    assert trajectory([]).get_final_response() == ""


def test_json_keeps_logprobs_and_masks() -> None:
    branch = Branch(token_ids=[1, 2], mask=[0, 1], logprobs=[0.0, -0.5], policy_versions=[None, "3"])
    step = TrajectoryStep(step_type=StepType.THOUGHT, content="ä", turn=0, log_probs=[-0.5])
    kept = trajectory([step], tokens=[branch], metadata={"task": "t"})
    data = json.loads(kept.to_json())
    assert (data["steps"][0]["log_probs"], data["tokens"][0]["mask"]) == ([-0.5], [0, 1])
    assert Trajectory.from_dict(data) == kept


texts = st.text(max_size=20)
answers = st.tuples(st.none() | texts, st.lists(texts, max_size=3), st.integers(0, 3))


@given(st.lists(answers, max_size=5), texts)
def test_each_tool_call_and_each_result_is_one_step_with_any_text(
    turns: list[tuple[str | None, list[str], int]], final: str
) -> None:
    records: list[Record] = []
    for number, (text, arguments, missing) in enumerate(turns):
        calls = [call(f"{number}-{position}", written) for position, written in enumerate(arguments)]
        results = [(one["id"], "r") for one in calls][missing:]
        records += [asked(number, 99, *(TASK if number == 0 else [])), said(number, text, *calls)]
        records += [gave(number, *results)]
    found = steps_of(records, result(final))
    kinds = [step.step_type for step in found]
    assert kinds.count(StepType.ACTION) == sum(len(arguments) for _, arguments, _ in turns)
    assert kinds.count(StepType.ACTION_RESULT) == sum(max(0, len(written) - gone) for _, written, gone in turns)
    assert kinds.count(StepType.FINAL_ANSWER) == bool(final)
    again = trajectory(found)
    assert Trajectory.from_dict(json.loads(json.dumps(again.to_dict()))) == again
