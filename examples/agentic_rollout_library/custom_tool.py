"""User-defined tools: a class with `execute`, a decorated function, and a built-in tool with another description."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from agent_rollouts.agentic_rollout_library import create_agent, create_tool, llm_client_from_environment
from agent_rollouts.errors import ToolError
from agent_rollouts.tools import tool


class WeatherTool:
    """The temperature of a city today."""

    def __init__(self, degrees: Mapping[str, float]) -> None:
        self.degrees = degrees

    async def execute(self, city: str) -> dict[str, Any]:
        if city not in self.degrees:
            raise ToolError(f"unknown city {city!r}; the known cities are {', '.join(self.degrees)}")
        return {"city": city, "degrees": self.degrees[city]}


@tool(runs_in="Runner", idempotent=True)
async def convert_temperature(degrees: float, to: Annotated[Literal["C", "F"], "The unit that is wanted."]) -> str:
    """Convert a temperature from the other unit."""
    return f"{(degrees - 32) / 1.8:.1f} C" if to == "C" else f"{degrees * 1.8 + 32:.1f} F"


class CustomDescriptionWrapper:
    """A tool with another description."""

    def __init__(self, tool: Any, description: str) -> None:
        self.tool, self.custom_description = tool, description

    def get_description(self) -> str:
        return self.custom_description

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)


async def main() -> None:
    agent = create_agent("Tool", {"max_steps": 6})
    agent.set_tools(
        {
            "weather": WeatherTool({"Berlin": 20.0}),
            "convert_temperature": convert_temperature,
            "arithmetic": CustomDescriptionWrapper(create_tool("Calculator"), "Works out one line, exactly."),
        }
    )
    trajectory = await agent.run_trajectory(
        prompt="How warm is it in Berlin, in Fahrenheit?",
        llm_generate_func=llm_client_from_environment().generate,
        request_id="custom-tool",
    )
    for step in trajectory.steps:
        print(f"{step.step_type}: {step.content}")


asyncio.run(main())
