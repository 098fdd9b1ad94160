"""The agent that runs the task's own solution: shows that a task and its verifier work, without any model."""

from agent_runtime.agents.base import AgentContext, Stop
from rollout_api.records import StopReason

SHOWN_OUTPUT = 2000  # characters of a failed command's output: its end is where the error is


class Oracle:
    """Puts the solution's files in and runs `task.solution`, one command after another."""

    async def run(self, context: AgentContext) -> str | None:
        """Run the commands. Raises Stop with AgentError at the first that fails, and where there is none."""
        if not context.task.solution:
            raise Stop(StopReason.AGENT_ERROR, f"task {context.task.name} has no solution; give it task.solution")
        await context.put_files(context.task.solution_files)
        for position, command in enumerate(context.task.solution):
            result = await context.run_command(command)
            if not result.ok:
                ending = result.cause or (
                    f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
                )
                output = (result.stdout + result.stderr).decode(errors="replace").strip()[-SHOWN_OUTPUT:]
                raise Stop(StopReason.AGENT_ERROR, f"solution[{position}] ({command}) ended with {ending}: {output}")
        return f"ran {len(context.task.solution)} commands of the task's solution"
