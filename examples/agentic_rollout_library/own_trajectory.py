"""An agent that builds its own trajectory: the `CustomReasoningAgent` of agentic-rollout-library's README."""

import asyncio
import re

from agent_rollouts.agentic_rollout_library import (
    BaseAgent,
    StepType,
    Trajectory,
    TrajectoryStep,
    llm_client_from_environment,
)


class CustomReasoningAgent(BaseAgent):
    async def run_trajectory(self, prompt, llm_generate_func, request_id, **kwargs):
        trajectory = Trajectory(request_id=request_id)
        task = TrajectoryStep(step_type=StepType.OBSERVATION, content=str(prompt.get("content", prompt)))
        trajectory.add_step(task)

        while self.should_continue(trajectory):
            response = await llm_generate_func(self.format_messages_for_llm(trajectory))
            step = self.parse_llm_output(response)
            trajectory.add_step(step)
            if step.tool_name:
                trajectory.add_step(await self.execute_tool_call(step.tool_name, step.tool_args, trajectory))

        self.finalize_trajectory(trajectory)
        return trajectory

    def parse_llm_output(self, output, step_type=StepType.THOUGHT):
        if match := re.search(r"calculate\((.+)\)", output):
            arguments = {"expression": match[1]}
            return TrajectoryStep(
                step_type=StepType.ACTION, content=output, tool_name="calculator", tool_args=arguments
            )
        return super().parse_llm_output(output, StepType.FINAL_ANSWER)


class CalculatorTool:
    """Evaluates an arithmetic expression."""

    async def execute(self, expression):
        left, right = expression.split("*")
        return {"result": int(left) * int(right), "expression": expression}


async def main() -> None:
    agent = CustomReasoningAgent(max_steps=8)
    agent.set_tools({"calculator": CalculatorTool()})
    llm = llm_client_from_environment()
    trajectory = await agent.run_trajectory({"content": "What is 17 * 23?"}, llm.generate, "custom-reasoning")
    for step in trajectory.steps:
        print(f"{step.step_type}: {step.content}")


asyncio.run(main())
