"""Tool calls of one turn, and whether their time counts."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest

from agent_runtime.agents.base import AgentContext
from agent_runtime.models.base import ToolCall
from agent_runtime.tools.base import ToolContext, ToolResult
from rollout_api.records import StopReason
from tests.unit.engine.test_turns import Count, CountingModel, MemoryJournal, turns_of

pytestmark = pytest.mark.usefixtures("virtual_clock")


class Beside(Count):
    runs_in: ClassVar[Literal["Sandbox", "Runner"]] = "Runner"


class Excused(Beside):
    """A slow environment whose time does not count for the agent."""

    takes_agents_time = False

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        await asyncio.sleep(0.1 * int(context.call_id))
        return ToolResult("done")


async def test_slow_environment_costs_no_agent_time_with_concurrent_calls() -> None:
    class Acting:
        async def run(self, context: AgentContext) -> str | None:
            await context.call_tools([ToolCall(str(wait), "count", "{}") for wait in (1, 13)])
            return "done"

    turns = turns_of(MemoryJournal(), CountingModel(1, []), [], tool=Excused([]), agent_seconds=1)
    assert await turns.run_agent(lambda: Acting()) == (StopReason.FINISHED, "done")
