"""The examples on the pages about agents and tools, run unchanged."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.agents.registry import find_agent
from agent_runtime.tools.registry import open_tools
from rollout_api.rollout_job import Agent
from tests.support.documentation import blocks
from tests.support.mini_swe_agent import COMMAND, ENVIRONMENT

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / name for name in ("agents-and-tools.md", "coding-agents.md", "mcp-tools.md")]


def shown(language: str) -> list[str]:
    return [block.text for page in PAGES for block in blocks(page) if block.language == language]


@pytest.fixture(scope="module")
def examples() -> Any:
    names: dict[str, Any] = {}
    for block in shown("python"):
        exec(compile(block, str(PAGES[0]), "exec"), names)
    return names


async def test_the_smallest_agent_answers(attempt: Any, examples: Any) -> None:
    assert await find_agent("OneQuestion")().run(attempt({"content": "42"})) == "42"


async def test_the_agent_with_a_short_memory_sends_less(attempt: Any, examples: Any) -> None:
    compute = {"toolCalls": [{"name": "calculator", "arguments": {"expression": "1"}}]}
    context = attempt(*[compute] * 15, {"content": "end"})
    assert await examples["ShortMemory"]().run(context) == "end"
    assert len(context.requests[-1][0]) == 22


async def test_the_planner_gives_each_step_to_a_sub_agent(attempt: Any, examples: Any) -> None:
    compute = {"toolCalls": [{"name": "calculator", "arguments": {"expression": "1"}}]}
    context = attempt({"content": "add\nmultiply"}, compute, {"content": "added"}, {"content": "multiplied"})
    assert await examples["Planner"]().run(context) == "added; multiplied"
    assert [messages[-1]["content"] for messages, _ in context.requests[1::2]] == ["add", "multiply"]


def test_documented_manifests_are_valid_and_the_mini_swe_agent_one_is_tested() -> None:
    manifests = [yaml.safe_load(block) for block in shown("yaml")]
    agents = [Agent.model_validate(block["agent"]) for block in manifests]
    assert len(agents) == 5
    (mini,) = (block for block, agent in zip(manifests, agents, strict=True) if agent.trajectory)
    assert mini["agent"]["command"] == COMMAND
    assert {(variable["name"], variable["value"]) for variable in mini["sandbox"]["env"]} <= set(ENVIRONMENT.items())


async def test_documented_tools_can_be_opened_and_called(examples: Any) -> None:
    assert list(open_tools(["count"])["count"].parameters["properties"]) == ["path", "unit"]
    assert (await examples["Lookup"]().execute({"word": "x"}, None)).content == "x: a word"


def test_every_built_in_that_the_page_names_exists() -> None:
    text = PAGES[0].read_text()
    for name in ("ToolCalling", "Coding", "SWE", "ReAct", "Oracle", "Nop"):
        assert f"`{name}`" in text
        assert find_agent(name).__name__ == name
    named = ["bash", "editor", "terminal", "search", "calculator", "finish", "commands-and-files"]
    assert all(f"| `{name}` |" in text for name in named)
    assert len(open_tools(named)) == 10
