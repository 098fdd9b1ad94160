"""Tool calls of one turn: whose time they take."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from agent_runtime.agents.base import AgentContext
from agent_runtime.engine.tool_calls import agents_seconds
from agent_runtime.models.base import ToolCall
from agent_runtime.tools.base import ToolContext, ToolResult
from rollout_api.records import Observation, StopReason
from tests.unit.engine.test_turns import Count, CountingModel, MemoryJournal, turns_of


class Beside(Count):
    runs_in: ClassVar[Literal["Sandbox", "Runner"]] = "Runner"


class Excused(Beside):
    """A world that the agent acts in: slow, and not for the agent to pay."""

    takes_agents_time = False

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        await asyncio.sleep(0.1 * int(context.call_id))
        return ToolResult("done")


async def test_a_slow_world_takes_none_of_the_agents_time_however_often_it_is_asked_at_once() -> None:
    class Acting:
        async def run(self, context: AgentContext) -> str | None:
            await context.call_tools([ToolCall(str(wait), "count", "{}") for wait in (1, 13)])
            return "done"

    turns = turns_of(MemoryJournal(), CountingModel(1, []), [], tool=Excused([]), agent_seconds=1)
    assert await turns.run_agent(Acting()) == (StopReason.FINISHED, "done")


def test_a_resumed_agent_is_charged_what_its_calls_took_one_after_another_or_side_by_side() -> None:
    tools = {"bash": Count([]), "search": Beside([]), "act": Excused([])}
    seconds = {"bash": (3.0, 4.0), "search": (5.0, 6.0), "act": (90.0,), "unknown": (0.5,)}

    def of(*names: str) -> float:
        results = [
            Observation(call_id="c", tool=name, content="", seconds=each) for name in names for each in seconds[name]
        ]
        return agents_seconds(results, tools)

    assert of("bash") == 7, "in the workspace, one waits for the other"
    assert of("search") == 6
    assert of("bash", "search", "unknown") == 7
    assert of("act") == 0
