"""Reads a trajectory step by step, writes it as JSON, and reads it again."""

import asyncio
import json
from pathlib import Path

from agent_rollouts.agentic_rollout_library import Trajectory, create_agent, llm_client_from_environment


async def main() -> None:
    agent = create_agent("Coding", {"tool_names": ["bash", "finish"], "max_steps": 5})
    trajectory = await agent.run_trajectory(
        prompt="Write the number of lines of log.txt into n.txt.",
        llm_generate_func=llm_client_from_environment().generate,
        request_id="count",
        files=[{"path": "log.txt", "content": "a\nb\nc\n"}],
        verifier={"commands": ['test "$(cat n.txt)" = 3']},
    )
    for step in trajectory.steps:
        print(f"{step.turn} {step.step_type.value}: {step.tool_name or step.content.splitlines()[0]}")
    print(f"Completed: {trajectory.is_completed}")
    print(f"Final response: {trajectory.get_final_response()}")
    print(f"Tool calls: {len(trajectory.get_tool_calls())}")
    print(f"Final reward: {trajectory.get_total_reward()}")
    path = Path("trajectory.json")
    path.write_text(json.dumps(trajectory.to_dict(), indent=2))
    print(f"Read again: {Trajectory.from_dict(json.loads(path.read_text())) == trajectory}")


asyncio.run(main())
