"""The model is an async function of messages, here one that asks with the openai package."""

import asyncio
import os
from typing import Any

import openai

from agent_rollouts.agentic_rollout_library import create_agent, create_tools


async def openai_llm_func(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    async with openai.AsyncOpenAI() as client:
        response = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, **kwargs)
    return response.choices[0].message.content or ""


async def main() -> None:
    agent = create_agent("React", {"max_tokens_per_step": 256})
    agent.set_tools(create_tools({"Calculator": {}}))
    trajectory = await agent.run_trajectory(
        prompt="What is the factorial of 5?", llm_generate_func=openai_llm_func, request_id="calc_example"
    )
    for call in trajectory.get_tool_calls():
        print(f"{call.tool_name}({call.tool_args})")
    print(trajectory.get_final_response())


asyncio.run(main())
