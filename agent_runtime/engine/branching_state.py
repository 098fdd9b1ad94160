"""The state that a branch begins in: a restored snapshot, and the tool calls after it run once more.

It takes the place of a group's setup, so in `Overlay` it is made once, frozen, and forked for each branch. The agent itself
is what runs the calls again: replayed over the source's records, because only it knows which calls its answers meant.
"""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.agents.base import Agent, Stop
from agent_runtime.engine.branching import Origin
from agent_runtime.engine.conversation import Conversation
from agent_runtime.engine.turns import NotReplayable, Turns
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import (
    CommandResult,
    FileError,
    SandboxFailure,
    Workspace,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN, prepare
from agent_runtime.tools.base import Tool
from agent_runtime.tools.schema import openai_definition
from rollout_api.model import Sampling
from rollout_api.records import (
    BranchRecord,
    Message,
    Observation,
    ObservationsRecord,
    Record,
    SnapshotRecord,
    StopReason,
)
from rollout_api.rollout_job import RolloutJob

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
        for number, layer in enumerate(snapshot.layers):
            try:
                await workspace.restore(self._layers.load(layer), key=f"{LIFECYCLE_TURN}:layer-{number}")
            except RecordCorrupt as error:
                raise SandboxFailure("SnapshotLost", f"{self.origin.layers_uri}/{error}") from error
            except (FileError, WorkspaceLimit) as error:
                raise SandboxFailure(
                    "RestoreFailed", f"the snapshot of turn {snapshot.turn}: {error.message}"
                ) from error

    async def _run_again(self, workspace: Workspace, after: int) -> list[str]:
        """Run the tool calls after that turn; what differs from the record. Raises SandboxFailure."""
        rerun = Rerun(self.origin, self._job, self._tools, workspace, after)
        try:
            async with asyncio.timeout(self.origin.task.timeouts.agent_seconds):
                await self._make_agent().run(rerun)
        except TimeoutError as error:
            raise SandboxFailure(
                "RerunFailed", f"the tool calls up to turn {self.origin.turn} took longer than timeouts.agentSeconds"
            ) from error
        except Exception as error:  # noqa: BLE001 what ended it is known better than what the agent made of it
            if rerun.fault is None:
                rerun.fault = error
        if isinstance(rerun.fault, SandboxFailure):
            raise rerun.fault
        if not isinstance(rerun.fault, _Reached):
            why = f"{rerun.fault}" if rerun.fault is not None else "the agent ended before it came there"
            raise SandboxFailure("RerunFailed", f"turn {self.origin.turn} was not reached again: {why}")
        return rerun.differences


class _Reached(Stop):
    """The agent asks for what comes after the copied turns."""

    def __init__(self) -> None:
        super().__init__(StopReason.FINISHED, "the turn to branch from is reached")


class _NoJournal:
    async def append(self, records: Sequence[Record]) -> None:
        """All of it is recorded already."""


class Rerun(Turns):
    """A replay of the copied turns in which tool calls after a turn are run, and compared with the record."""

    def __init__(
        self, origin: Origin, job: RolloutJob, tools: Mapping[str, Tool], workspace: Workspace, after: int
    ) -> None:
        super().__init__(
            task=origin.task,
            spec=job.spec.agent,
            sampling=Sampling(),
            seed=0,
            index=origin.index,
            member=0,
            tools=tools,
            definitions=[openai_definition(tool) for tool in tools.values()],
            model=lambda: None,
            workspace=workspace,
            journal=_NoJournal(),
            replay=origin.prefix,
        )
        self.differences: list[str] = []
        self._after = after

    async def run_command(self, command: str) -> CommandResult:
        """Not to be run again: nobody recorded what it gave."""
        self.fault = NotReplayable("the agent runs commands outside of its turns, and their results are not recorded")
        raise self.fault

    async def _call_model(
        self, conversation: Conversation, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ModelReply:
        if not self._replay:
            raise _Reached
        return await super()._call_model(conversation, messages, tools)

    async def _call_tools(
        self, conversation: Conversation, calls: Sequence[ToolCall], tools: Mapping[str, Tool], *, may_stop: bool
    ) -> list[Observation]:
        recorded = self._next_replayed(ObservationsRecord)
        if recorded is None:
            raise _Reached
        if self.turn > self._after:
            here = [call for call in calls if (tool := tools.get(call.name)) is not None and tool.runs_in != "Runner"]
            found = {result.call_id: result for result in await self._dispatch_all(here, tools, f"{self.turn + 1}:")}
            self.differences += differences(self.turn, recorded.results, found)
        return recorded.results


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


def branchings(
    origins: Mapping[int, Origin],
    job: RolloutJob,
    make_agent: Callable[[], Agent] | None,
    tools: Mapping[str, Tool],
    run: Store,
    environ: Mapping[str, str],
) -> dict[int, Branching]:
    """The starting states of a branching job's groups, by number."""
    if make_agent is None:
        return {}
    return {
        group: Branching(origin, job, make_agent, tools, Layers(Store.open(origin.layers_uri, environ), run))
        for group, origin in origins.items()
    }


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")
