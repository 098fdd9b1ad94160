"""User-defined agents: one with a single method, and one that changes every part of the common loop."""

import asyncio
from collections.abc import Sequence

from agent_rollouts.agentic_rollout_library import create_agent, llm_client_from_environment
from agent_rollouts.agents import AgentContext, BaseAgent, ParsedAnswer, Trajectory, agent
from agent_rollouts.models import ModelReply, ToolCall
from agent_rollouts.records import Message, Observation


@agent("OneQuestion")
class OneQuestion:
    """Makes one model call with the prompt; the answer is the result."""

    async def run(self, context: AgentContext) -> str | None:
        reply = await context.call_model([{"role": "user", "content": context.task.prompt}])
        return reply.text


@agent("Careful")
class Careful(BaseAgent):
    """Sends only some of the messages, makes one tool call at a time, and checks its answer before it finishes."""

    system_prompt = "Use the calculator for every number."

    async def run_trajectory(self, trajectory: Trajectory) -> None:
        await super().run_trajectory(trajectory)
        trajectory.messages.append({"role": "user", "content": "Look at it once more. Is that right?"})
        trajectory.final = None
        await super().run_trajectory(trajectory)

    def should_continue(self, trajectory: Trajectory) -> bool:
        return trajectory.final is None and len(trajectory.messages) < self.context.spec.config["most_messages"]

    def format_messages_for_llm(self, trajectory: Trajectory) -> Sequence[Message]:
        return [*trajectory.messages[:2], *trajectory.messages[2:][-20:]]

    def parse_llm_output(self, reply: ModelReply) -> ParsedAnswer:
        if len(reply.tool_calls) > 1:
            return ParsedAnswer(complaint="One tool call an answer, please.")
        return super().parse_llm_output(reply)

    async def execute_tool_call(self, calls: Sequence[ToolCall]) -> list[Observation]:
        observations = await super().execute_tool_call(calls)
        return [result.model_copy(update={"content": f"= {result.content}"}) for result in observations]

    def finalize_trajectory(self, trajectory: Trajectory) -> str | None:
        return trajectory.final and trajectory.final.strip().rstrip(".")


async def main() -> None:
    for name, config in (("OneQuestion", {}), ("Careful", {"most_messages": 40})):
        agent = create_agent(name, {"tool_names": ["calculator"], "config": config})
        trajectory = await agent.run_trajectory("What is 17 * 23?", llm_client_from_environment().generate, name)
        print(f"{name}: {trajectory.get_final_response()} after {trajectory.metadata['turns']} turns")


asyncio.run(main())
