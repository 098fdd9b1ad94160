"""A rollout is shown as it happened, and no text of a model can control the reader's terminal."""

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from rollout_api.records import (
    FailedRecord,
    IntentRecord,
    Observation,
    ObservationsRecord,
    Record,
    ResponseRecord,
    StopReason,
    StopRecord,
)
from rolloutctl.ui.console import harmless, json_text
from rolloutctl.ui.transcript import readable_arguments, steps, text_of


def call(call_id: str, arguments: str = "{}") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def intent(turn: int, *messages: dict[str, object], keep: int = 0, branch: int = 0) -> IntentRecord:
    return IntentRecord(turn=turn, time=0, keep=keep, messages=list(messages), branch=branch)


def response(turn: int, text: str, *calls: dict[str, object]) -> ResponseRecord:
    message = {"role": "assistant", "content": text, "tool_calls": list(calls)}
    return ResponseRecord(turn=turn, time=0, seconds=1, message=message, finish_reason="stop")


def observed(turn: int, **contents: str) -> ObservationsRecord:
    results = [Observation(call_id=call_id, tool="bash", content=content) for call_id, content in contents.items()]
    return ObservationsRecord(turn=turn, time=0, results=results)


def test_each_tool_result_is_shown_once_after_its_own_call() -> None:
    records: list[Record] = [
        intent(0, {"role": "user", "content": "go"}),
        response(0, "two calls", call("a"), call("b")),
        observed(0, b="result of b", a="result of a"),
        intent(
            1,
            {"role": "tool", "tool_call_id": "a", "content": "result of a"},
            {"role": "tool", "tool_call_id": "b", "content": "result of b"},
            keep=2,
        ),
        response(1, "done"),
        StopRecord(time=0, stop_reason=StopReason.FINISHED),
        StopRecord(time=1, stop_reason=StopReason.FINISHED),
    ]
    shown = steps(records)
    assert [(step.role, step.text) for step in shown] == [
        ("user", "go"),
        ("assistant", "two calls"),
        ("assistant", "done"),
        ("note", "The agent stopped, Finished"),
    ]
    assert [call.result for call in shown[1].calls] == ["result of a", "result of b"]


def test_each_call_of_a_tool_that_raised_has_its_own_traceback() -> None:
    failed = [Observation(call_id=name, tool="bash", content="", traceback=f"KeyError: '{name}'") for name in "ab"]
    shown = steps([response(0, "", call("a"), call("b")), ObservationsRecord(turn=0, time=0, results=failed)])
    assert [call.traceback for call in shown[0].calls] == ["KeyError: 'a'", "KeyError: 'b'"]


def test_answers_that_an_agent_sends_again_are_not_shown_twice() -> None:
    records: list[Record] = [
        intent(0, {"role": "user", "content": "go"}, {"role": "assistant", "content": "an example"}),
        response(0, "first", call("a")),
        observed(0, a="done"),
        intent(1, {"role": "assistant", "content": "first"}, {"role": "user", "content": "on"}, keep=2, branch=1),
        response(1, "", call("b")),
        intent(2, {"role": "assistant", "content": None}, keep=4, branch=2),
        response(2, "last"),
    ]
    shown = [(step.role, step.text, step.turn) for step in steps(records) if step.role.startswith("assistant")]
    assert shown == [
        ("assistant message", "an example", None),
        ("assistant", "first", 0),
        ("assistant", "", 1),
        ("assistant", "last", 2),
    ]


def test_call_of_an_agents_own_code_is_shown_with_its_arguments() -> None:
    result = Observation(call_id="own", tool="bash", content="hi", arguments='{"command": "echo hi"}')
    (step,) = steps([response(0, "text"), ObservationsRecord(turn=0, time=0, results=[result])])
    assert [(call.name, call.arguments) for call in step.calls] == [("bash", '{"command": "echo hi"}')]


def test_an_unfinished_turn_shows_the_call_that_has_no_result_yet() -> None:
    (step,) = steps([response(0, "", call("a"))])
    assert step.calls[0].result is None


def test_results_that_a_program_reports_in_its_next_request_stand_with_their_calls() -> None:
    results: list[dict[str, object]] = [
        {"role": "tool", "tool_call_id": name, "content": f"result of {name}"} for name in ("b", "a")
    ]
    shown = steps([intent(0), response(0, "", call("a"), call("b")), intent(1, *results), response(1, "done")])
    assert [(step.role, [call.result for call in step.calls]) for step in shown] == [
        ("assistant", ["result of a", "result of b"]),
        ("assistant", []),
    ]


def test_separate_conversation_of_a_program_is_not_called_rewritten() -> None:
    shown = steps([intent(0), response(0, "x"), intent(1, {"role": "user", "content": "A title?"}, branch=1)])
    assert "Another conversation begins here" in shown[1].text


def test_results_of_calls_that_were_written_as_text_are_shown_too() -> None:
    (step,) = steps([response(0, "Action: bash"), observed(0, a="output")])
    assert [(call.name, call.result) for call in step.calls] == [("bash", "output")]


def test_rewritten_conversation_is_marked() -> None:
    shown = steps([intent(0), response(0, "x"), intent(1, {"role": "user", "content": "summary"}, keep=1, branch=1)])
    assert "rewritten" in shown[1].text
    assert shown[2].text == "summary"


def test_lost_attempt_is_shown_with_its_reason() -> None:
    (step,) = steps([FailedRecord(time=0, reason="SandboxLost", message="node gone")])
    assert "SandboxLost" in step.text
    assert "node gone" in step.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_no_form_of_message_content_breaks_the_transcript(content: object) -> None:
    assert isinstance(text_of(content), str)


@given(st.text() | json_values.map(json.dumps))
def test_no_form_of_arguments_breaks_the_transcript_or_loses_text(arguments: str) -> None:
    pairs = readable_arguments(arguments)
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        assert [name for name, _ in pairs] == list(parsed)
    else:
        assert pairs == [("", arguments)]


@given(st.text(st.characters(codec=None) | st.sampled_from("\x1b[]0;mA\x07\x9b\u202e\ud800")))
def test_text_from_a_model_cannot_steer_a_terminal(text: str) -> None:
    shown = harmless(text)
    shown.encode()
    assert not [letter for letter in shown if unicodedata.category(letter) == "Cc" and letter not in "\n\t"]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs"])))
def test_ordinary_text_is_shown_unchanged(text: str) -> None:
    assert harmless(text) == text


@given(st.text(st.characters(codec=None) | st.sampled_from("\x1b]\x07\x7f\x9b\u061c\u202e")))
def test_json_cannot_steer_a_terminal_and_is_the_same_value(text: str) -> None:
    shown = json_text([text])
    assert json.loads(shown) == [text]
    assert not [letter for letter in shown if unicodedata.category(letter) == "Cc"]
    assert not set(shown) & set("\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
