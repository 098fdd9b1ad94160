"""The state that a branch begins in: a restored snapshot, and the tool calls after it run once more.

It takes the place of a group's setup, so in `Overlay` it is made once, frozen, and forked for each branch. The agent itself
is what runs the calls again: replayed over the source's records, because only it knows which calls its answers meant.
"""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from agent_runtime.agents.base import Agent
from agent_runtime.engine.attempt.assignment import Assignment, Oversight, Rollout
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.attempt.tool_calls import KeyedWorkspace
from agent_runtime.engine.attempt.turns import Turns
from agent_runtime.engine.branching.snapshots import restore_layers
from agent_runtime.engine.branching.sources import Origin
from agent_runtime.extensions import contained
from agent_runtime.models.base import ModelError, ModelReply, ModelRequest, ToolCall
from agent_runtime.recording.layers import Layers
from agent_runtime.sandboxes.base import (
    FileError,
    SandboxFailure,
    Workspace,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN, prepare
from agent_runtime.tools.base import Tool, ToolContext
from agent_runtime.tools.dispatch import dispatch
from rollout_api.model import Sampling
from rollout_api.records import (
    BranchRecord,
    Observation,
    ObservationsRecord,
    Record,
    SnapshotRecord,
)
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task

SHOWN_CHARACTERS = 200
"""Of each side of a difference: enough to see it, little enough for a line of results."""


class Branching:
    """Implements `agent_runtime.sandboxes.base.StartState` for the branches of one group."""

    def __init__(
        self,
        origin: Origin,
        job: RolloutJob,
        make_agent: Callable[[], Agent],
        tools: Mapping[str, Tool],
        layers: Layers,
    ) -> None:
        self.origin = origin
        self._job, self._make_agent, self._tools, self._layers = job, make_agent, tools, layers
        self._differences: dict[str, list[str]] = {}
        self._restored: dict[str, int | None] = {}
        self.name = hashlib.sha256(origin.model_dump_json(exclude={"task"}).encode()).hexdigest()

    async def bring(self, workspace: Workspace, spec: WorkspaceSpec) -> None:
        """See StartState."""
        snapshot = self.origin.snapshot
        if snapshot is not None and snapshot.mode == workspace.description.get("mode"):
            await self._restore(workspace, snapshot)
        else:
            # A layer over an image means nothing to a Plain root, nor the other way: all of it is done again.
            snapshot = None
            await prepare(workspace, dataclasses.replace(spec, start=None))
        restored = None if snapshot is None else snapshot.turn
        found: list[str] = []
        if restored is None or restored < self.origin.turn:
            await workspace.enter("agent", key=f"{LIFECYCLE_TURN}:rerun-network")
            found = await self._run_again(workspace, -1 if restored is None else restored)
        if found and self.origin.strict:
            raise SandboxFailure(
                "BranchDiffers",
                f"{len(found)} tool calls that were run again differ from the record, and the branch is strict: {found[0]}",
            )
        name = str(workspace.handle["workspace"])
        self._differences[name], self._restored[name] = found, restored

    def record(self, workspace: Workspace) -> BranchRecord:
        """What a branch in that workspace went on from."""
        name = str(workspace.handle.get("prepared") or workspace.handle["workspace"])
        return BranchRecord(
            time=time.time(),
            job=self.origin.job,
            index=self.origin.index,
            attempt=self.origin.attempt,
            turn=self.origin.turn,
            snapshot_turn=self._restored.get(name),
            differences=self._differences.get(name, []),
        )

    async def _restore(self, workspace: Workspace, snapshot: SnapshotRecord) -> None:
        try:
            await restore_layers(workspace, snapshot.layers, self._layers, "layer")
        except (FileError, WorkspaceLimit) as error:
            raise SandboxFailure("RestoreFailed", f"the snapshot of turn {snapshot.turn}: {error.message}") from error

    async def _run_again(self, workspace: Workspace, after: int) -> list[str]:
        """Run the tool calls after that turn; what differs from the record. Raises SandboxFailure."""
        origin, rerun = self.origin, Rerun(self.origin.task, self._tools, workspace, after)
        again = Rollout(index=origin.index, group=0, member=0, task=origin.task, seed=0)
        turns = Turns(
            Assignment(again, self._job.spec.agent, Sampling()),
            tools=self._tools,
            model=_End,
            workspace=workspace,
            log=AttemptLog(_NoJournal(), origin.prefix),
            oversight=Oversight(),
            rerun=rerun.run,
        )
        try:
            async with asyncio.timeout(origin.task.timeouts.agent_seconds):
                with contained():
                    await self._make_agent().run(turns)
        except TimeoutError as error:
            raise SandboxFailure(
                "RerunFailed", f"the tool calls up to turn {origin.turn} took longer than timeouts.agentSeconds"
            ) from error
        except Exception as error:  # noqa: BLE001 what ended it is known better than what the agent made of it
            turns.fault = turns.fault or error
        if isinstance(turns.fault, SandboxFailure):
            raise turns.fault
        if not isinstance(turns.fault, _Reached):
            why = f"{turns.fault}" if turns.fault is not None else "the agent ended before it came there"
            raise SandboxFailure("RerunFailed", f"turn {origin.turn} was not reached again: {why}")
        return rerun.differences


class _Reached(ModelError):
    """The agent asks for what comes after the copied turns. Of a model's own errors only a ModelError arrives unchanged."""

    def __init__(self) -> None:
        super().__init__("Reached", "the turn to branch from is reached")


class _End:
    """Implements Model: where the copied turns end."""

    name = "none"
    token_capture = "TextOnly"

    async def complete(self, request: ModelRequest) -> ModelReply:
        """See Model."""
        raise _Reached

    async def check(self) -> None:
        """See Model."""

    async def close(self) -> None:
        """See Model."""


class _NoJournal:
    async def append(self, records: Sequence[Record]) -> None:
        """All of it is recorded already."""


class Rerun:
    """Runs the tool calls of replayed turns once more, those after a turn, and compares them with the record."""

    def __init__(self, task: Task, tools: Mapping[str, Tool], workspace: Workspace, after: int) -> None:
        self.differences: list[str] = []
        self._task, self._tools, self._workspace, self._after = task, tools, workspace, after
        self._times = 0

    async def run(self, record: ObservationsRecord, calls: Sequence[ToolCall]) -> None:
        """The calls of one record. Those that run in the runner changed nothing here, and are not made again."""
        if record.turn <= self._after:
            return
        self._times += 1
        found: dict[str, Observation] = {}
        for position, call in enumerate(calls):
            tool = self._tools.get(call.name)
            if tool is None or tool.runs_in == "Runner":
                continue
            seconds = float(self._task.timeouts.command_seconds)
            keyed = KeyedWorkspace(self._workspace, f"{record.turn + 1}:rerun-{self._times}.{position}", seconds)
            context = ToolContext(workspace=keyed, task=self._task, call_id=call.id, seconds_left=seconds)
            found[call.id] = await dispatch(self._tools, call, context)
        self.differences += differences(record.turn, record.results, found)


def differences(turn: int, recorded: Sequence[Observation], found: Mapping[str, Observation]) -> list[str]:
    """A line for each call that was run again and gave the model something else than is recorded. Pure."""
    lines = []
    for before in recorded:
        after = found.get(before.call_id)
        if after is not None and (after.content, after.error) != (before.content, before.error):
            lines.append(
                f"turn {turn}, {before.tool} ({before.call_id}): recorded {_shown(before.content)}, "
                f"now {_shown(after.content)}"
            )
    return lines


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")
