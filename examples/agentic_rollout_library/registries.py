"""Agents and tools by name: list them, create them, and register new ones for the current process."""

from agent_rollouts import agents, tools
from agent_rollouts.agents import ToolCalling
from agent_rollouts.errors import ExtensionError
from agent_rollouts.tools import FunctionTool


@agents.agent("MathTutor")
class MathTutor(ToolCalling):
    system_prompt = "Explain every step to a pupil."


@tools.tool
async def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}!"


async def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


for volume in (1, 2):
    tools.registry.register(f"shout-{volume}", FunctionTool(shout, name=f"shout_{volume}", runs_in="Runner"))

print("agents:", ", ".join(agents.registry.names()))
print("tools:", ", ".join(tools.registry.names()))
for name in ("MathTutor", "ReAct", "agent_runtime.agents.tool_calling:Coding"):
    print(f"{name} makes a {type(agents.find_agent(name)()).__name__}")
for made in tools.open_tools(["calculator", "greet", "shout-1", "commands-and-files"]).values():
    print(f"{made.name}: {list(made.parameters['properties'])}, runs in the {made.runs_in.lower()}")
try:
    agents.find_agent("ReActt")
except ExtensionError as error:
    print(error)
