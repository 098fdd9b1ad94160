"""What an agent is: a class with `run`, which calls the model and the tools through its context.

An agent keeps no state that is not derived from what its context returned. After a crash the engine runs it again from the
start and answers its calls from the journal up to where it was, so a resumed agent goes on as if nothing had happened. A
call that differs from the recorded one shows that the agent is not deterministic, and fails the attempt with that reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.sandboxes.base import CommandResult
from agent_runtime.tools.base import Tool
from rollout_api.records import Message, Observation, StopReason
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.tasks import Task, TaskFile


@dataclass(frozen=True)
class SubTask:
    """What a sub-agent is to do."""

    prompt: str
    system_prompt: str | None = None
    """Replaces the agent's own."""
    tools: Sequence[str] | None = None
    """Names of those of `AgentContext.tools` that it may use; all when left out."""
    max_turns: int | None = None
    """Model calls of its own at most; they count for the rollout's `maxTurns` as well."""


@dataclass(frozen=True)
class AgentReport:
    """How a sub-agent ended."""

    stop_reason: StopReason
    message: str


class AgentContext(Protocol):
    """The world of one attempt. Every call is journaled before it is acted on, and bounded by the rollout's budgets."""

    task: Task
    spec: AgentSpec
    working_dir: str
    tools: Mapping[str, Tool]

    async def call_model(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelReply:
        """One turn's model call. `tools` are definitions in OpenAI's form; those of `self.tools` when left out.

        Calls side by side are made one after another: after a crash they are answered again in that order.
        Raises Stop when a budget is used up, and whatever ends the attempt; an agent lets both through.
        """

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Run tool calls of the turn, all or some; each gets its own result under its own id, errors included.

        Those in the workspace run in order, others side by side.

        Unknown tools, arguments that are no JSON or do not fit the schema, and tools that raise come back as readable
        observations with `error` set. Raises Stop when a tool ends the rollout.
        """

    async def run_command(self, command: str) -> CommandResult:
        """Run a shell command in the workspace outside of any model turn (what the Oracle does).

        It may take all that is left of the agent's time.
        """

    async def put_files(self, files: Sequence[TaskFile]) -> None:
        """Put files into the workspace outside of any model turn (what the Oracle does). Raises FileError."""

    async def snapshot(self) -> None:
        """Store the workspace's state in object storage now, for `tasks.branch` of other jobs; call it between turns."""

    async def checkpoint(self) -> str:
        """Keep the workspace as it is now, and return its name; what still runs in it ends.

        An agent that searches a tree keeps checkpoints and goes back to them; its turns are branches of the same rollout,
        and what it goes on with last is graded. Not for agents that use `run_command`.
        """

    async def go_back(self, checkpoint: str) -> None:
        """Go on with the workspace as it was at that checkpoint, as often as wanted. Processes are not restored."""

    async def delegate(self, agent: "Agent", part: SubTask) -> AgentReport:
        """Let another agent work on a part of the task, in the same workspace, to its end.

        Its conversation is a branch of this rollout. Its turns and tokens count for the rollout's budgets, and a budget that
        is used up ends both. One runs at a time: after a crash all calls are answered again in the order in which they were
        made. Raises RuntimeError for a call beside it, ValueError for a tool that there is none of.
        """


class Stop(Exception):
    """Ends the agent's work with a stop reason. The rollout is Completed and graded."""

    def __init__(self, reason: StopReason, message: str = "") -> None:
        super().__init__(message or reason.value)
        self.reason, self.message = reason, str(message)  # its type may depend on what the model answered


class Agent(Protocol):
    """Who works on a task."""

    async def run(self, context: AgentContext) -> str | None:
        """Work until done. Returning means Finished, with a message; raise Stop for another reason.

        Calls that jobs which it left behind still make then are refused, and those under way are cancelled.
        Any other exception is the agent's own failure: the rollout is Completed with AgentError.
        """
