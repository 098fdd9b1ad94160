"""Tools as an agent in Python gets them."""

from typing import Any, cast

import pytest

from agent_runtime.extensions import ExtensionError
from agent_runtime.tools.base import FunctionTool, ToolContext, ToolResult
from agent_runtime.tools.registry import tool
from rollout_api.tasks import Task
from rolloutctl.agents.tools import NamedTool, create_tool, create_tools

# These tools use no workspace.
CONTEXT = ToolContext(cast(Any, None), Task(name="t", prompt="p"), "c", 60)


async def result_of(thing: Any, stops: bool = False, **arguments: Any) -> ToolResult:
    return await NamedTool("mine", thing, stops=stops).execute(arguments, CONTEXT)


async def test_option_replaces_the_default_of_an_argument_and_nothing_else() -> None:
    calculator = create_tool("Calculator", {"precision": 3})
    assert (await result_of(calculator, expression="1 / 7")).content == "0.143"
    assert (await result_of(calculator, expression="1 / 7", precision=5)).content == "0.14286"
    assert calculator.parameters["properties"]["precision"]["default"] == 3
    assert "default" not in create_tool("Search").parameters["properties"]["pattern"]
    assert '"default": 3' in calculator.get_description()


def test_argument_with_an_option_is_not_required() -> None:
    assert "expression" not in create_tool("Calculator", {"expression": "1"}).parameters["required"]


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        (
            "BashExecutor",
            {"shell": "/bin/zsh"},
            "bash has no option shell; its options are its arguments: command, timeout",
        ),
        (
            "FileEditor",
            {"execution_mode": "k8s", "pod_name": "my-dev-pod", "namespace": "default"},
            "editor: execution_mode, namespace, pod_name: .* sandbox={.provider.: .Kodo.*apply a RolloutJob",
        ),
    ],
)
def test_option_without_effect_is_refused_with_an_alternative(name: str, options: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        create_tool(name, options)


def test_unknown_tool_name_is_refused() -> None:
    with pytest.raises(ExtensionError, match="no tool is named 'Serch'"):
        create_tool("Serch")


async def test_options_of_a_registered_class_go_to_its_constructor() -> None:
    @tool
    class Lookup:
        name = "lookup_of_agents"
        description = "Looks up."
        parameters = {"type": "object", "properties": {}}
        runs_in = "Runner"
        idempotent = True

        def __init__(self, words: str = "none") -> None:
            self.words = words

        async def execute(self, arguments: Any, context: Any) -> ToolResult:
            return ToolResult(self.words)

    assert (await result_of(create_tool("lookup_of_agents", {"words": "two"}))).content == "two"


def test_created_tools_have_the_names_that_the_model_sees() -> None:
    assert list(create_tools({"BashExecutor": {"timeout": 5}, "Finish": {}, "search": {}})) == [
        "bash",
        "finish",
        "search",
    ]


class Plain:
    """Returns its text twice."""

    async def execute(self, text: str, times: int = 2) -> dict[str, str]:
        return {"said": text * times}


async def test_an_object_with_execute_is_a_tool_by_its_signature() -> None:
    named = NamedTool("mine", Plain(), stops=False)
    assert (named.name, named.description, named.runs_in) == ("mine", "Returns its text twice.", "Runner")
    assert named.parameters["required"] == ["text"]
    assert (await result_of(Plain(), text="a")).content == '{"said": "aa"}'


async def test_parameter_without_a_type_takes_any_value() -> None:
    class Untyped:
        async def execute(self, text, times=1):  # type: ignore[no-untyped-def]
            return [text] * times

    assert NamedTool("mine", Untyped(), stops=False).parameters["properties"]["text"] == {}
    assert (await result_of(Untyped(), text={"a": 1})).content == '[{"a": 1}]'


def test_wrapper_has_its_own_description_and_the_behaviour_of_the_wrapped_tool() -> None:
    class Wrapper:
        def __init__(self, wrapped: Any) -> None:
            self.wrapped = wrapped

        def get_description(self) -> str:
            return "In other words."

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wrapped, name)

    named = NamedTool("mine", Wrapper(create_tool("Calculator")), stops=False)
    assert (named.description, list(named.parameters["properties"])) == ("In other words.", ["expression", "precision"])


async def test_work_ends_only_after_a_successful_call_of_a_termination_tool() -> None:
    async def hand_in(error: bool) -> ToolResult:
        """Hand in."""
        return ToolResult("handed in", error=error)

    handing_in = FunctionTool(hand_in, name="hand_in", runs_in="Runner")
    assert (await result_of(handing_in, stops=True, error=False)).stop
    assert not (await result_of(handing_in, stops=True, error=True)).stop
    assert not (await result_of(handing_in, error=False)).stop
    assert not (await result_of(create_tool("Finish"))).stop, "it is not among the tools that end the work"
