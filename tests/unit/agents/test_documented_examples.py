"""The examples of docs/agents-and-tools.md, run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.agents.registry import find_agent
from agent_runtime.tools.registry import open_tools

PAGE = Path(__file__).parents[3] / "docs" / "agents-and-tools.md"


@pytest.fixture(scope="module")
def examples() -> Any:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


async def test_the_smallest_agent_answers(attempt: Any, examples: Any) -> None:
    assert await find_agent("OneQuestion")().run(attempt({"content": "42"})) == "42"


async def test_the_agent_with_a_short_memory_sends_less(attempt: Any, examples: Any) -> None:
    compute = {"toolCalls": [{"name": "calculator", "arguments": {"expression": "1"}}]}
    context = attempt(*[compute] * 15, {"content": "end"})
    assert await examples["ShortMemory"]().run(context) == "end"
    assert len(context.requests[-1][0]) == 22


async def test_the_tools_are_tools(examples: Any) -> None:
    assert list(open_tools(["count"])["count"].parameters["properties"]) == ["path", "unit"]
    assert (await examples["Lookup"]().execute({"word": "x"}, None)).content == "x: a word"


def test_every_built_in_that_the_page_names_exists() -> None:
    text = PAGE.read_text()
    for name in ("ToolCalling", "Coding", "SWE", "ReAct", "Oracle", "Nop"):
        assert f"`{name}`" in text
        assert find_agent(name).__name__ == name
    named = ["bash", "editor", "search", "calculator", "finish", "commands-and-files"]
    assert all(f"| `{name}` |" in text for name in named)
    assert len(open_tools(named)) == 9
