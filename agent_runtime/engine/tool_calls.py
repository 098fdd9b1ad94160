"""Running the tool calls of a turn: which of them side by side, under which keys, and whose time it takes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_runtime.engine.agent_clock import AgentClock
from agent_runtime.engine.assignment import Oversight
from agent_runtime.engine.attempt_log import AttemptLog
from agent_runtime.engine.events import ToolEnded
from agent_runtime.engine.tool_workspace import KeyedWorkspace
from agent_runtime.engine.workspace_states import WorkspaceStates
from agent_runtime.models.base import ToolCall
from agent_runtime.tools.base import Tool, ToolContext, takes_agents_time
from agent_runtime.tools.dispatch import dispatch
from rollout_api.records import Observation
from rollout_api.tasks import Task

MOST_CALLS = 128
"""Tool calls of one answer that are run, as many as OpenAI takes tools. Each has keys, which the executor must remember."""


@dataclass(frozen=True)
class CallsOfTurn:
    """The tool calls of one answer of the model."""

    turn: int
    calls: Sequence[ToolCall]
    tools: Mapping[str, Tool]
    task: Task
    key: str
    """What the idempotency keys of all of them begin with."""
    first: int
    """Calls that have such a key already: agents may run those of one answer one after another."""
    interrupted: bool
    """An earlier process may have run them: it died between the answer and their results."""


class ToolRunner:
    """Runs tool calls in the workspace that the agent is in, with what the plugins make of them."""

    def __init__(
        self, index: int, states: WorkspaceStates, log: AttemptLog, clock: AgentClock, oversight: Oversight
    ) -> None:
        self._index, self._states, self._log, self._clock = index, states, log, clock
        self._observer, self._plugins = oversight.observer, oversight.plugins
        self._one_at_a_time = asyncio.Lock()

    async def run(self, turn: CallsOfTurn) -> list[Observation]:
        """The results, in the order of the calls. Raises what takes the attempt down. Plugins' time is not the agent's."""
        if (plugins := self._plugins) is None:
            return await self._run_all(turn, turn.calls)
        admitted = await self._clock.untimed(plugins.admit(turn.turn, turn.calls, turn.first))
        results = await self._run_all(turn, admitted)
        observations = await self._clock.untimed(plugins.ran(turn.turn, turn.calls, admitted, results, turn.first))
        self._log.add(*plugins.take_record())
        return observations

    async def _run_all(self, turn: CallsOfTurn, admitted: Sequence[ToolCall | Observation]) -> list[Observation]:
        """Run the calls and wait for all of them, also when one takes the attempt down.

        Those in the workspace run in the order in which the model wrote them: one may need what another made.
        """
        results = await asyncio.gather(
            *(
                self._run_one(turn, call, f"{turn.key}{position}")
                for position, call in enumerate(admitted[:MOST_CALLS], turn.first)
            ),
            return_exceptions=True,
        )
        observations = []
        for result in [*results, *map(_one_too_many, admitted[MOST_CALLS:])]:
            if isinstance(result, BaseException):
                raise result
            self._observer(ToolEnded(self._index, result.tool, result.seconds, result.error))
            observations.append(result)
        return observations

    async def _run_one(self, turn: CallsOfTurn, call: ToolCall | Observation, key: str) -> Observation:
        if isinstance(call, Observation):
            return call  # a plugin refused it
        tool = turn.tools.get(call.name)
        if tool is not None and turn.interrupted and tool.runs_in == "Runner" and not tool.idempotent:
            return Observation(
                call_id=call.id,
                tool=call.name,
                content="The outcome of this call is unknown: the process that ran it was interrupted. It was not repeated.",
                error=True,
            )
        is_agents_time = takes_agents_time(tool)
        seconds_left, limit = self._clock.left(), float(turn.task.timeouts.command_seconds)
        # One that hangs must not look like an agent that ran out of time, nor the other way round.
        seconds = min(limit, seconds_left) if is_agents_time else limit
        workspace = KeyedWorkspace(self._states.workspace, key, seconds)
        context = ToolContext(workspace=workspace, task=turn.task, call_id=call.id, seconds_left=seconds_left)
        running = dispatch(turn.tools, call, context)
        if not is_agents_time:
            return await self._clock.untimed(running)
        if tool is None or tool.runs_in == "Runner":
            return await running
        async with self._one_at_a_time:
            return await running


def _one_too_many(call: ToolCall | Observation) -> Observation:
    if isinstance(call, Observation):
        return call  # a plugin refused it
    message = f"At most {MOST_CALLS} tool calls of one answer are run. This one was not; make it in your next answer."
    return Observation(call_id=call.id, tool=call.name, content=message, error=True)
