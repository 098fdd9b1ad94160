"""Execution of a turn's tool calls: which run concurrently, under which keys, and which time counts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.assignment import Oversight
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.attempt.snapshots import WorkspaceStates
from agent_runtime.engine.events import ToolEnded
from agent_runtime.models.base import ToolCall
from agent_runtime.sandboxes.base import (
    CommandResult,
    FileStat,
    LiveProcesses,
    Output,
    ProcessStatus,
    Workspace,
    ignore_pauses,
    without_silence,
)
from agent_runtime.tools.base import Tool, ToolContext, ToolError, dispatch, takes_agents_time
from rollout_api.records import Observation
from rollout_api.tasks import Task


class KeyedWorkspace:
    """Gives every call the next idempotency key of its tool call, and limits the time of commands.

    Implements `agent_runtime.tools.base.ToolWorkspace` and `ToolProcesses`, which describe the calls.
    """

    def __init__(
        self,
        workspace: Workspace,
        key_prefix: str,
        command_seconds: float,
        pausing: Callable[[bool], None] = ignore_pauses,
    ) -> None:
        self._workspace, self._pausing = workspace, pausing
        self.call = key_prefix
        self._command_seconds = command_seconds
        self._calls = 0
        self.working_dir = workspace.working_dir

    def _next_key(self) -> str:
        self._calls += 1
        return f"{self.call}.{self._calls}"

    async def run(
        self,
        command: str | list[str],
        *,
        deadline_seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        head_bytes: int = 16_384,
        tail_bytes: int = 16_384,
    ) -> CommandResult:
        """Run a command to its end, with a deadline limited by the task and the agent's time."""
        deadline = min(deadline_seconds or self._command_seconds, self._command_seconds)
        return await self._workspace.run(
            command,
            key=self._next_key(),
            deadline_seconds=deadline,
            cwd=cwd,
            env=env,
            stdin=stdin,
            head_bytes=head_bytes,
            tail_bytes=tail_bytes,
            pausing=self._pausing,
        )

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return a file's content; a repeated call returns the same bytes."""
        return await self._workspace.read(path, key=self._next_key(), limit=limit)

    async def write(self, path: str, data: bytes, *, mode: str = "644") -> None:
        await self._workspace.write(path, data, key=self._next_key(), mode=mode)

    async def remove(self, path: str) -> None:
        await self._workspace.remove(path, key=self._next_key())

    async def stat(self, path: str) -> FileStat | None:
        return await self._workspace.stat(path, key=self._next_key())

    async def list(self, path: str) -> list[FileStat]:
        return await self._workspace.list(path, key=self._next_key())

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        label: str,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> str:
        key = f"{self._next_key()}-{label}"
        return await self._live().start_process(command, key=key, env=env, terminal=terminal)

    async def processes(self) -> Sequence[tuple[str, bool]]:
        return await self._live().processes(key=self._next_key())

    async def process(self, process: str) -> ProcessStatus | None:
        """Return the process's state at the first call."""
        return await self._live().process(process, key=self._next_key())

    async def process_now(self, process: str) -> ProcessStatus | None:
        return await self._live().process(process)

    async def write_input(self, process: str, offset: int, data: bytes) -> None:
        await self._live().write_input(process, offset, data, key=self._next_key())

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        return await self._live().read_output(process, cursor, wait_seconds=wait_seconds)

    def _live(self) -> LiveProcesses:
        if not isinstance(self._workspace, LiveProcesses):
            # Not a SandboxFailure, because the policy can cause it by calling a tool.
            raise ToolError("This sandbox cannot keep a process between calls; use commands that end.")
        return self._workspace


MOST_CALLS = 128
"""Limit of executed tool calls in one answer. The executor must remember the keys of each."""


@dataclass(frozen=True)
class CallsOfTurn:
    """The tool calls of one answer of the model."""

    turn: int
    calls: Sequence[ToolCall]
    tools: Mapping[str, Tool]
    task: Task
    key: str
    """Prefix of the idempotency keys of all of them."""
    first: int
    """Number of earlier calls with that prefix, because agents may run the calls of one answer separately."""
    interrupted: bool
    """An earlier process may have run them: it died between the answer and their results."""


class ToolRunner:
    """Runs tool calls in the agent's workspace, with plugins applied."""

    def __init__(
        self, index: int, states: WorkspaceStates, log: AttemptLog, clock: AgentClock, oversight: Oversight
    ) -> None:
        self._index, self._states, self._log, self._clock = index, states, log, clock
        self._observer, self._plugins = oversight.observer, oversight.plugins
        self._one_at_a_time = asyncio.Lock()

    async def run(self, turn: CallsOfTurn, ended: list[Observation]) -> list[Observation]:
        """Return the results in the order of the calls. Raises errors that end the attempt; then `ended` gets the results
        of the calls before. Plugins' time does not count as the agent's.
        """
        if (plugins := self._plugins) is None:
            return await self._run_all(turn, turn.calls, ended)
        admitted = await self._clock.untimed(plugins.admit(turn.turn, turn.calls, turn.first))
        results = await self._run_all(turn, admitted, ended)
        observations = await self._clock.untimed(plugins.ran(turn.turn, turn.calls, admitted, results, turn.first))
        self._log.add(*plugins.take_record())
        return observations

    async def _run_all(
        self, turn: CallsOfTurn, admitted: Sequence[ToolCall | Observation], ended: list[Observation]
    ) -> list[Observation]:
        """Run the calls and wait for all of them, even if one ends the attempt.

        Calls in the workspace run in the model's order, because one may depend on another.
        """
        results = await asyncio.gather(
            *(self._run_one(turn, call, number) for number, call in enumerate(admitted)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
            self._observer(ToolEnded(self._index, result.tool, result.seconds, result.error, result.traceback))
            ended.append(result)
        return ended

    async def _run_one(self, turn: CallsOfTurn, call: ToolCall | Observation, number: int) -> Observation:
        if isinstance(call, Observation):
            return call  # a plugin refused it
        tool, refusal = turn.tools.get(call.name), None
        if number >= MOST_CALLS:
            refusal = (
                f"At most {MOST_CALLS} tool calls of one answer are run. This one was not; make it in your next answer."
            )
        elif tool is not None and turn.interrupted and tool.runs_in == "Runner" and not tool.idempotent:
            refusal = (
                "The outcome of this call is unknown: the process that ran it was interrupted. It was not repeated."
            )
        if refusal is not None:
            return Observation(call_id=call.id, tool=call.name, content=refusal, error=True)
        is_agents_time = takes_agents_time(tool)
        seconds_left, limit = self._clock.left(), float(turn.task.timeouts.command_seconds)
        # Distinguish a hanging sandbox from an agent that ran out of time.
        seconds = min(limit, seconds_left) if is_agents_time else limit
        pausing = self._clock.pauses() if is_agents_time else ignore_pauses
        workspace = KeyedWorkspace(self._states.workspace, f"{turn.key}{turn.first + number}", seconds, pausing)
        context = ToolContext(workspace=workspace, task=turn.task, call_id=call.id, seconds_left=seconds_left)
        running = dispatch(turn.tools, call, context)
        if not is_agents_time:
            return await self._clock.untimed(running)
        with without_silence(self._states.workspace, self._clock.silences()):
            if tool is None or tool.runs_in == "Runner":
                return await running
            async with self._one_at_a_time:
                return await running
