"""An agent whose model is Claude, or another model behind Anthropic's Messages API."""

import asyncio
import os

from agent_rollouts.agentic_rollout_library import create_agent, create_llm_client


async def main() -> None:
    claude = create_llm_client(
        api_key=os.environ["ANTHROPIC_API_KEY"],
        base_url=f"{os.environ['ANTHROPIC_BASE_URL']}/v1",
        model=os.environ["ANTHROPIC_MODEL"],
        api="Anthropic",
    )
    agent = create_agent("Tool", {"tool_names": ["calculator"], "max_tokens_per_step": 1024, "max_steps": 5})
    trajectory = await agent.run_trajectory("What is 17 * 23?", claude.generate, "product")
    print(trajectory.get_final_response())
    print("and asked directly:", await claude.generate([{"role": "user", "content": "Say hello."}], max_tokens=16))


asyncio.run(main())
