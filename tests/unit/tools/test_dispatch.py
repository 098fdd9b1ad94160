"""From a call as the model wrote it to an observation."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.extensions import nearest
from agent_runtime.models.base import ToolCall
from agent_runtime.recording.segments import decode, encode
from agent_runtime.sandboxes.base import Fenced, SandboxFailure, WorkspaceLimit
from agent_runtime.tools.base import (
    FORMAT_ERROR,
    OBSERVATION_BYTES,
    FunctionTool,
    ToolContext,
    ToolError,
    ToolResult,
    decoded_arguments,
    dispatch,
    shortened,
)
from agent_runtime.tools.registry import open_tools
from rollout_api.records import ObservationsRecord
from rollout_api.tasks import Task

# These tools use no workspace.
CONTEXT = ToolContext(cast(Any, None), Task(name="t", prompt="p"), "c", 60)


def failing(error: BaseException) -> FunctionTool:
    async def fails() -> str:
        raise error

    return FunctionTool(fails)


class Doubled:
    """A tool as a class with its own schema."""

    name = "doubled"
    description = "Doubles."
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    runs_in = "Runner"
    idempotent = True

    async def execute(self, arguments: Any, context: Any) -> Any:
        return ToolResult(str(2 * arguments["n"]), data={"n": arguments["n"]})


TOOLS = {**open_tools(["calculator", "finish"]), "doubled": Doubled()}


async def call(name: str, arguments: str, tools: Any = TOOLS) -> Any:
    return await dispatch(tools, ToolCall("c", name, arguments), CONTEXT)


async def test_a_call_gives_its_result_under_its_own_id() -> None:
    observation = await call("doubled", '{"n": "21"}')
    assert (observation.call_id, observation.tool, observation.content) == ("c", "doubled", "42")
    assert (observation.error, observation.data, observation.stop) == (False, {"n": 21}, False)


async def test_a_tool_can_end_the_rollout() -> None:
    assert (await call("finish", "")).stop


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "words"),
    [
        ("calculater", "{}", "UnknownTool", ["did you mean 'calculator'?", "calculator, finish, doubled"]),
        ("calculator", '{"expression": "1"', "MalformedJson", ["not valid JSON", "character 18", "one complete"]),
        ("calculator", '["1"]', "MalformedJson", ["must be a JSON object"]),
        ("calculator", '{"expression": "\\ud800"}', "MalformedJson", ["an unpaired surrogate"]),
        ("calculator", "[" * 100_000, "MalformedJson", ["nested too deeply"]),
        ("calculator", "", "InvalidArguments", ["expression: is required"]),
        (
            "calculator",
            '{"expression": "1", "precision": 99}',
            "InvalidArguments",
            ["precision: ", "less than or equal"],
        ),
        ("doubled", '{"n": "x"}', "InvalidArguments", ["n: ", "integer", 'got "x"']),
    ],
)
async def test_a_call_that_cannot_be_made_is_explained_and_counted_as_a_format_error(
    name: Any, arguments: Any, kind: Any, words: Any
) -> None:
    observation = await call(name, arguments)
    assert observation.error
    assert observation.data == {FORMAT_ERROR: kind}
    for word in words:
        assert word in observation.content


async def test_tool_refusal_is_passed_on_and_is_not_a_format_error() -> None:
    observation = await call("fails", "{}", {"fails": failing(ToolError("no such file"))})
    assert (observation.content, observation.error, observation.data) == ("no such file", True, {})


async def test_traceback_of_a_tool_whose_call_of_ours_was_refused_ends_at_that_call() -> None:
    async def looks() -> str:
        return str(open_tools(["nothing"]))

    observation = await call("looks", "{}", {"looks": FunctionTool(looks)})
    first, *frames, error = observation.traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert [line for line in frames if line.startswith("  File ")] == [frames[0]]
    assert __file__ in frames[0]
    assert error.startswith("agent_runtime.extensions.ExtensionError: no tool is named 'nothing'")


class Wordless(Exception):
    """A library's error whose message cannot be built."""

    def __str__(self) -> str:
        raise KeyError("code")


