"""The agents that check a task without a model: Nop does nothing, Oracle runs the task's solution."""

from agent_runtime.agents.base import AgentContext, Stop
from rollout_api.records import StopReason


class Nop:
    """Does nothing."""

    async def run(self, context: AgentContext) -> str | None:
        return None


class Oracle:
    """Writes the solution's files and runs `task.solution`, one command after another."""

    async def run(self, context: AgentContext) -> str | None:
        """Run the commands. Raises Stop with AgentError if a command fails, or if the task has no solution."""
        if not context.task.solution:
            raise Stop(StopReason.AGENT_ERROR, f"task {context.task.name} has no solution; give it task.solution")
        await context.put_files(context.task.solution_files)
        for position, command in enumerate(context.task.solution):
            result = await context.run_command(command)
            if not result.ok:
                ended = f"solution[{position}] ({command}) ended with {result.ending}: {result.end_of_output}"
                raise Stop(StopReason.AGENT_ERROR, ended)
        return "ran the task's solution"
