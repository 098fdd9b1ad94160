"""Tools and agents by name: built-ins, entry points of installed packages, module:name, and registered ones."""

import sys
from typing import Any, cast

import pytest

from agent_runtime.agents.registry import agent, find_agent
from agent_runtime.extensions import ExtensionError
from agent_runtime.tools.base import FunctionTool, Tool, ToolResult
from agent_runtime.tools.registry import open_tools, registry, tool
from rollout_api.rollout_job import Agent

MODULE = '''
from agent_runtime.tools.base import ToolResult

async def count(path: str) -> str:
    """Count."""
    return path

class Weigh:
    name = "weigh"
    description = "Weighs."
    parameters = {"type": "object", "properties": {}}
    runs_in = "Runner"
    idempotent = True

    async def execute(self, arguments, context):
        return ToolResult("7")

class Patient:
    async def run(self, context):
        return None

class Demanding(Patient):
    def __init__(self, retries):
        self.retries = retries

class Unlicensed(Weigh):
    def __init__(self):
        raise KeyError("licence")

half_a_tool = object()
'''


@pytest.fixture
def package(tmp_path: Any, monkeypatch: Any) -> Any:
    """Install a package with entry points."""
    (tmp_path / "weighing_kit.py").write_text(MODULE)
    (tmp_path / "broken_kit.py").write_text("1 / 0\n")
    (tmp_path / "exiting_kit.py").write_text("raise SystemExit(2)\n")
    metadata = tmp_path / "weighing_kit-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: weighing-kit\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[agent_rollouts.tools]\nscales = weighing_kit:Weigh\ntwice = weighing_kit:count\nbroken = broken_kit:x\n"
        "[agent_rollouts.agents]\nPatient = weighing_kit:Patient\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("weighing_kit", None)


def test_default_tools_of_a_manifest_exist() -> None:
    tools = open_tools(Agent().tools)
    assert list(tools) == ["bash", "editor", "search", "finish"]
    assert all(isinstance(made, Tool) for made in tools.values())
    assert all(made.description and made.parameters["type"] == "object" for made in tools.values())


def test_agent_that_cannot_be_made_or_imported_is_named_before_the_run(package: Any) -> None:
    with pytest.raises(ExtensionError, match=r"weighing_kit:Demanding.*'retries'; .*context\.spec\.config"):
        find_agent("weighing_kit:Demanding")
    with pytest.raises(
        ExtensionError, match=r"importing exiting_kit failed in .*exiting_kit.py:\d+ with SystemExit: 2"
    ):
        find_agent("exiting_kit:Agent")


def test_a_set_gives_all_its_tools() -> None:
    assert list(open_tools(["commands-and-files"])) == ["execute_command", "write_file", "read_file", "mark_done"]
    assert list(open_tools(["read_file"])) == ["read_file"]


def test_tools_and_agents_of_an_installed_package_are_found_by_entry_point(package: Any) -> None:
    assert list(open_tools(["scales", "bash"])) == ["weigh", "bash"]
    assert type(find_agent("Patient")()).__name__ == "Patient"


def test_module_and_name_always_work(package: Any) -> None:
    assert list(open_tools(["weighing_kit:count", "weighing_kit:Weigh"])) == ["count", "weigh"]
    assert type(find_agent("weighing_kit:Patient")()).__name__ == "Patient"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("bahs", r"no tool is named 'bahs' \(did you mean 'bash'\?\).*calculator.*agent_rollouts\.tools"),
        ("broken", r"importing broken_kit failed in .*broken_kit.py:\d+ with ZeroDivisionError"),
        (
            "broken_kit:x",
            r"importing broken_kit failed in .*broken_kit.py:\d+ with ZeroDivisionError: division by zero",
        ),
        (
            "no_kit:x",
            r"No module named 'no_kit'; install the package, put the module beside the manifest, .* .this is Python 3",
        ),
        ("weighing_kit:Weihg", r"has no 'Weihg' \(did you mean 'Weigh'\?\)"),
        ("weighing_kit:half_a_tool", "lacks name, description"),
        ("weighing_kit:Unlicensed", r"creating it failed in .*weighing_kit.py:\d+ with KeyError: 'licence'"),
    ],
)
def test_tool_that_cannot_be_loaded_is_named_with_the_reason(name: Any, complaint: Any, package: Any) -> None:
    with pytest.raises(ExtensionError, match=complaint):
        open_tools([name])


def test_two_packages_of_the_same_name_are_distinguished(package: Any, monkeypatch: Any) -> None:
    metadata = package / "other_kit-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-kit\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[agent_rollouts.tools]\nscales = other_kit:Scales\n")
    with pytest.raises(ExtensionError, match=r"(weighing-kit.*other-kit|other-kit.*weighing-kit).*uninstall one"):
        open_tools(["scales"])


async def test_a_name_may_stand_for_a_tool_that_one_run_alone_knows() -> None:
    async def mine() -> str:
        """Mine."""
        return "mine"

    own = {"search": FunctionTool(mine, name="search")}
    assert open_tools(["search", "bash"], own)["search"] is own["search"]
    assert open_tools(["search"])["search"] is not own["search"]


def test_two_tools_of_the_same_name_are_refused() -> None:
    with pytest.raises(ExtensionError, match="read_file and commands-and-files both provide a tool named 'read_file'"):
        open_tools(["read_file", "commands-and-files"])


async def test_a_decorated_function_is_a_tool_by_its_name() -> None:
    @tool
    async def shout(text: str) -> str:
        """Shout."""
        return text.upper()

    @tool(name="whisper", runs_in="Runner", idempotent=True)
    async def _whisper(text: str) -> str:
        """Whisper."""
        return text.lower()

    tools = open_tools(["shout", "whisper"])
    assert tools["shout"] is shout
    assert (tools["whisper"].runs_in, tools["whisper"].idempotent) == ("Runner", True)
    assert (await shout.execute({"text": "a"}, cast(Any, None))).content == "A"


def test_decorated_class_is_a_tool_with_an_instance_for_each_job() -> None:
    @tool
    class Counter:
        name = "counter"
        description = "Counts."
        parameters = {"type": "object"}
        runs_in = "Runner"
        idempotent = False

        async def execute(self, arguments: Any, context: Any) -> Any:
            return ToolResult("1")

    first, second = open_tools(["counter"])["counter"], open_tools(["counter"])["counter"]
    assert isinstance(first, Counter)
    assert first is not second


def test_built_in_names_cannot_be_replaced_and_own_ones_can_be_defined_again() -> None:
    async def bash(command: str) -> str:
        """Mine."""
        return ""

    with pytest.raises(ExtensionError, match="'bash' is a built-in"):
        tool(bash)
    with pytest.raises(ExtensionError, match="'Nop' is a built-in"):
        agent("Nop")(type("Mine", (), {}))
    for _ in range(2):

        @tool
        async def again() -> str:
            """Like a notebook cell that is run twice."""
            return ""

    assert registry.find("again") is again


def test_a_function_that_is_not_async_is_refused_when_it_is_decorated() -> None:
    with pytest.raises(TypeError, match="use `async def`"):
        FunctionTool(cast(Any, lambda: "x"))


async def test_a_decorated_agent_is_found_and_a_wrong_one_is_refused() -> None:
    @agent("Sleeper")
    class Sleeper:
        async def run(self, context: Any) -> Any:
            return "slept"

    assert await find_agent("Sleeper")().run(cast(Any, None)) == "slept"
    with pytest.raises(ExtensionError, match="has no `async def run"):
        find_agent("builtins:dict")
    with pytest.raises(ExtensionError, match="not a class"):
        find_agent("json:dumps")
