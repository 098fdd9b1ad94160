"""A prompt that is built from named sections."""

from typing import Any

from agent_rollouts.agentic_rollout_library import PromptBuilder, create_tools


def custom_formatter(tool_name: str, tool: Any) -> str:
    return f"* {tool_name}: {tool.description.partition('.')[0]}."


tools = create_tools({"BashExecutor": {}, "Finish": {}})
builder = PromptBuilder()
prompt = (
    builder.add_variable("task", "fix bug #123")
    .add_tools(tools, formatter=custom_formatter)
    .add_context({"repo": "pandas", "version": "2.0"})
    .add_section("Instructions", "Your task: {task}. Look at the code before you change it.")
    .build()
)
print(prompt)
