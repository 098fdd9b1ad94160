"""Why a job cannot run a task."""

from rollout_api.rollout_job import RolloutJobSpec
from rollout_api.tasks import Task, VerifierMode


def task_problem(spec: RolloutJobSpec, task: Task) -> str | None:
    """Return why the job cannot run a task, listed or from a stream; None if it can."""
    agent, verifier = spec.agent, task.verifier
    if task.environment is not None and agent.is_program:
        return "has an environment, in which an agent that is a program cannot act"
    if verifier is not None and spec.verifier_of(task).mode is VerifierMode.SHARED:
        given = {"collect": verifier.collect, "image": verifier.image, "dockerfile": verifier.dockerfile}
        if fields := [f"verifier.{name}" for name, value in given.items() if value]:
            return (
                f"has {' and '.join(fields)}, which needs another workspace for the grading: leave out the mode Shared "
                "of its verifier, and of spec.verifier"
            )
    if task.steps and agent.is_program:
        return "has steps, which an agent that is a program does not support"
    servers = [server.name for server in agent.mcp_servers if server.command]
    if servers and any(step.verifier is not None for step in task.steps[:-1]):
        return (
            "has steps, and the grading of a step ends all processes in the sandbox: agent.mcpServers "
            f"{', '.join(servers)} would not answer in the next step; serve them at a url, or remove them"
        )
    return None
