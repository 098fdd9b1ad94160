"""The start state of a branch: a restored snapshot, after which later tool calls are repeated.

It replaces a group's setup. In `Overlay` it is created once, frozen, and forked for each branch. To repeat the calls,
the agent is replayed over the source's records, because only the agent derives tool calls from answers.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agent_runtime.agents.base import Agent
from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.assignment import Assignment, Oversight, Rollout
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.attempt.snapshots import restore_layers
from agent_runtime.engine.attempt.tool_calls import KeyedWorkspace
from agent_runtime.engine.attempt.turns import RecordEnded, Turns
from agent_runtime.engine.branching.sources import NEEDS_SNAPSHOT, Origin, results_in
from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.plugins import call_that_ran
from agent_runtime.recording.layers import Layers
from agent_runtime.sandboxes.base import (
    FileError,
    SandboxFailure,
    Workspace,
    WorkspaceLimit,
    WorkspaceSpec,
    without_silence,
)
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN, prepare
from agent_runtime.tools.base import Tool, ToolContext, dispatch
from agent_runtime.wall_clock import unix_time
from rollout_api.model import Sampling
from rollout_api.records import (
    BranchRecord,
    Layer,
    ObjectDigest,
    Observation,
    ObservationsRecord,
    Record,
    SnapshotRecord,
)
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task

SHOWN_CHARACTERS = 200
"""Limit of the characters of each result in the description of a difference."""


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

    def start_of(self, spec: WorkspaceSpec) -> WorkspaceSpec:
        """Return the specification of the branches' workspaces, by that of their task's."""
        chains = {} if self.origin.snapshot is None else self.origin.snapshot.services
        services = [
            replace(
                service,
                workspace=replace(
                    service.workspace, start=_ServiceState(service.name, chains.get(service.name, []), self._layers)
                ),
            )
            for service in spec.services
        ]
        return replace(spec, start=self, services=services)

    async def apply_to(self, workspace: Workspace, spec: WorkspaceSpec) -> None:
        """See StartState."""
        snapshot = self.origin.snapshot
        if snapshot is None and self.origin.task.services:
            raise SandboxFailure(
                "SnapshotLost", f"the snapshot of turn {self.origin.turn} was deleted; {NEEDS_SNAPSHOT}"
            )
        if snapshot is not None and snapshot.mode == workspace.description.get("mode"):
            await self._restore(workspace, snapshot)
        else:
            # A layer over an image cannot be applied to a `Plain` root, nor the reverse, so all calls run again.
            snapshot = None
            await prepare(workspace, replace(spec, start=None))
        restored = 0 if snapshot is None else self.origin.snapshot_results
        found: list[str] = []
        if restored < len(results_in(self.origin.prefix)):
            await workspace.enter("agent", key=f"{LIFECYCLE_TURN}:rerun-network")
            found = await self._run_again(workspace, restored)
        if found and self.origin.strict:
            raise SandboxFailure(
                "BranchDiffers",
                f"{len(found)} tool calls that were run again differ from the record, and the branch is strict: "
                f"{found[0]}",
            )
        name = str(workspace.handle["workspace"])
        self._differences[name], self._restored[name] = found, None if snapshot is None else snapshot.turn

    def record(self, workspace: Workspace) -> BranchRecord:
        """Return the record of a branch in that workspace."""
        name = str(workspace.handle.get("prepared") or workspace.handle["workspace"])
        return BranchRecord(
            time=unix_time(),
            job=self.origin.job,
            index=self.origin.index,
            attempt=self.origin.attempt,
            turn=self.origin.turn,
            snapshot_turn=self._restored.get(name),
            differences=self._differences.get(name, []),
        )

    async def _restore(self, workspace: Workspace, snapshot: SnapshotRecord) -> None:
        await _restore(workspace, snapshot.layers, self._layers, f"the snapshot of turn {snapshot.turn}")

    async def _run_again(self, workspace: Workspace, restored: int) -> list[str]:
        """Repeat the tool calls, except those of the first `restored` records; return the differences from the record.
        Raises SandboxFailure.
        """
        origin, clock = self.origin, AgentClock(self.origin.task.timeouts.agent_seconds)
        rerun = Rerun(origin.task, workspace, restored, clock)
        again = Rollout(index=origin.index, group=0, member=0, task=origin.task, seed=0)
        turns = Turns(
            Assignment(again, self._job.spec.agent, Sampling()),
            tools=self._tools,
            model=lambda: None,
            workspace=workspace,
            log=AttemptLog(_NoJournal(), origin.prefix),
            oversight=Oversight(),
            rerun=rerun.run,
        )
        try:
            async with clock.running():
                await turns.run_code(self._make_agent())
        except TimeoutError as error:
            raise SandboxFailure(
                "RerunFailed", f"the tool calls up to turn {origin.turn} took longer than timeouts.agentSeconds"
            ) from error
        except Exception as error:  # noqa: BLE001 `turns.fault` has the cause, which the agent may have replaced
            turns.fault = turns.fault or error
        if isinstance(turns.fault, SandboxFailure):
            raise turns.fault
        if not isinstance(turns.fault, RecordEnded):
            why = f"{turns.fault}" if turns.fault is not None else "the agent ended before that turn"
            raise SandboxFailure("RerunFailed", f"turn {origin.turn} was not reached again: {why}")
        return rerun.differences


class _ServiceState:
    """Implements StartState for a service of the branches: the files that its workspace had at the snapshot."""

    def __init__(self, service: str, chain: Sequence[Layer], layers: Layers) -> None:
        self._service, self._chain, self._layers = service, chain, layers
        self.name = f"{service} {' '.join(layer.digest for layer in chain)}"

    async def apply_to(self, workspace: Workspace, spec: WorkspaceSpec) -> None:
        """See StartState."""
        await _restore(workspace, self._chain, self._layers, f"the snapshot of service {self._service!r}")


async def _restore(workspace: Workspace, chain: Sequence[Layer], layers: Layers, what: str) -> None:
    try:
        await restore_layers(workspace, chain, layers, "layer")
    except (FileError, WorkspaceLimit) as error:
        raise SandboxFailure("RestoreFailed", f"{what}: {error.message}") from error


class _NoJournal:
    async def append(self, records: Sequence[Record]) -> None:
        """Do nothing: everything is recorded already."""

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        """Raise: no model is called, so nothing is stored."""
        raise NotImplementedError(name)


class Rerun:
    """Repeats the tool calls of replayed turns, except those of the first `restored` records, and compares them with the
    record. The clock leaves out pauses of the workspace.
    """

    def __init__(self, task: Task, workspace: Workspace, restored: int, clock: AgentClock) -> None:
        self.differences: list[str] = []
        self._task, self._workspace, self._clock = task, workspace, clock
        self._times = -restored

    async def run(self, record: ObservationsRecord, calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> None:
        """Repeat the calls of one record. Calls that ran in the runner did not change the workspace, and are skipped."""
        self._times += 1
        if self._times <= 0:
            return
        # By position: two calls of one answer may have the same id.
        for position, (asked, before) in enumerate(zip(calls, record.results, strict=False)):
            call = call_that_ran(asked, before)
            if call is None or call.name not in tools or tools[call.name].runs_in == "Runner":
                continue
            seconds = float(self._task.timeouts.command_seconds)
            key = f"{record.turn + 1}:rerun-{self._times}.{position}"
            keyed = KeyedWorkspace(self._workspace, key, seconds, self._clock.pauses())
            context = ToolContext(workspace=keyed, task=self._task, call_id=call.id, seconds_left=seconds)
            with without_silence(self._workspace, self._clock.silences()):
                after = await dispatch(tools, call, context)
            self.differences += difference(record.turn, before, after)


def difference(turn: int, before: Observation, after: Observation) -> list[str]:
    """Return a line if the repeated call's result for the model differs from the recorded one. Pure."""
    if (after.content, after.error) == (before.content, before.error):
        return []
    recorded, now = _shown(before.content), _shown(after.content)
    return [f"turn {turn}, {before.tool} ({before.call_id}): recorded {recorded}, now {now}"]


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")
