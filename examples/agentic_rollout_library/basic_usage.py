"""An agent with a shell, an editor and a search tool creates a file."""

import asyncio
import os

from agent_rollouts.agentic_rollout_library import GeneralAgent, create_llm_client, create_tool


async def main() -> None:
    tools = {
        "bash": create_tool("BashExecutor"),
        "editor": create_tool("FileEditor"),
        "search": create_tool("Search"),
        "finish": create_tool("Finish"),
    }
    agent = GeneralAgent(max_rounds=10, termination_tool_names=["finish"])
    agent.set_tools(tools)
    llm_client = create_llm_client(
        api_key=os.environ["LLM_API_KEY"], base_url=os.environ["LLM_BASE_URL"], model=os.environ["LLM_MODEL_NAME"]
    )
    result = await agent.run_trajectory(
        prompt="Create a hello.py in the current directory.",
        llm_generate_func=llm_client.generate,
        request_id="task-001",
    )
    print(result.get_final_response())


asyncio.run(main())
