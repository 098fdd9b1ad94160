"""One attempt of a rollout: agent, artifacts, grading, seal. Each phase is done once, even if the runner changes in
between.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agent_runtime.agents.base import Agent
from agent_runtime.agents.program import ProgramSpec, program_of
from agent_runtime.engine.attempt.agent_clock import agent_seconds_of
from agent_runtime.engine.attempt.assignment import Assignment, Oversight, Rollout
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.attempt.attribution import Action, Decision, Phase, Situation, attribute
from agent_runtime.engine.attempt.fitting import task_problem
from agent_runtime.engine.attempt.grading import (
    END_TURN,
    GradingLost,
    failed_verdict,
    grade_artifacts,
    grade_in_place,
    nothing_to_grade,
    store_artifacts,
)
from agent_runtime.engine.attempt.mcp import AttemptTools
from agent_runtime.engine.attempt.results import build_result, first_record, last_record, output_of, usage_of
from agent_runtime.engine.attempt.snapshots import Checkpoints, Keeping, Snapshots
from agent_runtime.engine.attempt.steps import StepwiseAgent, verdict_of_steps
from agent_runtime.engine.attempt.turns import Turns
from agent_runtime.engine.context import RunContext, grading_spec, workspace_spec
from agent_runtime.engine.events import AgentFailed, RolloutStarted, VerifierFailed, WorkspaceAcquired
from agent_runtime.engine.program.program import Program
from agent_runtime.engine.program.program import collect as collect_trajectory
from agent_runtime.engine.scheduling.completion_rules import PolicyLag, stale_message, versions_of
from agent_runtime.environments.act import Act, episode_verdict
from agent_runtime.environments.open import open_environment
from agent_runtime.models.base import Model
from agent_runtime.recording.branches import has_own_answer
from agent_runtime.recording.journal import AlreadySealed, Journal
from agent_runtime.recording.messages import linear
from agent_runtime.sandboxes.base import (
    INTERRUPTED,
    Fence,
    SandboxFailure,
    SetupFailed,
    Workspace,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.wall_clock import unix_time
from rollout_api.cluster import job_tag
from rollout_api.model import OnStale
from rollout_api.records import (
    ArtifactsRecord,
    AttemptRecord,
    ChangesRecord,
    FailedRecord,
    Outcome,
    Record,
    Result,
    StepRecord,
    StopReason,
    StopRecord,
    Unexplained,
    Verdict,
)
from rollout_api.tasks import Task, VerifierMode

log = logging.getLogger(__name__)
T = TypeVar("T")

Failures = Sequence[tuple[int, FailedRecord]]
"""Failed attempts of a rollout by number, oldest first."""


class Attempt:
    """One runner's part of an attempt."""

    def __init__(
        self, context: RunContext, rollout: Rollout, number: int, failures: Failures, journal: Journal
    ) -> None:
        self._context, self._rollout, self._number, self._failures = context, rollout, number, failures
        self._journal = journal
        self._fence = Fence(journal.epoch, journal.holder)
        self._spec = self._spec_of(rollout)
        self._program = program_of(context.job.spec.agent, self._spec.working_dir)
        self._phase = Phase.STARTING
        self._plugins = context.plugins_of_attempt(rollout, number)
        self._provider = context.provider_for(rollout.task)
        self._branching = context.origins.get(rollout.group)
        model = context.job.spec.model
        self._max_policy_lag = None if model is None else model.max_policy_lag
        self._on_stale = OnStale.DROP if model is None else model.on_stale
        self._changed_task: Task | None = None
        """The task as changed by plugins."""
        self._workspace: Workspace | None = None
        self._environment: Act | None = None
        self._checkpoints = Checkpoints(context.snapshots)
        self._work: Turns | Program | None = None
        self._tools = AttemptTools(context.job.spec.agent, context.tools, context.server_keys)
        self._records: list[Record] = []
        self._boot_seconds = self._verifier_seconds = 0.0
        self._changes = ""
        """Diff of what the agent changed in the prepared files."""

    @classmethod
    async def claim(cls, context: RunContext, rollout: Rollout, number: int, failures: Failures) -> "Attempt":
        """Take the attempt over in the store. Further writes of an earlier runner are ignored."""
        journal = await Journal.claim(context.record, rollout.index, number)
        return cls(context, rollout, number, failures, journal)

    async def run(self) -> Result | FailedRecord:
        """Continue the attempt from its current state to its seal or to the record of its failure.

        Raises Superseded and Fenced if another runner took it over, and StorageError if the store is lost permanently.
        In these cases the attempt stays undecided.
        """
        return await self._unless_sealed(self._run())

    async def _run(self) -> Result | FailedRecord:
        try:
            await self._resume()
            failed = first_record(self._records, FailedRecord)
            if failed is not None:
                await self.release()
                return failed
            stop, artifacts = await self._agent_part()
            return await self._grade_and_seal(stop, artifacts)
        except AlreadySealed:
            raise
        except Exception as error:
            decision = attribute(error, self._situation())
            if decision.action is not Action.END_RUN and self._work is None:
                # Records can only be appended after `begin`, which the error may have prevented.
                self._records = await self._journal.begin()
            match decision.action:
                case Action.CANCEL:
                    return await self.seal(Outcome.CANCELLED, reason=decision.reason, message=decision.message)
                case Action.FAIL | Action.COMPLETE:
                    return await self._seal_ungraded(decision)
                case Action.RETRY_ATTEMPT | Action.RETRY_GRADING:
                    return await self._fail(decision)
            raise

    def _situation(self) -> Situation:
        records = self._all_records()
        answered = has_own_answer(records)
        workspace = self._workspace
        return Situation(
            self._phase,
            answered=answered,
            exposed=answered or self._phase not in (Phase.STARTING, Phase.AGENT)
            if self._work is None
            else self._work.exposed,
            alone=self._spec.alone if workspace is None else workspace.alone,
            losses_alone=sum(failure.alone for failure in self._unexplained(Unexplained.SANDBOX)),
            requests_failed=len(self._unexplained(Unexplained.REQUEST)),
            actions_failed=len(self._unexplained(Unexplained.ACTION)),
        )

    def _unexplained(self, what: Unexplained) -> list[FailedRecord]:
        return [failure for _, failure in self._failures if failure.unexplained is what]

    def _spec_of(self, rollout: Rollout) -> WorkspaceSpec:
        """After an unexplained loss, return a sandbox for one attempt only: among several attempts the cause cannot be
        attributed.
        """
        spec = workspace_spec(self._context.job, rollout)
        return replace(spec, alone=bool(self._unexplained(Unexplained.SANDBOX)))

    async def seal(self, outcome: Outcome, *, reason: str, message: str) -> Result:
        """End the rollout now, without a verdict, with the records so far."""
        return await self._unless_sealed(self._seal_now(outcome, reason, message))

    async def _seal_now(self, outcome: Outcome, reason: str, message: str) -> Result:
        if not self._records and self._work is None:
            # An earlier process may have left a workspace, which is released with the seal.
            with contextlib.suppress(SandboxFailure):
                await self._resume()
        await self._write()
        return await self._seal(outcome, None, reason=reason, message=message)

    async def _unless_sealed(self, work: Coroutine[Any, Any, T]) -> T | Result:
        """Return what the work returns, or the rollout's result if another runner seals it meanwhile."""
        try:
            return await work
        except AlreadySealed as sealed:
            await self._release_quietly()
            return sealed.result

    async def _seal_ungraded(self, decision: Decision) -> Result:
        """Seal a rollout whose policy left nothing to grade, with a failed verdict. A resumed attempt does the same."""
        records = self._all_records()
        stop = last_record(records, StopRecord) or StopRecord(
            time=unix_time(), stop_reason=StopReason.RESOURCE_LIMIT, agent_seconds=agent_seconds_of(records)
        )
        if decision.stop_reason is not None:
            stop = stop.model_copy(update={"stop_reason": decision.stop_reason, "message": decision.message})
        nothing = nothing_to_grade(decision.message)
        await self._write(stop, nothing)
        return await self._grade_and_seal(stop, nothing)

    async def release(self) -> None:
        """Close the environment and the tools, and release the workspace; each even if another fails."""
        environment, self._environment = self._environment, None
        workspace, self._workspace = self._workspace, None
        async with contextlib.AsyncExitStack() as stack:  # callbacks run in reverse order
            if workspace is not None:
                stack.push_async_callback(workspace.release)
            stack.push_async_callback(self._tools.close)
            if environment is not None:
                stack.callback(environment.close)

    async def _resume(self) -> None:
        """Fence off the earlier runner in the order of docs/recording.md, then read the records that count.

        The earlier runner may still write between `peek` and `begin`, so only the result of `begin` counts. Raises
        SandboxFailure if the agent still needs a workspace that no longer exists.
        """
        with contextlib.suppress(SandboxFailure, WorkspaceLimit):
            await self._reattach(await self._journal.peek())
        self._records = await self._journal.begin()
        await self._reattach(self._records)

    async def _reattach(self, records: Sequence[Record]) -> None:
        """Reattach to the last workspace in these records. Raises SandboxFailure if it is lost and still needed."""
        attempt = last_record(records, AttemptRecord)
        if attempt is None:
            return
        if attempt.task is not None:
            self._use_task(attempt.task)
        if self._workspace is not None and dict(self._workspace.handle) == attempt.workspace:
            return
        try:
            await self._reattach_to(attempt)
        except (SandboxFailure, WorkspaceLimit):
            if not any(isinstance(record, FailedRecord | ArtifactsRecord) for record in records):
                raise

    async def _reattach_to(self, attempt: AttemptRecord) -> Workspace:
        try:
            workspace = await self._provider.reattach(attempt.workspace, spec=self._agent_spec, fence=self._fence)
        except SandboxFailure as error:
            raise SandboxFailure(
                INTERRUPTED, f"the run was interrupted and its workspace has ended: {error.message}"
            ) from error
        self._workspace = workspace
        return workspace

    async def _agent_part(self) -> tuple[StopRecord, ArtifactsRecord]:
        """Run the agent until its artifacts are stored; phases that the journal already has are skipped."""
        stop, artifacts = last_record(self._records, StopRecord), last_record(self._records, ArtifactsRecord)
        if stop is None:
            # Make the stop durable before the workspace changes, because a resumed agent must not continue in a changed
            # workspace.
            stop = await self._run_agent()
            await self._write(stop)
        if artifacts is None:
            self._phase = Phase.COLLECTING
            stop, artifacts = await self._store_artifacts(stop)
        return stop, artifacts

    async def _run_agent(self) -> StopRecord:
        workspace = await self._prepare_work()
        self._work, running = await self._start_work(workspace, self._records)
        self._records = []  # from here on, the agent's part has the records
        self._phase = Phase.AGENT
        self._context.observer(
            RolloutStarted(self._rollout.index, self._rollout.task.name, self._rollout.member, self._number)
        )
        reason, message = await running
        self._work.policy_lag.refuse_if_stale()
        stop = StopRecord(
            time=unix_time(),
            stop_reason=reason,
            message=message,
            traceback=self._work.traceback,
            agent_seconds=self._work.agent_seconds,
        )
        if stop.traceback is not None:
            self._context.observer(AgentFailed(self._rollout.task.name, self._rollout.member, stop.traceback))
        await self._context.first_ends.ended(stop.traceback)
        return stop

    async def _prepare_work(self) -> Workspace:
        """Return the workspace. Open the environment if the task has one, and copy the source's turns for a branch."""
        if self._workspace is None and (changed := await self._plugins.begin(self._rollout.task)) is not None:
            self._use_task(changed)
        workspace = self._workspace or await self._acquire()
        if self._rollout.task.environment is not None:
            self._environment = await open_environment(
                self._rollout.task,
                self._context.environments,
                workspace,
                self._records,
                epoch=self._fence.epoch,
                has_failed=bool(self._unexplained(Unexplained.ACTION)),
            )
        if self._branching is not None and (begun := self._first_unwritten(workspace, self._records)):
            self._records = [*begun, self._branching.record(workspace), *self._branching.origin.prefix]
            await self._journal.append(self._records)
        return workspace

    async def _start_work(
        self, workspace: Workspace, recorded: Sequence[Record]
    ) -> tuple[Turns | Program, Coroutine[Any, Any, tuple[StopReason, str]]]:
        """Create the agent and run it; return why it stopped."""
        task = self._rollout.task
        if (problem := task_problem(self._context.job.spec, task)) is not None:
            raise SetupFailed(f"task {task.name} {problem}")
        if self._program is not None:
            program = self._make_program(self._program, workspace, recorded)
            return program, program.run()
        make_agent = self._context.make_agent
        assert make_agent is not None  # only agents that are programs have none
        await self._tools.open(workspace, recorded, task.timeouts.command_seconds)
        turns = self._make_turns(workspace, recorded)
        return turns, self._run_steps(turns, make_agent) if task.steps else turns.run_agent(make_agent)

    async def _store_artifacts(self, stop: StopRecord) -> tuple[StopRecord, ArtifactsRecord]:
        """Store the artifacts. Returns `stop`, or the reason why the artifacts cannot be graded."""
        task, spec, workspace = self._rollout.task, self._context.job.spec, self._workspace
        assert workspace is not None  # otherwise `_resume` has raised
        ended = stop
        if self._program is not None and (wanted := self._program.trajectory) is not None:
            session = f"{self._context.record.folder}/{self._rollout.index}"
            own = await collect_trajectory(workspace, wanted, session, self._journal.store_program_trajectory)
            stop = stop.model_copy(update={"program_trajectory": own})
        stop, artifacts = await store_artifacts(task, spec.verifier_of(task), workspace, self._journal, stop)
        await self._write(*([] if stop == ended else [stop]), artifacts)
        return stop, artifacts

    async def _run_steps(self, turns: Turns, make_agent: Callable[[], Agent]) -> tuple[StopReason, str]:
        """Run the agent step by step. A step in which a limit ended the agent is graded as well."""
        agent = StepwiseAgent(make_agent, self._context.job.spec, epoch=self._fence.epoch, watch=self._plugins)
        ended = await turns.run_within_time(agent.run(turns))
        turns.next_step()
        await agent.grade(turns)
        return ended

    def _begun(self, workspace: Workspace) -> AttemptRecord:
        return AttemptRecord(
            time=unix_time(),
            runner=self._context.runner,
            workspace=dict(workspace.handle),
            sandbox=dict(workspace.description),
            task=self._changed_task,
            mcp=self._tools.introduced,
            boot_seconds=round(self._boot_seconds, 6),
        )

    def _first_unwritten(self, workspace: Workspace, recorded: Sequence[Record]) -> list[Record]:
        if first_record(recorded, AttemptRecord) is not None:
            return []
        return [self._begun(workspace), *self._plugins.take_record()]

    def _oversight(self) -> Oversight:
        context, keeps_stale = self._context, self._on_stale is OnStale.KEEP
        lag = PolicyLag(context.newest_policy, None if keeps_stale else self._max_policy_lag)
        return Oversight(context.drain, lag, self._plugins, context.observer, self._situation())

    def _assigned(self, rollout: Rollout) -> Assignment:
        spec = self._context.job.spec
        return Assignment(rollout, spec.agent, spec.sampling, self._context.watch, job_tag(self._context.record.uid))

    def _make_program(self, spec_of_program: ProgramSpec, workspace: Workspace, recorded: Sequence[Record]) -> Program:
        current = self._context.current_model

        def model() -> Model:
            found = current()
            assert found is not None  # validation requires a model for this agent
            return found

        assignment = self._assigned(self._rollout)
        return Program(
            assignment,
            spec_of_program,
            session=f"{assignment.session}-{self._number}",
            model=model,
            workspace=workspace,
            journal=self._journal,
            recorded=recorded,
            unwritten=self._first_unwritten(workspace, recorded),
            oversight=self._oversight(),
        )

    def _make_turns(self, workspace: Workspace, recorded: Sequence[Record]) -> Turns:
        rollout, spec = self._rollout, self._context.job.spec
        act = self._environment
        if act is not None:
            rollout = replace(rollout, task=act.task)
        snapshots = Snapshots(self._context.snapshots, spec.sandbox.snapshot_every_turns, recorded)
        return Turns(
            self._assigned(rollout),
            tools=self._tools.tools if act is None else {act.name: act},
            model=self._context.current_model,
            workspace=workspace,
            log=AttemptLog(self._journal, recorded, self._first_unwritten(workspace, recorded)),
            oversight=self._oversight(),
            keeping=Keeping(snapshots, self._checkpoints, self._moved),
        )

    def _use_task(self, changed: Task) -> None:
        self._changed_task, self._rollout = changed, replace(self._rollout, task=changed)
        self._plugins.use_task(changed)
        self._spec = self._spec_of(self._rollout)
        self._provider = self._context.provider_for(changed)

    def _moved(self, workspace: Workspace) -> AttemptRecord:
        """Record that the agent continues in another workspace of the attempt."""
        self._workspace = workspace
        return self._begun(workspace)

    @property
    def _agent_spec(self) -> WorkspaceSpec:
        """Return the specification of the agent's workspace."""
        return self._spec if self._branching is None else self._branching.start_of(self._spec)

    async def _acquire(self) -> Workspace:
        started = time.perf_counter()
        spec = self._agent_spec

        async def acquire() -> Workspace:
            # Stored here because a cancellation at the same moment drops the return value.
            self._workspace = workspace = await self._provider.acquire(
                spec, attempt=f"{self._rollout.index}-{self._number}", fence=self._fence, name="agent"
            )
            return workspace

        workspace = await self._context.drain.unless_requested(acquire())
        if self._spec.network["agent"] != "None":
            await workspace.enter("agent", key="0:enter-agent")
        self._boot_seconds = time.perf_counter() - started
        self._context.observer(WorkspaceAcquired(self._rollout.index, self._boot_seconds))
        return workspace

    async def _grade_and_seal(self, stop: StopRecord, artifacts: ArtifactsRecord) -> Result:
        started = time.perf_counter()
        verifier = self._context.job.spec.verifier_of(self._rollout.task)
        self._phase = Phase.GRADING_IN_PLACE if verifier.mode is VerifierMode.SHARED else Phase.GRADING
        try:
            verdict = await self._grade(artifacts)
        except GradingLost as lost:
            return await self._seal(Outcome.VERIFIER_FAILED, None, reason=lost.reason, message=lost.message)
        self._phase = Phase.SEALING
        self._verifier_seconds = time.perf_counter() - started
        recorded = last_record(self._records, ChangesRecord)
        if self._changes and (recorded is None or recorded.diff != self._changes):
            await self._write(ChangesRecord(time=unix_time(), diff=self._changes))
        return await self._seal(Outcome.COMPLETED, verdict, message=stop.message)

    async def _grade(self, artifacts: ArtifactsRecord) -> Verdict | None:
        task, verifier = self._rollout.task, self._context.job.spec.verifier_of(self._rollout.task)
        if task.environment is not None or task.steps:
            return (
                episode_verdict(task.environment, self._records)
                if task.environment is not None
                else verdict_of_steps(task, self._records, verifier.failed_reward)
            )
        if task.verifier is None:
            return None
        if artifacts.message:
            return failed_verdict(artifacts.message, verifier)
        if verifier.mode is VerifierMode.SHARED:
            begun = last_record(self._records, AttemptRecord)
            assert begun is not None  # the agent has worked in a workspace
            workspace = self._workspace or await self._reattach_to(begun)
            is_first = first_record(self._records, StepRecord) is None
            if is_first:
                await self._write(StepRecord(time=unix_time(), step=task.name, grading=True))
                # As in `store_artifacts`: the executor needs room for the keys of the grading.
                await workspace.acknowledge(END_TURN)
            epoch = self._fence.epoch
            return await grade_in_place(task, verifier, workspace, epoch=epoch, is_first=is_first, watch=self._plugins)
        await self.release()
        return await grade_artifacts(
            task,
            verifier,
            self._provider,
            grading_spec(self._spec, task),
            attempt=f"{self._rollout.index}-{self._number}",
            fence=self._fence,
            artifacts=lambda: self._journal.load_artifacts(artifacts),
            attempts=self._context.job.spec.attempts,
            jitter=self._context.jitter,
            watch=self._plugins,
            # A branch has the files of its source's turns, whose copied records are older than its own.
            since=min((record.time for record in self._records), default=None),
            on_changes=self._note_changes,
        )

    def _note_changes(self, changes: str) -> None:
        self._changes = changes

    async def _seal(
        self, outcome: Outcome, verdict: Verdict | None, *, reason: str | None = None, message: str = ""
    ) -> Result:
        records = linear(self._records)
        result = build_result(
            self._context.job,
            self._rollout,
            self._number,
            records,
            token_capture=model.token_capture if (model := self._context.current_model()) is not None else "TextOnly",
            outcome=outcome,
            verdict=verdict,
            failures=self._failures,
            reason=reason,
            message=message,
            stale=self._is_stale(self._records),
            verifier_seconds=self._verifier_seconds,
        )
        if (problem := result.verifier_message) is not None:
            task, member = self._rollout.task.name, self._rollout.member
            self._context.observer(VerifierFailed(task, member, problem, output_of(verdict)))
        result = await self._plugins.finished(result, verdict, records)
        sealed = await self._journal.seal(result, verdict, self._records)
        await self._release_quietly()
        return sealed

    async def _release_quietly(self) -> None:
        """Release the workspace; a failure does not change the decision."""
        try:
            await self.release()
        except Exception:
            log.exception("rollout %d: its workspace could not be released", self._rollout.index)

    async def _fail(self, decision: Decision) -> FailedRecord:
        failure = FailedRecord(
            time=unix_time(),
            reason=decision.reason,
            message=decision.message,
            counted=decision.counted,
            unexplained=decision.unexplained,
            alone=self._situation().alone,
            usage=usage_of(self._all_records()),
        )
        await self._write(*self._plugins.take_record(), failure)
        await self._release_quietly()
        return failure

    def _is_stale(self, records: Sequence[Record]) -> bool:
        versions = versions_of(records)
        self._context.newest_policy.see(versions)
        first = versions[0] if versions else None
        return stale_message(first, self._context.newest_policy.version, self._max_policy_lag) is not None

    async def _write(self, *records: Record) -> None:
        """Journal the agent's unwritten records, then these. Called after the agent has ended."""
        unwritten = self._work.take_unwritten() if self._work is not None else []
        await self._journal.append([*unwritten, *records])
        self._records, self._work = [*self._all_records(), *records], None

    def _all_records(self) -> list[Record]:
        return [*self._records, *(self._work.records if self._work is not None else [])]
