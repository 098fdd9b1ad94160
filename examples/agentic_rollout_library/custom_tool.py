"""Tools of one's own: an async function, a class with `execute` and options, and a built-in told in other words."""

import asyncio
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from agent_runtime.models.from_environment import model_from_environment
from agent_runtime.tools.base import ToolContext, ToolError, ToolResult
from agent_runtime.tools.calculator import calculator
from agent_runtime.tools.registry import registry, tool
from rollout_api.base import API_VERSION
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client


@tool(runs_in="Runner", idempotent=True)
async def convert_temperature(degrees: float, to: Annotated[Literal["C", "F"], "The unit that is wanted."]) -> str:
    """Convert a temperature from the other unit."""
    return f"{(degrees - 32) / 1.8:.1f} C" if to == "C" else f"{degrees * 1.8 + 32:.1f} F"


class Weather:
    """Looks a city up."""

    name = "weather"
    description = "The temperature of a city today."
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    runs_in: Literal["Sandbox", "Runner"] = "Runner"
    idempotent = True

    def __init__(self, degrees: Mapping[str, float]) -> None:
        self.degrees = degrees

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Raises ToolError, which the model is told, for a city that nobody knows."""
        city = arguments["city"]
        if city not in self.degrees:
            raise ToolError(f"{city!r} is not known; there are {', '.join(self.degrees)}")
        return ToolResult(f"{self.degrees[city]} C", data={"degrees": self.degrees[city]})


class Described:
    """A tool with another name and description; all else is the tool's own."""

    def __init__(self, original: Any, name: str, description: str) -> None:
        self.original, self.name, self.description = original, name, description

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


registry.register("weather", Weather({"Berlin": 20.0}))
registry.register("arithmetic", Described(calculator, "arithmetic", "Works out one line of arithmetic, exactly."))


async def main() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "custom-tool"},
            "spec": {
                "mode": "Eval",
                "model": model_from_environment(os.environ),
                "agent": {"tools": ["weather", "convert_temperature", "arithmetic"], "maxTurns": 6},
                "tasks": {"inline": [{"name": "berlin", "prompt": "How warm is it in Berlin, in Fahrenheit?"}]},
                "output": {"uri": "out"},
            },
        }
    )
    client = Client()
    async for _ in client.run(job):
        pass
    async for trajectory in client.trajectories(job):
        for step in trajectory.steps:
            print(f"{step.step_type}: {step.content}")


asyncio.run(main())
