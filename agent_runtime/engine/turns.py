"""The turns of one attempt: every model call and tool call is journaled before it is acted on, and answered from the
journal when a later process goes on with the attempt.

A turn costs two writes. What its tools returned waits for the next model call and is written together with that call's
intent, while the call already runs; the answer is acted on when both are durable.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from agent_runtime.agents.base import Agent, AgentReport, Stop, SubTask
from agent_runtime.engine.branching_checkpoints import Checkpoints
from agent_runtime.engine.branching_snapshots import Snapshots
from agent_runtime.engine.budgets import Budget
from agent_runtime.engine.conversation import Branches, Conversation
from agent_runtime.engine.drain import Drain
from agent_runtime.engine.events import Observer, ToolEnded, TurnEnded
from agent_runtime.engine.seeds import turn_seed
from agent_runtime.engine.staleness_policy import NewestPolicy, StalePolicy, numbers, stale_message
from agent_runtime.engine.sub_agent import SubAgent
from agent_runtime.engine.tool_workspace import KeyedWorkspace
from agent_runtime.environments.act import Act
from agent_runtime.models.base import (
    CallHealth,
    ContentFiltered,
    ContextExceeded,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    TokenPrefix,
    ToolCall,
)
from agent_runtime.plugins.of_rollout import RolloutPlugins
from agent_runtime.recording.answers import answer_record, recorded_answer
from agent_runtime.recording.token_history import TokenHistory
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure, Workspace, WorkspaceLimit
from agent_runtime.tools.base import Tool, ToolContext
from agent_runtime.tools.dispatch import dispatch
from rollout_api.model import Sampling
from rollout_api.records import (
    AttemptRecord,
    CheckpointRecord,
    IntentRecord,
    Message,
    Observation,
    ObservationsRecord,
    Record,
    ResponseRecord,
    ReturnRecord,
    StepRecord,
    StopReason,
)
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.tasks import Task, TaskFile

ACKNOWLEDGE_EVERY = 8
"""Turns between two watermarks: each is a request, and the executor remembers a few keys cheaply."""


T = TypeVar("T")
REPLAYED = IntentRecord | ResponseRecord | ObservationsRecord | StepRecord | CheckpointRecord | ReturnRecord
R = TypeVar("R", IntentRecord, ResponseRecord, ObservationsRecord, StepRecord, CheckpointRecord, ReturnRecord)


class NotReplayable(Exception):
    """The agent did not repeat a call that the journal has: it is not a function of what its context returned."""


class Journal(Protocol):
    """The one thing the turns need of a journal."""

    async def append(self, records: Sequence[Record]) -> None:
        """Durable when it returns."""


class Turns:
    """Implements `agent_runtime.agents.base.AgentContext` over a journal, a model and a workspace."""

    def __init__(
        self,
        *,
        task: Task,
        spec: AgentSpec,
        sampling: Sampling,
        seed: int,
        index: int,
        member: int,
        tools: Mapping[str, Tool],
        definitions: Sequence[Mapping[str, Any]],
        model: Callable[[], Model | None],
        workspace: Workspace,
        journal: Journal,
        replay: Sequence[Record],
        recorded: Sequence[Record] = (),
        unwritten: Sequence[Record] = (),
        drain: Drain | None = None,
        newest_policy: NewestPolicy | None = None,
        max_policy_lag: int | None = None,
        plugins: RolloutPlugins | None = None,
        observer: Observer = lambda event: None,
        snapshots: Snapshots | None = None,
        checkpoints: Checkpoints | None = None,
        moved: Callable[[Workspace], AttemptRecord] | None = None,
        rerun: Callable[[ObservationsRecord, Sequence[ToolCall]], Awaitable[None]] | None = None,
    ) -> None:
        self.task, self.spec, self.tools = task, spec, tools
        self.working_dir = workspace.working_dir
        self.records: list[Record] = [*recorded, *unwritten]
        """The attempt's records so far, journaled or about to be."""
        self.turn = -1
        self.tool_calls = 0
        self.died_in_tool_call = False
        """The sandbox was lost while a tool call of this very rollout ran in it."""
        self.fault: BaseException | None = None
        """What ended the attempt from outside; raised again by every further call, whatever the agent catches."""
        self._sampling, self._seed, self._index, self._member = sampling, seed, index, member
        self._definitions = definitions
        self._model, self._workspace, self._journal, self._observer = model, workspace, journal, observer
        self._snapshots, self._checkpoints, self._moved = snapshots, checkpoints, moved
        self._rerun = rerun
        self._drain, self._plugins = drain or Drain(), plugins
        self._newest_policy, self._max_policy_lag = newest_policy or NewestPolicy(), max_policy_lag
        self._first_policy: int | None = None
        """Version of the first token whose version is known."""
        self._replay = [r for r in replay if isinstance(r, REPLAYED)]
        self._replay.reverse()
        self._unwritten: list[Record] = list(unwritten)
        self._branches = Branches()
        self._talking = [Conversation(self._branches)]
        """The agent's own conversation, and those of the sub-agents that run now, each started by the one before it."""
        self._tools_may_have_run = False
        self._workspace_lock = asyncio.Lock()
        self._health = CallHealth()
        self._observed_turn = -1
        """The latest turn that has results of tool calls."""
        self._commands = 0
        self._budget = Budget(spec.max_turns, spec.token_budget, task.timeouts.agent_seconds)
        self._deadline: asyncio.Timeout | None = None
        self._held_seconds = 0.0
        """Left of the agent's time while its deadline stands still."""

    @property
    def budget(self) -> Budget:
        """What the agent has left."""
        return self._budget

    async def run_agent(self, agent: Agent) -> tuple[StopReason, str]:
        """Run the agent within its time. Raises what took the attempt away from it; its own failures are a stop reason.

        Time spent waiting for the journal, or for a model server that fails, counts for nobody.
        """
        try:
            async with asyncio.timeout(self._budget.seconds) as deadline:
                self._deadline = deadline
                message = await agent.run(self)
        except Stop as stop:
            return self._end(stop.reason, stop.message)
        except TimeoutError as error:
            if deadline.expired() and self._health.failing is not None:
                # The time ran out on a server that failed, not on the policy.
                raise ModelError("Unreachable", self._health.failing) from None
            if deadline.expired():
                return self._end(
                    StopReason.AGENT_TIMEOUT, f"timeouts.agentSeconds {self.task.timeouts.agent_seconds} ran out"
                )
            return self._end(StopReason.AGENT_ERROR, f"{type(error).__name__}: {error}")
        except (ContextExceeded, ContentFiltered) as error:
            return self._end(_stop_reason(error), str(error))
        except Exception as error:  # noqa: BLE001 an agent's own failure must not look like infrastructure's
            return self._end(StopReason.AGENT_ERROR, f"{type(error).__name__}: {error}")
        finally:
            self._deadline = None
        return self._end(StopReason.FINISHED, message or "")

    def _end(self, reason: StopReason, message: str) -> tuple[StopReason, str]:
        """What the attempt ends with: what its context said first counts, whatever the agent made of it."""
        fault = self.fault
        if fault is None:
            return reason, message
        if isinstance(fault, Stop):
            return fault.reason, fault.message
        if isinstance(fault, ContextExceeded | ContentFiltered):
            return _stop_reason(fault), str(fault)
        if isinstance(fault, WorkspaceLimit):
            return StopReason.RESOURCE_LIMIT, f"{fault.cause}: {fault.message}"
        raise fault

    def refuse_if_stale(self) -> None:
        """Raise StalePolicy where more work on this rollout would be for nothing."""
        if message := stale_message(self._first_policy, self._newest_policy.version, self._max_policy_lag):
            raise StalePolicy(message)

    def take_unwritten(self) -> list[Record]:
        """Records that still have to be written, with whatever comes next."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    async def call_model(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelReply:
        """One turn's model call (see AgentContext)."""
        return await self.talk(self._talking[0], messages, self._definitions if tools is None else tools)

    async def talk(
        self, conversation: Conversation, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ModelReply:
        """The next turn, which is one of that conversation. Raises RuntimeError while a sub-agent of its runs."""
        self._require_latest(conversation)
        return await self._guarded(self._call_model(conversation, messages, tools))

    async def delegate(self, agent: Agent, part: SubTask) -> AgentReport:
        """Run a sub-agent (see AgentContext)."""
        return await self.delegate_from(self._talking[0], agent, part)

    async def delegate_from(self, conversation: Conversation, agent: Agent, part: SubTask) -> AgentReport:
        """Run a sub-agent of the agent that holds that conversation."""
        self._require_latest(conversation)
        started = Conversation(self._branches)
        sub_agent = SubAgent(self, started, part)
        self._talking.append(started)
        try:
            return await sub_agent.run(agent)
        finally:
            self._talking.pop()

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Run the tool calls of the turn (see AgentContext)."""
        return await self._guarded(self._call_tools(self._talking[0], calls, self.tools, may_stop=True))

    async def use_tools(
        self, conversation: Conversation, calls: Sequence[ToolCall], tools: Mapping[str, Tool]
    ) -> list[Observation]:
        """Run the calls of a sub-agent's turn with its tools. One that stops says so, and does not end the rollout."""
        return await self._guarded(self._call_tools(conversation, calls, tools, may_stop=False))

    async def run_command(self, command: str) -> CommandResult:
        """Run a shell command outside of any turn (see AgentContext). Repeated after a crash it gives the same result."""
        if self._rerun is not None:
            self.fault = NotReplayable(
                "the agent runs commands outside of its turns, and their results are not recorded"
            )
            raise self.fault
        self._commands += 1
        return await self._guarded(
            self._workspace.run(
                command,
                key=f"{max(self.turn, 0) + 1}:command.{self._commands}",
                deadline_seconds=self._budget.seconds,
            )
        )

    async def snapshot(self) -> None:
        """Store the workspace's state for other jobs to start from (see AgentContext)."""
        # Before the turn's own tool calls, the state is still the one after the turn before.
        turn = self.turn if self._observed_turn == self.turn else self.turn - 1
        if self._snapshots is not None and not self._replay and self._snapshots.lacks(turn):
            await self._guarded(self._untimed(self._take_snapshot(self._snapshots, turn)))

    async def checkpoint(self) -> str:
        """Keep the workspace as it is, to go back to (see AgentContext)."""
        return await self._guarded(self._checkpoint(self._checkpoints_or_refusal()))

    async def go_back(self, checkpoint: str) -> None:
        """Go on in the state of a checkpoint (see AgentContext)."""
        await self._guarded(self._go_back(self._checkpoints_or_refusal(), checkpoint))

    async def put_files(self, files: Sequence[TaskFile]) -> None:
        """Put files in outside of any turn (see AgentContext)."""
        self._commands += 1
        key = f"{max(self.turn, 0) + 1}:files.{self._commands}"
        for number, file in enumerate(files):
            writing = self._workspace.write(file.path, file.data(), key=f"{key}.{number}", mode=file.mode, replace=True)
            await self._guarded(writing)

    async def beside_turns(self, work: Coroutine[Any, Any, T]) -> T:
        """Something of the engine's own between two turns: it counts for nobody, and its failures end the attempt."""
        return await self._guarded(self._untimed(work))

    async def recorded_once(self, make: Callable[[], Awaitable[StepRecord]]) -> StepRecord:
        """The step's record that the journal has next; else the one that `make` gives, durable when this returns."""
        record = self._next_replayed(StepRecord)
        if record is None:
            record = await make()
            self._unwritten.append(record)
            self.records.append(record)
            await self._journal.append(self.take_unwritten())
        else:
            self.records.append(record)
        return record

    def go_on_after(self, stop: Stop) -> None:
        """Let the agent of the next step work, although a tool ended this one."""
        if self.fault is stop:
            self.fault = None

    def _require_latest(self, conversation: Conversation) -> None:
        if conversation is not self._talking[-1]:
            raise RuntimeError(
                "an agent called the model, or started a second sub-agent, while a sub-agent of its runs; await that first: "
                "calls side by side could not be answered in the same order after a crash"
            )

    async def _guarded(self, call: Coroutine[Any, Any, T]) -> T:
        if self.fault is not None:
            call.close()
            raise self.fault
        try:
            return await call
        except Exception as error:
            self.fault = error
            raise

    async def _call_model(
        self, conversation: Conversation, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ModelReply:
        if (exhausted := self._budget.exhausted()) is not None:
            raise Stop(exhausted)
        if not self._replay:
            self.refuse_if_stale()
        if self._drain.requested and not self._replay:
            await self._untimed(self._come_to_a_stop())
        if self._snapshots is not None and not self._replay and self._snapshots.due(self.turn):
            await self._untimed(self._take_snapshot(self._snapshots, self.turn))
        self.turn += 1
        intent = conversation.intent(self.turn, messages, tools)
        replayed = self._next_replayed(IntentRecord)
        if replayed is None:
            self.records.append(intent)
            self._unwritten.append(intent)
        else:
            _check_replay(replayed, intent)
            self.records.append(replayed)
            if (answer := self._next_replayed(ResponseRecord)) is not None:
                self._tools_may_have_run = True
                self._shift_deadline(-answer.seconds)
                return self._answered(conversation, answer, replayed=True)
        self._tools_may_have_run = False
        unwritten = self.take_unwritten()
        writing = asyncio.ensure_future(self._journal.append(unwritten)) if unwritten else None
        started = time.perf_counter()
        try:
            reply = await self._ask(conversation.tokens, messages, tools)
            seconds = time.perf_counter() - started - self._health.lost_seconds - self._health.held_seconds
        except BaseException:
            if writing is not None:
                await self._untimed(writing)
            raise
        self._shift_deadline(self._health.lost_seconds)
        if writing is not None:
            await self._untimed(writing)
        response = answer_record(reply, turn=self.turn, seconds=seconds, known=conversation.tokens.ids)
        await self._untimed(self._journal.append([response]))
        if self.turn and self.turn % ACKNOWLEDGE_EVERY == 0:
            await self._workspace.acknowledge(self.turn)
        return self._answered(conversation, response, replayed=False)

    async def _checkpoint(self, checkpoints: Checkpoints) -> str:
        record = self._next_replayed(CheckpointRecord)
        if record is None:
            following, record = await checkpoints.keep(self._workspace, self.turn)
            await self._move(checkpoints, following, record)
        else:
            checkpoints.replayed(record)
            self.records.append(record)
        return record.name

    async def _go_back(self, checkpoints: Checkpoints, name: str) -> None:
        record = self._next_replayed(ReturnRecord)
        if record is None:
            following = await checkpoints.go_back(self._workspace, name)
            await self._move(checkpoints, following, ReturnRecord(checkpoint=name, turn=self.turn, time=time.time()))
        else:
            checkpoints.replayed(None)
            self.records.append(record)

    async def _move(self, checkpoints: Checkpoints, following: Workspace, why: CheckpointRecord | ReturnRecord) -> None:
        """Go on in another workspace once it is recorded: whoever takes over must know where."""
        assert self._moved is not None, "whoever gives checkpoints gives this"
        before, self._workspace = self._workspace, following
        records: list[Record] = [why, self._moved(following)]
        self.records += records
        await self._untimed(self._journal.append([*self.take_unwritten(), *records]))
        await checkpoints.left(before, following)

    def _checkpoints_or_refusal(self) -> Checkpoints:
        if self._checkpoints is None or self._commands:
            raise RuntimeError(
                "checkpoints are for agents that work in turns alone: after a crash, run_command cannot be told apart"
            )
        return self._checkpoints

    async def _take_snapshot(self, snapshots: Snapshots, turn: int) -> None:
        snapshot = await snapshots.take(self._workspace, turn)
        self.records.append(snapshot)
        self._unwritten.append(snapshot)

    async def _come_to_a_stop(self) -> None:
        await self._journal.append(self.take_unwritten())
        await self._drain.park()

    def _ask(
        self, tokens: TokenHistory, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Awaitable[ModelReply]:
        model = self._model()
        if model is None:
            raise NotReplayable(f"agent {self.spec.type} calls a model, and spec.model is not given; give one")
        self._health = CallHealth(on_hold=self._hold)
        most, left = self._sampling.max_tokens, self._budget.tokens
        return model.complete(
            ModelRequest(
                messages=messages,
                tools=tools,
                sampling=self._sampling,
                seed=turn_seed(self._seed, self.turn),
                session=f"rollout-{self._index}",
                task=self.task.name,
                member=self._member,
                turn=self.turn,
                group=f"group-{self._index - self._member}",
                max_tokens=most if most is None or left is None else min(most, left),
                prefix=TokenPrefix(tokens.messages, tokens.ids) if tokens.messages else None,
                health=self._health,
            )
        )

    def _answered(self, conversation: Conversation, response: ResponseRecord, *, replayed: bool) -> ModelReply:
        self.records.append(response)
        messages = conversation.answered(response.message)
        versions = numbers(response.policy_spans)
        self._newest_policy.see(versions)
        if self._first_policy is None and versions:
            self._first_policy = versions[0]
        used = response.usage.prompt_tokens + response.usage.completion_tokens
        self._budget = self._budget.after(turns=1, tokens=used)
        self._observer(TurnEnded(self._index, self.turn, response.seconds, response.usage, replayed))
        return recorded_answer(response, conversation.tokens.add(response, messages))

    async def _call_tools(
        self, conversation: Conversation, calls: Sequence[ToolCall], tools: Mapping[str, Tool], *, may_stop: bool
    ) -> list[Observation]:
        record = self._next_replayed(ObservationsRecord)
        if record is None:
            turn = self.turn if conversation.turn is None else conversation.turn
            # Of an earlier turn's calls, which waited for a sub-agent: its keys may be forgotten by now.
            key = f"{self.turn + 1}:" if turn == self.turn else f"{self.turn + 1}:turn-{turn}."
            observations = await self._run_tools(turn, calls, tools, key)
            record = ObservationsRecord(turn=turn, time=time.time(), results=observations)
            self._unwritten.append(record)
        else:
            counted = [result.seconds for result in record.results if not isinstance(tools.get(result.tool), Act)]
            self._shift_deadline(-max(counted, default=0.0))
            if self._rerun is not None:
                await self._rerun(record, calls)
        self.records.append(record)
        self._observed_turn = record.turn
        self.tool_calls += len(calls)
        for observation in record.results:
            if observation.stop and may_stop:
                raise Stop(StopReason.FINISHED, observation.content)
        return record.results

    async def _run_tools(
        self, turn: int, calls: Sequence[ToolCall], tools: Mapping[str, Tool], key: str
    ) -> list[Observation]:
        """Run the calls, with what the plugins make of them; their time is not the agent's."""
        if (plugins := self._plugins) is None:
            return await self._dispatch_all(calls, tools, key)
        admitted = await self._untimed(plugins.admit(turn, calls))
        results = await self._dispatch_all(admitted, tools, key)
        observations = await self._untimed(plugins.ran(turn, calls, admitted, results))
        called = plugins.take_record()
        self.records += called
        self._unwritten += called
        return observations

    async def _dispatch_all(
        self, calls: Sequence[ToolCall | Observation], tools: Mapping[str, Tool], key: str
    ) -> list[Observation]:
        """Run the calls and wait for all of them, also when one takes the attempt down.

        Those in the workspace run in the order in which the model wrote them: one may need what another made.
        """
        results = await asyncio.gather(
            *(self._dispatch(f"{key}{position}", call, tools) for position, call in enumerate(calls)),
            return_exceptions=True,
        )
        observations = []
        for result in results:
            if isinstance(result, SandboxFailure):
                self.died_in_tool_call = True
            if isinstance(result, BaseException):
                raise result
            self._observer(ToolEnded(self._index, result.tool, result.seconds, result.error))
            observations.append(result)
        return observations

    async def _dispatch(self, key: str, call: ToolCall | Observation, tools: Mapping[str, Tool]) -> Observation:
        if isinstance(call, Observation):
            return call  # a plugin refused it
        tool = tools.get(call.name)
        if tool is not None and self._tools_may_have_run and tool.runs_in == "Runner" and not tool.idempotent:
            return Observation(
                call_id=call.id,
                tool=call.name,
                content="The outcome of this call is unknown: the process that ran it was interrupted. It was not repeated.",
                error=True,
            )
        seconds_left, limit = self._seconds_left(), float(self.task.timeouts.command_seconds)
        # One that hangs must not look like an agent that ran out of time, nor the other way round.
        acts = isinstance(tool, Act)
        workspace = KeyedWorkspace(self._workspace, key, limit if acts else min(limit, seconds_left))
        context = ToolContext(workspace=workspace, task=self.task, call_id=call.id, seconds_left=seconds_left)
        if acts:
            return await self._untimed(dispatch(tools, call, context))
        if tool is None or tool.runs_in == "Runner":
            return await dispatch(tools, call, context)
        async with self._workspace_lock:
            return await dispatch(tools, call, context)

    def _next_replayed(self, form: type[R]) -> R | None:
        """The next record of the journal, if it is of that form; what follows a gap is never replayed."""
        if not self._replay:
            return None
        record = self._replay[-1]
        if isinstance(record, form):
            self._replay.pop()
            return record
        if form not in (ResponseRecord, ObservationsRecord):
            raise NotReplayable(
                f"turn {self.turn}: the journal goes on with {record.type}, the agent with another call; "
                "an agent must be a function of what its context returned"
            )
        return None

    def _seconds_left(self) -> float:
        when = self._deadline.when() if self._deadline is not None else None
        return self._budget.seconds if when is None else max(0.001, when - asyncio.get_running_loop().time())

    def _shift_deadline(self, seconds: float) -> None:
        if self._deadline is not None and (when := self._deadline.when()) is not None:
            self._deadline.reschedule(when + seconds)

    async def _untimed(self, waiting: Awaitable[T]) -> T:
        """Wait for storage, plugins, an environment or the engine's own work, without using up the agent's time."""
        self._hold(True)
        try:
            return await waiting
        finally:
            self._hold(False)

    def _hold(self, held: bool) -> None:
        """Let the agent's deadline stand still, or go on with what was left of it."""
        deadline, now = self._deadline, asyncio.get_running_loop().time()
        if deadline is None or deadline.expired():
            return
        if held and (when := deadline.when()) is not None:
            self._held_seconds = when - now
            deadline.reschedule(None)
        elif not held and deadline.when() is None:
            deadline.reschedule(now + self._held_seconds)


def _check_replay(recorded: IntentRecord, now: IntentRecord) -> None:
    if (recorded.keep, recorded.messages, recorded.tools) != (now.keep, now.messages, now.tools):
        raise NotReplayable(
            f"turn {now.turn}: the agent's messages differ from the recorded ones; "
            "an agent must be a function of what its context returned (no clock, no random numbers, no state of its own)"
        )


def _stop_reason(error: ContextExceeded | ContentFiltered) -> StopReason:
    return StopReason.CONTEXT_EXCEEDED if isinstance(error, ContextExceeded) else StopReason.CONTENT_FILTER
