"""An agent and its tools, created from one configuration that shows all options."""

import asyncio

from agent_rollouts.agentic_rollout_library import AgenticRollout, AgenticRolloutConfig, llm_client_from_environment


async def main() -> None:
    config = AgenticRolloutConfig(
        agent_type="react",
        max_steps=10,
        max_tokens_per_step=512,
        temperature=0.7,
        tools_config={"calculator": {"precision": 4}, "search": {"max_results": 5}},
        batch_size=1,
        concurrent_requests=4,
        include_trajectory_in_output=True,
        save_trajectories=True,
        trajectory_save_path="./trajectories",
    )
    llm_generate_func = llm_client_from_environment().generate
    rollout = AgenticRollout(config=config, llm_generate_func=llm_generate_func)
    trajectory = await rollout.agent.run_trajectory(
        prompt={"content": "What is a seventh of 5?"}, llm_generate_func=llm_generate_func, request_id="math_example"
    )
    print(f"Final response: {trajectory.get_final_response()}")
    print(f"Total steps: {len(trajectory.steps)}")


asyncio.run(main())
