"""The agent interface: a class with `run`, which calls the model and the tools through its context.

All state of an agent must derive from its context's results. After a crash the engine runs the agent again from the
start, and answers its calls from the journal as far as they are recorded. So a resumed agent continues where it was. A
call that differs from the recorded one shows that the agent is not deterministic, and fails the attempt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.sandboxes.base import CommandResult
from agent_runtime.tools.base import Tool
from rollout_api.files import TaskFile
from rollout_api.records import Message, Observation, StopReason
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.tasks import Task


@dataclass(frozen=True)
class SubTask:
    """Instructions for a sub-agent."""

    prompt: str
    system_prompt: str | None = None
    """Replaces the agent's own system prompt."""
    tools: Sequence[str] | None = None
    """Names of the tools in `AgentContext.tools` that it may use; None: all."""
    max_turns: int | None = None
    """Limit of its model calls, which also count for the rollout's `maxTurns`."""


@dataclass(frozen=True)
class AgentReport:
    """How a sub-agent ended."""

    stop_reason: StopReason
    message: str


class AgentContext(Protocol):
    """Interface of one attempt for its agent. Every call is journaled before it takes effect, and limited by the
    rollout's budgets. Concurrent calls are made one after another, because a replay answers them in the same order.
    """

    task: Task
    spec: AgentSpec
    working_dir: str
    tools: Mapping[str, Tool]

    async def call_model(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelReply:
        """Make one turn's model call. `tools` are definitions in OpenAI's format; None: those of `self.tools`.
        Raises Stop when a budget is used up, and the errors that end the attempt; an agent must not catch them.
        """

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Run all or some tool calls of the turn. Each gets a result with its id, also after an error.

        Calls in the workspace run in order, others concurrently.

        Unknown tools, arguments that are not JSON or do not match the schema, and tools that raise give readable
        observations with `error` set. Raises Stop when a tool ends the rollout.
        """

    async def run_command(self, command: str) -> CommandResult:
        """Run a shell command in the workspace outside any model turn, as the Oracle does. `rolloutctl show` and the viewer
        have the command and its shortened output.

        Its time limit is the rest of the agent's time. The sandbox keeps the result for a resumed agent, so an attempt
        can make about 4,000 of these calls, including files written by `put_files`. Further commands are not started,
        and their results have a `start_error`; `put_files` raises FileError.
        """

    async def put_files(self, files: Sequence[TaskFile]) -> None:
        """Write files into the workspace outside any model turn, as the Oracle does. Raises FileError."""

    async def snapshot(self) -> None:
        """Store the workspace's state in object storage now, for `tasks.branch` of other jobs. Call it between turns."""

    async def checkpoint(self) -> str:
        """Save the current workspace and return its name. Processes in it are ended.

        An agent that searches a tree saves checkpoints and returns to them. Its turns are branches of the same rollout,
        and its last branch is graded. Not for agents that use `run_command`, and not in tasks with services or an
        environment.
        """

    async def go_back(self, checkpoint: str) -> None:
        """Continue with the workspace as it was at that checkpoint, any number of times. Processes are not restored."""

    async def delegate(self, agent: "Agent", part: SubTask) -> AgentReport:
        """Run a sub-agent on a part of the task, in the same workspace, until it ends.

        Its conversation is a branch of this rollout. Its turns and tokens count for the rollout's budgets, and a
        used-up budget ends both agents. Only one sub-agent runs at a time, because after a crash all calls are answered
        in their original order. Raises RuntimeError for a concurrent call, ValueError for an unknown tool.
        """


class Stop(Exception):
    """Ends the agent's work with a stop reason. The rollout is Completed and graded."""

    def __init__(self, reason: StopReason, message: str = "") -> None:
        super().__init__(message or reason.value)
        # the agent may pass a value from the model's answer, of any type
        self.reason, self.message = reason, str(message)


class Agent(Protocol):
    """An agent that works on a task."""

    async def run(self, context: AgentContext) -> str | None:
        """Work until done. Returning means Finished, with a message; raise Stop for another reason.

        Afterwards, calls of coroutines that the agent left running are cancelled or refused. Any other exception is the
        agent's own failure: the rollout is Completed with AgentError.
        """
