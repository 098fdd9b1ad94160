"""The turns of one attempt. Every model call and tool call is journaled before it takes effect, and answered from the
journal when a later process continues the attempt.

A turn needs two writes. Tool results are written together with the intent of the next model call, while that call
already runs. The answer takes effect when it and these records are durable.
"""

import asyncio
import logging
import shlex
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, TypeVar

from agent_runtime.agents.base import Agent, AgentReport, Stop, SubTask
from agent_runtime.engine.attempt.agent_clock import AgentClock, agent_seconds_of
from agent_runtime.engine.attempt.assignment import Assignment, Budget, Oversight
from agent_runtime.engine.attempt.attempt_log import AttemptLog, Conversation, NotReplayable
from agent_runtime.engine.attempt.attribution import (
    AGENTS_TO_HANDLE,
    Action,
    AgentRaised,
    Decision,
    OutOfTime,
    Phase,
    attribute,
)
from agent_runtime.engine.attempt.left_behind import FailureLimit, leave_behind
from agent_runtime.engine.attempt.model_calls import ModelCalls
from agent_runtime.engine.attempt.snapshots import Keeping, WorkspaceStates
from agent_runtime.engine.attempt.tool_calls import CallsOfTurn, ToolRunner
from agent_runtime.engine.events import ModelCallFailing, TurnEnded
from agent_runtime.extensions import contained
from agent_runtime.models.base import ConversationRefused, Model, ModelError, ModelReply, ToolCall
from agent_runtime.models.token_history import answer_record, recorded_answer
from agent_runtime.plugins.plugins import CHANGED
from agent_runtime.recording.branches import branch_of, has_own_answer
from agent_runtime.sandboxes.base import WORKSPACE_USER, CommandResult, Workspace, standstill_of, without_silence
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN
from agent_runtime.tools.base import Tool, openai_definition, shortened
from agent_runtime.tools.bash import readable
from agent_runtime.wall_clock import unix_time
from rollout_api.files import TaskFile
from rollout_api.nesting import as_recorded, record_json
from rollout_api.records import (
    CommandRecord,
    IntentRecord,
    Message,
    Observation,
    ObservationsRecord,
    Record,
    ResponseRecord,
    StepRecord,
    StopReason,
)

ACKNOWLEDGE_EVERY = 8
"""Turns between two acknowledgements to the executor, which are requests. Remembering a few more keys is cheap."""
ACKNOWLEDGE_CALLS = 64
"""After this many tool calls, turns are acknowledged earlier: each call has some keys, and the executor remembers
4,096.
"""
STEPS_TO_NEXT_CALL = 8
"""Iterations of the event loop in which an agent's jobs get from one call to the next, also through nested
`asyncio.gather`.
"""
GRACE_SECONDS = 10.0
"""Time for an agent's own code to end after it was cancelled."""

log = logging.getLogger(__name__)

_in_a_call = ContextVar("_in_a_call", default=False)
"""Whether this code runs within a call of an agent, for which a further call would wait forever."""

COMMAND_BYTES: Final = 16_000
"""Most bytes of a command outside of turns, and of its result, in the record: an attempt may have 4,000 of them."""
_REPLAY = object()
"""Reason for which the agent's clock stops while its calls are answered from the journal."""
T = TypeVar("T")
Rerun = Callable[[ObservationsRecord, Sequence[ToolCall], Mapping[str, Tool]], Awaitable[None]]


class RecordEnded(Exception):
    """The agent made a call that is not recorded, in a rerun of the recorded ones."""