async def test_traceback_of_a_tool_begins_in_its_own_code() -> None:
    observation = await call("fails", "{}", {"fails": failing(KeyError("x"))})
    assert "base.py" not in observation.traceback
    assert "in fails" in observation.traceback.splitlines()[1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "RuntimeError: SystemExit was raised: 3"),
        (asyncio.CancelledError(), "RuntimeError: CancelledError was raised"),
        (pytest.fail.Exception("no"), "RuntimeError: Failed was raised: no"),
        (Wordless(), f"{__name__}.Wordless: <exception str() failed>"),
    ],
)
async def test_a_tool_that_breaks_does_not_break_the_rollout(error: Any, words: str) -> None:
    observation = await call("fails", "{}", {"fails": failing(error)})
    assert observation.content == f"The tool fails failed with {words}"
    assert observation.error
    assert "raise error" in observation.traceback
    assert observation.traceback.endswith(words)


def returning(value: Any) -> Any:
    class Returning(Doubled):
        async def execute(self, arguments: Any, context: Any) -> Any:
            return value

    return Returning()


@pytest.mark.parametrize(
    "value", [object(), b"\xff", 10**5000, {(1, 2): 3}, {1}], ids=["object", "bytes", "number", "key", "set"]
)
async def test_tool_data_that_cannot_be_stored_is_left_out_and_reported(value: Any) -> None:
    result = ToolResult("done", stop=True, data={"value": value})
    observation = await call("doubled", '{"n": 1}', {"doubled": returning(result)})
    assert (observation.data, observation.stop, observation.error) == ({}, True, False)
    assert observation.content.startswith("done\n(the data that the tool returned was left out: ")
    decode("k", encode([ObservationsRecord(turn=0, time=0, results=[observation])]))


@pytest.mark.parametrize("value", [None, "text", ToolResult(cast(Any, None)), ToolResult(cast(Any, 7))])
async def test_tool_that_returns_no_text_has_failed_and_the_rollout_has_not(value: Any) -> None:
    observation = await call("doubled", '{"n": 1}', {"doubled": returning(value)})
    assert observation.error
    assert "expected a ToolResult with text" in observation.content


async def test_tool_call_ends_when_its_rollout_is_cancelled() -> None:
    async def endless() -> str:
        await asyncio.Event().wait()
        return ""

    running = asyncio.create_task(call("endless", "{}", {"endless": FunctionTool(endless)}))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("error", [SandboxFailure("NodeLost", "m"), WorkspaceLimit("Memory", "m"), Fenced()])
async def test_the_end_of_the_attempt_is_never_shown_to_the_model_as_a_result(error: Any) -> None:
    with pytest.raises(type(error)):
        await call("fails", "{}", {"fails": failing(error)})


async def test_long_result_is_shortened_for_the_context() -> None:
    async def long() -> str:
        return "start" + "ä" * OBSERVATION_BYTES + "end"

    content = (await call("long", "{}", {"long": FunctionTool(long)})).content
    assert len(content.encode()) < OBSERVATION_BYTES + 100
    assert content.startswith("start")
    assert content.endswith("end")
    assert "bytes omitted" in content


@given(st.text(), st.integers(2, 50))
def test_shortening_keeps_both_ends_and_counts_the_missing_characters(text: Any, limit: Any) -> None:
    cut = shortened(text, limit)
    data = text.encode()
    if len(data) <= limit:
        assert cut == text
        return
    head, _, rest = cut.rpartition("\n[… ")
    omitted, _, tail = rest.partition(" bytes omitted …]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + int(omitted) + len(tail.encode()) == len(data)


@given(st.text())
def test_any_arguments_are_an_object_or_a_readable_refusal(text: Any) -> None:
    try:
        assert isinstance(decoded_arguments(text), dict)
    except ValueError as error:
        assert "JSON" in str(error)  # noqa: PT017 - either outcome is right


def test_line_breaks_inside_of_strings_are_accepted() -> None:
    assert decoded_arguments('{"command": "a\nb"}') == {"command": "a\nb"}


def test_a_lone_surrogate_in_a_result_cannot_break_the_record() -> None:
    assert shortened("a\ud800b").encode() == b"a?b"


def test_very_long_names_are_not_compared() -> None:
    """The model chooses the length, and all rollouts wait while two long names are compared."""
    assert nearest("a" * 101, ["a" * 100]) == ""
    assert "did you mean" in nearest("a" * 99, ["a" * 100])
