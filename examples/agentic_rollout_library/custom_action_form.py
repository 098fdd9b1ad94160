"""Tool calls in XML with a user-defined parser, and a system prompt built from the tools and some options."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from agent_rollouts.agentic_rollout_library import GeneralAgent, create_tools, llm_client_from_environment

FORM = "To call a tool, write <function=NAME><parameter=NAME>VALUE</parameter></function>."


def parse_xml_action(output: str) -> dict[str, Any] | None:
    call = re.search(r"<function=(\w+)>(.*?)</function>", output, re.DOTALL)
    if call is None:
        return None
    arguments = re.findall(r"<parameter=(\w+)>(.*?)</parameter>", call[2], re.DOTALL)
    return {"tool_name": call[1], "tool_args": dict(arguments)}


def generate_custom_prompt(tools: Mapping[str, Any], **options: str) -> str:
    described = "\n".join(f"- {name}: {tool.get_description()}" for name, tool in tools.items())
    return f"You are {options['role']}. {options['additional_instructions']}\n\nTools:\n{described}\n\n{FORM}"


async def main() -> None:
    tools = create_tools({"bash": {"timeout": 30}, "finish": {}})
    agent = GeneralAgent(action_parser=parse_xml_action)
    agent.set_tools(tools)
    agent.system_prompt = generate_custom_prompt(
        tools, role="a Python developer", additional_instructions="Keep to PEP 8."
    )
    trajectory = await agent.run_trajectory(
        prompt="add.py subtracts. Mend it.",
        llm_generate_func=llm_client_from_environment().generate,
        request_id="fix",
        files=[{"path": "add.py", "content": "print(2 - 3)\n"}],
        verifier={"commands": ['test "$(python3 add.py)" = 5']},
    )
    for call in trajectory.get_tool_calls():
        print(f"{call.tool_name}: {call.tool_args}")
    print("reward:", trajectory.get_total_reward())


asyncio.run(main())