class Turns:
    """Implements `agent_runtime.agents.base.AgentContext` with the attempt's log, a model and a workspace.

    `rerun` repeats the calls of replayed turns; with it, `keeping` is None.
    """

    def __init__(
        self,
        assignment: Assignment,
        *,
        tools: Mapping[str, Tool],
        model: Callable[[], Model | None],
        workspace: Workspace,
        log: AttemptLog,
        oversight: Oversight,
        keeping: Keeping | None = None,
        rerun: Rerun | None = None,
    ) -> None:
        task, spec = assignment.rollout.task, assignment.agent
        self.task, self.spec, self.tools = task, spec, tools
        self.working_dir = workspace.working_dir
        self.turn = -1
        self.fault: Exception | None = None
        """The error that ended the agent's work. Every further call raises it again, even if the agent catches it."""
        self.exposed = has_own_answer(log.recorded)
        """Whether a tool call or a command may have run in the workspace, in this process or an earlier one."""
        self.traceback: str | None = None
        """Traceback of the first exception of the agent's own code, in any step."""
        self._index, self._log, self._rerun = assignment.rollout.index, log, rerun
        self._drain, self.policy_lag, self._observer = oversight.drain, oversight.policy_lag, oversight.observer
        self._situation = oversight.situation
        self._branch = branch_of(log.recorded)
        self._clock = AgentClock(task.timeouts.agent_seconds, agent_seconds_of(log.recorded))
        self._states = WorkspaceStates(workspace, log, self._clock, keeping)
        self._tool_runner = ToolRunner(self._index, self._states, log, self._clock, oversight)
        self._models = ModelCalls(
            assignment, model, self._clock, lambda why: self._observer(ModelCallFailing(self._index, why))
        )
        self._definitions = [openai_definition(tool) for tool in tools.values()]
        self._talking = [Conversation()]
        """The agent's conversation, then those of running sub-agents, each started by the previous one."""
        self._tools_may_have_run = False
        self._unacknowledged = 0
        """Tool calls whose keys the executor still remembers."""
        self._observed_turn = -1
        """The latest turn with tool results."""
        self._commands = 0
        """Number of calls outside turns, used in their idempotency keys."""
        self._recorded_commands = {record.number for record in log.recorded if isinstance(record, CommandRecord)}
        self._one_call = asyncio.Lock()
        self.failing_seldom = FailureLimit()
        self._callers: set[asyncio.Task[Any]] = set()
        """Coroutines that wait for a call of this context."""
        self._has_ended = False
        """Whether the agent has ended, or must. Its coroutines may still make calls."""
        self.left_behind = False
        """Whether the agent's code did not end when it was cancelled, and may still be running."""
        self._budget = Budget(spec.max_turns, spec.token_budget, task.timeouts.agent_seconds)

    @property
    def records(self) -> list[Record]:
        """The attempt's records so far, journaled or about to be."""
        return self._log.records

    @property
    def agent_seconds(self) -> float:
        """Return the time that the agent has used, under earlier runners too."""
        return round(self._clock.used(), 6)

    @property
    def workspace(self) -> Workspace:
        """The agent's current workspace. It changes when the agent saves or returns to a checkpoint."""
        return self._states.workspace

    async def run_agent(self, make_agent: Callable[[], Agent]) -> tuple[StopReason, str]:
        """Run a new agent within its time; return why it stopped, with a message. Raises errors that prevent grading.

        The time excludes waiting for the journal and for a failing model server. An exception in the agent's constructor
        counts as an error of the agent's own code.
        """

        async def run_new() -> str | None:
            with contained():
                agent = make_agent()
            return await self.run_code(agent)

        return await self.run_within_time(run_new())

    async def run_within_time(self, running: Coroutine[Any, Any, str | None]) -> tuple[StopReason, str]:
        """Wait for agents that `run_code` runs, as `run_agent` does."""
        raised: Exception | None = None
        try:
            async with self._clock.running():
                if self._log.replaying:
                    self._clock.begin_wait(_REPLAY)
                message = await running
        except Exception as error:  # noqa: BLE001 see decision_about
            raised = error
        if raised is None and self.fault is None:
            return StopReason.FINISHED, message or ""
        cause, decision = await self.decision_about(raised)
        if decision.action is not Action.COMPLETE or decision.stop_reason is None:
            raise cause
        self.traceback = self.traceback or decision.traceback
        return decision.stop_reason, decision.message

    async def run_code(self, agent: Agent) -> str | None:
        """Run an agent's own code; return its message. Code that does not end after its cancellation is left behind:
        its further calls fail, and later wait forever.
        """
        self._has_ended, self.failing_seldom = False, (limit := FailureLimit())
        job = asyncio.create_task(self._contained(agent))
        try:
            ends: set[asyncio.Future[Any]] = {job, limit.ignored}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._has_ended = True
            for caller in {*self._callers, job}:  # nothing is recorded after the agent's end
                caller.cancel()
            await self._clock.untimed(self._wait_for_end(job, 0 if limit.ignored.done() else GRACE_SECONDS))
        if limit.ignored.done():
            raise RuntimeError(str(limit.cancellation)) from limit.cancellation
        with contained():
            return job.result()

    async def _contained(self, agent: Agent) -> str | None:
        with contained():
            message = await agent.run(self)
        if not isinstance(message, str | None):  # the agent may pass a value from the model's answer, of any type
            raise TypeError(
                f"{type(agent).__name__}.run returned a value of type {type(message).__name__}; "
                "expected the final message as text, or None"
            )
        return message

    async def _wait_for_end(self, job: "asyncio.Task[str | None]", seconds: float) -> None:
        try:
            await asyncio.wait({job}, timeout=seconds)
        finally:
            if not job.done():
                self.left_behind = True
                leave_behind(job)
                log.warning(
                    "rollout %d: the agent's code did not end when it was cancelled, and is left behind; do not catch "
                    "BaseException, or all exceptions by a bare `except:`, around calls",
                    self._index,
                )
            elif not job.cancelled():
                job.exception()  # otherwise asyncio reports that it was not retrieved

    async def decision_about(self, raised: Exception | None) -> tuple[Exception, Decision]:
        """Return the decision about the agent's error and the error that caused it. The first error of its context
        takes precedence.
        """
        cause: Exception
        if self.fault is not None:
            cause = self.fault
        elif isinstance(raised, TimeoutError) and self._clock.expired:
            cause = OutOfTime(f"timeouts.agentSeconds {self.task.timeouts.agent_seconds} ran out")
            # A failing server, or a sandbox that stood still, used up the time, not the policy.
            trouble = await self._clock.untimed(self._models.trouble())
            cause = trouble or await self._clock.untimed(standstill_of(self._states.workspace)) or cause
        else:
            assert raised is not None, "without an error, the agent has returned"
            cause = AgentRaised(raised)
        if isinstance(cause, ModelError | ConversationRefused):
            await self._clock.untimed(self._models.probe(cause))
        answered = has_own_answer(self._log.records)
        situation = replace(self._situation, phase=Phase.AGENT, answered=answered, exposed=self.exposed)
        return cause, attribute(cause, situation)

    def take_unwritten(self) -> list[Record]:
        """Return and clear the records that must be part of the next write."""
        return self._log.take_unwritten()

    async def call_model(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        conversation: Conversation | None = None,
    ) -> ModelReply:
        """Make one turn's model call (see AgentContext); `conversation` is that of the calling sub-agent.

        Raises RuntimeError while one of its sub-agents runs, and TypeError or ValueError for values that cannot be
        recorded.
        """
        conversation = conversation or self._talking[0]
        tools = self._definitions if tools is None else tools
        async with self.failing_seldom:
            self._require_latest(conversation)
            unrecorded = conversation.unrecorded(messages)
            _require("messages", unrecorded, Mapping, 'an object, such as {"role": "user", "content": "…"}')
            _require("tools", tools, Mapping, "a tool's definition as an object")
            record_json([*unrecorded, *tools])
        return await self._in_order(lambda: self._call_model(conversation, messages, tools))

    async def delegate(self, agent: Agent, part: SubTask, *, conversation: Conversation | None = None) -> AgentReport:
        """Run a sub-agent (see AgentContext) of the agent with that conversation."""
        started = Conversation()
        async with self.failing_seldom:
            self._require_latest(conversation or self._talking[0])
            sub_agent = SubAgent(self, started, part)
        self._talking.append(started)
        try:
            return await sub_agent.run(agent)
        finally:
            self._talking.pop()

    async def call_tools(
        self,
        calls: Sequence[ToolCall],
        *,
        conversation: Conversation | None = None,
        tools: Mapping[str, Tool] | None = None,
    ) -> list[Observation]:
        """Run the tool calls of the turn (see AgentContext). Those of a sub-agent never end the rollout."""
        asked, given = conversation or self._talking[0], self.tools if tools is None else tools
        async with self.failing_seldom:
            _require("calls", calls, ToolCall, "a ToolCall")
        return await self._in_order(lambda: self._call_tools(asked, calls, given, may_stop=conversation is None))

    async def run_command(self, command: str) -> CommandResult:
        """Run a shell command outside any turn (see AgentContext). Repeated after a crash, it gives the same result."""
        async with self.failing_seldom:
            _require("command", command if isinstance(command, list | tuple) else [command], str, "text")
        await self._require_own_turns("runs commands")
        self.exposed = True

        async def run() -> CommandResult:
            key, seconds = self._next_key("command"), self._clock.seconds
            workspace, pausing = self._states.workspace, self._clock.pauses()
            with without_silence(workspace, self._clock.silences()):
                result = await workspace.run(command, key=key, deadline_seconds=seconds, pausing=pausing)
            self._record_command(command, result)
            return result

        return await self._in_order(run)

    def _record_command(self, command: str, result: CommandResult) -> None:
        """Add a record of a command, for readers alone: a replay gets the result from the executor."""
        if self._commands in self._recorded_commands:
            return
        words = command if isinstance(command, str) else shlex.join(command)
        self._log.add(
            CommandRecord(
                number=self._commands,
                turn=self.turn,
                time=unix_time(),
                seconds=result.seconds,
                command=shortened(words, COMMAND_BYTES),
                result=shortened(readable(result), COMMAND_BYTES),
            )
        )

    async def put_files(self, files: Sequence[TaskFile]) -> None:
        """Write files outside any turn (see AgentContext)."""
        async with self.failing_seldom:
            _require("files", files, TaskFile, "a TaskFile")
        await self._require_own_turns("writes files")

        async def write() -> None:
            key, workspace = self._next_key("files"), self._states.workspace
            with without_silence(workspace, self._clock.silences()):
                for number, file in enumerate(files):
                    await workspace.write(
                        file.path,
                        file.data(),
                        key=f"{key}.{number}",
                        mode=file.mode,
                        replace=True,
                        owner=WORKSPACE_USER if file in self.task.solution_files else None,
                    )

        await self._in_order(write)

    async def snapshot(self) -> None:
        """Store the workspace's state for other jobs to start from (see AgentContext)."""
        await self._in_order(
            # Until the turn's own tool calls run, the state is that after the previous turn.
            lambda: self._states.snapshot(self.turn if self._observed_turn == self.turn else self.turn - 1)
        )

    async def checkpoint(self) -> str:
        """Save the workspace as a checkpoint (see AgentContext)."""
        await self._require_turns_alone()
        # Untimed, because a time-out in between would leave a frozen workspace, which cannot be graded.
        return await self._in_order(lambda: self._clock.untimed(self._states.checkpoint(self.turn)))

    async def go_back(self, checkpoint: str) -> None:
        """Return to a checkpoint (see AgentContext)."""
        await self._require_turns_alone()
        await self._in_order(lambda: self._clock.untimed(self._states.go_back(checkpoint, self.turn)))

    async def run_between_turns(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work of the engine between two turns. Its time does not count for the agent, and its errors end
        the attempt.
        """
        return await self._guarded(lambda: self._clock.untimed(work()))

    async def recorded_once(self, make: Callable[[], Awaitable[StepRecord]]) -> StepRecord:
        """Return the step's next record in the journal, or else store the result of `make`. It is durable when this
        returns.
        """
        record = self._log.next(StepRecord, self.turn)
        if record is None:
            record = await make()
            await self._clock.untimed(self._log.write(record))
        return record

    def begin_conversation(self) -> None:
        """Begin a new conversation: the agent's next model call extends no earlier one."""
        self._talking[0] = Conversation()

    def next_step(self) -> None:
        """Continue after the error that ended a step's agent."""
        self.fault = None

    def _next_key(self, kind: str) -> str:
        # The result is not recorded, so a replay requests it from the executor. This key must not be acknowledged.
        self._commands += 1
        return f"{LIFECYCLE_TURN}:{kind}.{self._commands}"

    def _require_latest(self, conversation: Conversation) -> None:
        if conversation is not self._talking[-1]:
            raise RuntimeError(
                "an agent called the model, or started a second sub-agent, while its sub-agent runs; await the "
                "first one: "
                "concurrent calls could not be replayed in the same order after a crash"
            )

    async def _require_own_turns(self, what: str) -> None:
        """Raise NotReplayable during the copied turns of a branch, and in a rerun of them: their workspace may be a
        restored one, which includes such work or not.
        """
        is_copied = self._branch is not None and self.turn <= self._branch.turn
        if self._rerun is not None or is_copied:
            self.fault = NotReplayable(
                f"the agent {what} outside of its turns, which is not recorded, so its rollouts cannot be branched"
            )
            async with self.failing_seldom:
                raise self.fault

    async def _require_turns_alone(self) -> None:
        async with self.failing_seldom:
            if self.task.services:
                raise RuntimeError(
                    "checkpoints are not possible in a task with services, which would keep running in their later state; "
                    "use snapshots and tasks.branch"
                )
            if self.task.environment is not None:
                raise RuntimeError(
                    "checkpoints are not possible in a task with an environment, whose episode would not go back; run "
                    "several rollouts"
                )
            if self._commands or self._states.keeping is None:
                raise RuntimeError(
                    "checkpoints are only for agents that work in turns: calls of run_command cannot be distinguished "
                    "after a crash"
                )

    async def _in_order(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make one call of the agent at a time, because a replay answers calls in their recorded order.

        Concurrent jobs of an agent must make their calls in the same order in a replay, whose answers take no time. So
        no call ends before the other jobs have reached their own next calls.
        """
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine of asyncio runs in a task"
        async with self.failing_seldom:
            if _in_a_call.get():
                raise RuntimeError(
                    "a tool cannot use its agent's context: the agent's calls are made one after another"
                )
            self._callers.add(caller)
            try:
                async with self._one_call:
                    is_inside = _in_a_call.set(True)
                    reached = asyncio.ensure_future(_let_others_run())
                    try:
                        if self._has_ended:
                            raise self.fault or RuntimeError(
                                "the agent has ended; it must await every call before it returns"
                            )
                        result = await self._guarded(call)
                    finally:
                        _in_a_call.reset(is_inside)
                        await reached
            finally:
                self._callers.discard(caller)
        self.failing_seldom.failed_in_a_row = 0
        return result

    async def _guarded(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self.fault is not None:
            raise self.fault
        if not self._log.replaying:
            self._clock.end_wait(_REPLAY)
        try:
            return await call()
        except AGENTS_TO_HANDLE:
            raise
        except Exception as error:
            self.fault = error
            raise

    async def _call_model(
        self, conversation: Conversation, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ModelReply:
        if (exhausted := self._budget.exhausted()) is not None:
            raise Stop(exhausted)
        if not self._log.replaying:
            self.policy_lag.refuse_if_stale()
            if self._drain.requested:
                await self._clock.untimed(self._stop_for_drain())
            await self._states.snapshot_if_due(self.turn)
        self.turn += 1
        intent = conversation.intent(self.turn, messages, tools, self.agent_seconds)
        replayed = self._log.next(IntentRecord, self.turn)
        if replayed is None:
            self._log.add(intent)
        else:
            _check_replay(replayed, intent)
        answer = None if replayed is None else self._log.next(ResponseRecord, self.turn)
        self._tools_may_have_run = answer is not None
        if answer is None:
            answer = await self._ask(conversation, messages, tools)
        return self._answered(conversation, answer, replayed=self._tools_may_have_run)

    async def _ask(
        self, conversation: Conversation, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ResponseRecord:
        """Call the model while the unwritten records are written; return the durable answer."""
        if self._rerun is not None:
            raise RecordEnded
        self._clock.end_wait(_REPLAY)
        writing = self._log.begin_write()
        try:
            reply, seconds = await self._models.ask(self.turn, conversation.tokens, messages, tools, self._budget)
        finally:
            if writing is not None:
                await self._clock.untimed(writing)
        # The agent gets the same text as in a replay.
        reply = replace(reply, message=as_recorded(reply.message))
        experts = await self._clock.untimed(self._log.store_experts(self.turn, reply.routed_experts))
        response = answer_record(
            reply,
            turn=self.turn,
            seconds=seconds,
            known=conversation.tokens.ids,
            agent_seconds=self.agent_seconds,
            experts=experts,
        )
        await self._clock.untimed(self._log.write(response))
        if self.turn and (self.turn % ACKNOWLEDGE_EVERY == 0 or self._unacknowledged >= ACKNOWLEDGE_CALLS):
            await self._states.workspace.acknowledge(self.turn)
            self._unacknowledged = 0
        return response

    def _answered(self, conversation: Conversation, response: ResponseRecord, *, replayed: bool) -> ModelReply:
        messages = conversation.answered(response.message)
        self.policy_lag.see(response.policy_spans)
        used = response.usage.prompt_tokens + response.usage.completion_tokens
        self._budget = self._budget.after(turns=1, tokens=used)
        self._observer(TurnEnded(self._index, self.turn, response.seconds, response.usage, replayed))
        return recorded_answer(response, conversation.tokens.add(response, messages))

    async def _stop_for_drain(self) -> None:
        await self._log.write()
        await self._drain.park()

    async def _call_tools(
        self, conversation: Conversation, calls: Sequence[ToolCall], tools: Mapping[str, Tool], *, may_stop: bool
    ) -> list[Observation]:
        record = self._log.next(ObservationsRecord, self.turn)
        first = conversation.calls
        conversation.calls += len(calls)
        self._unacknowledged += len(calls)
        if record is not None:
            _check_results(record, calls)
        elif self._rerun is not None:
            raise RecordEnded
        if record is None:
            self.exposed = self.exposed or bool(calls)
            turn = self.turn if conversation.turn is None else conversation.turn
            # Calls of an earlier turn, which waited for a sub-agent, get keys of this turn, because the earlier turn
            # may be acknowledged.
            key = f"{self.turn + 1}:" if turn == self.turn else f"{self.turn + 1}:turn-{turn}."
            self._clock.end_wait(_REPLAY)
            asked_for = CallsOfTurn(turn, calls, tools, self.task, key, first, interrupted=self._tools_may_have_run)
            started, ended = time.perf_counter(), list[Observation]()

            def observed(results: Sequence[Observation]) -> ObservationsRecord:
                made = ObservationsRecord(
                    turn=turn,
                    time=unix_time(),
                    seconds=round(time.perf_counter() - started, 6),
                    results=conversation.with_arguments(calls[: len(results)], results),
                    agent_seconds=self.agent_seconds,
                )
                self._log.add(made)
                return made

            try:
                record = observed(await self._tool_runner.run(asked_for, ended))
            except Exception:
                if ended:
                    # What they did counts: an environment's rewards, good and bad.
                    observed(ended)
                raise
        elif self._rerun is not None:
            await self._rerun(record, calls, tools)
        self._observed_turn = record.turn
        for observation in record.results:
            if observation.stop and may_stop:
                raise Stop(StopReason.FINISHED, observation.content)
        return record.results


class SubAgent:
    """Implements `AgentContext` for a sub-agent. Its turns count towards the attempt's budgets, and are recorded in the
    attempt's journal.
    """

    def __init__(self, turns: Turns, conversation: Conversation, part: SubTask) -> None:
        names = turns.tools if part.tools is None else part.tools
        if unknown := [name for name in names if name not in turns.tools]:
            raise ValueError(
                f"sub-agent: there is no tool {', '.join(unknown)} in this job; it has "
                f"{', '.join(turns.tools) or 'none'}"
            )
        self.task = turns.task.model_copy(update={"prompt": part.prompt})
        changes = {"system_prompt": part.system_prompt, "max_turns": part.max_turns or turns.spec.max_turns}
        self.spec = turns.spec.model_copy(update=changes)
        self.working_dir = turns.working_dir
        self.tools: Mapping[str, Tool] = {name: turns.tools[name] for name in names}
        self._definitions = [openai_definition(tool) for tool in self.tools.values()]
        self._turns, self._conversation = turns, conversation
        self._calls = 0
        # The same tools as the attempt's own agent.
        self.run_command, self.put_files = turns.run_command, turns.put_files
        self.snapshot, self.checkpoint, self.go_back = turns.snapshot, turns.checkpoint, turns.go_back

    async def run(self, agent: Agent) -> AgentReport:
        """Run the sub-agent to its end. Raises errors that end the attempt."""
        try:
            return AgentReport(StopReason.FINISHED, await agent.run(self) or "")
        except Stop as stop:
            if self._turns.fault is not None:
                raise
            return AgentReport(stop.reason, stop.message)

    async def call_model(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelReply:
        """See AgentContext."""
        async with self._turns.failing_seldom:
            if self._calls >= self.spec.max_turns:
                raise Stop(StopReason.MAX_TURNS)
        self._calls += 1
        definitions = self._definitions if tools is None else tools
        return await self._turns.call_model(messages, definitions, conversation=self._conversation)

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """See AgentContext. A tool that ends the rollout ends this agent alone."""
        observations = await self._turns.call_tools(calls, conversation=self._conversation, tools=self.tools)
        for observation in observations:
            if observation.stop:
                raise Stop(StopReason.FINISHED, observation.content)
        return observations

    async def delegate(self, agent: Agent, part: SubTask) -> AgentReport:
        """See AgentContext."""
        return await self._turns.delegate(agent, part, conversation=self._conversation)


def _require(name: str, values: Iterable[object], kind: type, expected: str) -> None:
    """Raise TypeError for an argument of the wrong type. It may come from the policy's answer, so it must not fail as an
    error of the engine, which would be retried and masked.
    """
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{name}: got a value of type {type(value).__name__}, expected {expected}")


async def _let_others_run() -> None:
    for _ in range(STEPS_TO_NEXT_CALL):
        await asyncio.sleep(0)


def _check_replay(recorded: IntentRecord, now: IntentRecord) -> None:
    fields = ("conversation", "parent", "keep", "messages", "tools")
    if any(getattr(recorded, field) != getattr(now, field) for field in fields):
        raise _differs(now.turn, "messages")


def _check_results(recorded: ObservationsRecord, calls: Sequence[ToolCall]) -> None:
    """Raise NotReplayable if the results are those of other calls, for example of another job of the agent, because a
    clock decided the order.
    """
    asked = [(as_recorded(call.id), as_recorded(call.name)) for call in calls]
    # A plugin may have changed the tool.
    answered = [
        (result.call_id, name if CHANGED in result.data else result.tool)
        for result, (_, name) in zip(recorded.results, asked, strict=False)
    ]
    if len(recorded.results) != len(calls) or answered != asked:
        raise _differs(recorded.turn, "tool calls")


def _differs(turn: int, what: str) -> NotReplayable:
    return NotReplayable(
        f"turn {turn}: the agent's {what} differ from the recorded ones; "
        "an agent must be a function of what its context returned (without clock, random numbers and its own state)"
    )
