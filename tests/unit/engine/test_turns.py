"""The turns of one attempt with an in-memory journal: what is durable when, and what a resumed attempt repeats."""

import asyncio
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.agents.base import Agent, AgentContext, Stop
from agent_runtime.engine.attempt.assignment import Assignment, Oversight, Rollout
from agent_runtime.engine.attempt.attempt_log import AttemptLog, NotReplayable
from agent_runtime.engine.attempt.tool_calls import MOST_CALLS, KeyedWorkspace
from agent_runtime.engine.attempt.turns import Turns
from agent_runtime.engine.branching.sources import copied
from agent_runtime.models import probe
from agent_runtime.models.base import ContextExceeded, ModelError, ModelReply, ModelRequest, ToolCall
from agent_runtime.recording.attempt_folder import digest_of
from agent_runtime.recording.branches import token_forks
from agent_runtime.recording.messages import fold, linear
from agent_runtime.recording.segments import decode, encode
from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceLimit
from agent_runtime.tools.base import ToolContext, ToolResult
from rollout_api.model import Sampling
from rollout_api.records import (
    BranchRecord,
    IntentRecord,
    Message,
    ObjectDigest,
    ObservationsRecord,
    Record,
    ResponseRecord,
    StopReason,
    Usage,
)
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.tasks import Task, Timeouts

pytestmark = pytest.mark.usefixtures("virtual_clock")


class Crash(BaseException):
    """Ends the process: nothing after it takes effect."""


class MemoryJournal:
    def __init__(self, crash_after: int | None = None) -> None:
        self.records: list[Record] = []
        self.writes = 0
        self.crash_after = crash_after
        self.delay = 0.0

    async def append(self, records: Sequence[Record]) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.crash_after is not None and self.writes >= self.crash_after:
            raise Crash
        self.records += records
        self.writes += 1

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        return digest_of(name, data)


class CountingModel:
    """Requests one tool call a turn, `turns` times, then finishes."""

    name = "counting"
    token_capture = "TextOnly"

    def __init__(self, turns: int, log: list[str]) -> None:
        self.turns, self.log = turns, log
        self.error: Exception | None = None
        self.seconds = 0.0

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.log.append(f"model {request.turn} sees {len(request.messages)}")
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        name = "finish_it" if request.turn == self.turns else "count"
        call = {"id": f"c{request.turn}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        return ModelReply(
            message={"role": "assistant", "content": "", "tool_calls": [call]},
            finish_reason="tool_calls",
            usage=Usage(prompt_tokens=10, completion_tokens=5),
        )

    async def check(self) -> None: ...

    async def close(self) -> None: ...


class Count:
    name = "count"
    description = "counts"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}
    runs_in: ClassVar[Literal["Sandbox", "Runner"]] = "Sandbox"
    idempotent: ClassVar[bool] = True

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.error: Exception | None = None

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        self.log.append(f"tool {context.call_id}")
        if self.error is not None:
            raise self.error
        return ToolResult(f"counted {context.call_id}")


class Finish(Count):
    name = "finish_it"

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        self.log.append(f"finish {context.call_id}")
        return ToolResult("all done", stop=True)


class Payment(Count):
    """A tool that runs in the runner and must not be repeated."""

    runs_in: ClassVar[Literal["Sandbox", "Runner"]] = "Runner"
    idempotent: ClassVar[bool] = False


class NoWorkspace:
    def __init__(self) -> None:
        self.acknowledged: list[int] = []

    working_dir = "/workspace"
    handle: Mapping[str, Any] = {}
    description: Mapping[str, Any] = {}

    async def acknowledge(self, turn: int) -> None:
        self.acknowledged.append(turn)


class Loop:
    """The simplest agent: model, tools, model again."""

    async def run(self, context: AgentContext) -> str | None:
        messages: list[Message] = [{"role": "user", "content": context.task.prompt}]
        while True:
            reply = await context.call_model(messages)
            messages.append(reply.message)
            for observation in await context.call_tools(reply.tool_calls):
                messages.append({"role": "tool", "tool_call_id": observation.call_id, "content": observation.content})


def turns_of(
    journal: MemoryJournal, model: CountingModel, log: list[str], replay: Sequence[Record] = (), **spec: Any
) -> Turns:
    tools = {"count": spec.pop("tool", None) or Count(log), "finish_it": Finish(log)}
    timeouts = Timeouts(agent_seconds=spec.pop("agent_seconds", 60))
    task = Task(name="t", prompt="count", timeouts=timeouts)
    oversight = spec.pop("oversight", Oversight())
    return Turns(
        Assignment(Rollout(index=0, group=0, member=0, task=task, seed=1), AgentSpec(**spec), Sampling()),
        tools=tools,
        model=lambda: model,
        workspace=NoWorkspace(),  # type: ignore[arg-type]
        log=AttemptLog(journal, replay),
        oversight=oversight,
    )


async def test_a_turn_costs_two_writes() -> None:
    journal, log = MemoryJournal(), list[str]()
    turns = turns_of(journal, CountingModel(5, log), log)
    assert await turns.run_agent(lambda: Loop()) == (StopReason.FINISHED, "all done")
    assert journal.writes == 2 * 6
    assert len(turns.take_unwritten()) == 1, "the last observations ride with the stop record"


class Greedy(CountingModel):
    """Makes many calls at once, in each answer."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        reply = await super().complete(request)
        [call] = reply.message["tool_calls"]
        if call["function"]["name"] == "count":
            reply.message["tool_calls"] = [
                {**call, "id": f"{call['id']}.{number}"} for number in range(MOST_CALLS + 72)
            ]
        return reply


async def test_an_answer_with_very_many_calls_uses_up_no_more_than_the_executor_remembers() -> None:
    log = list[str]()
    turns = turns_of(MemoryJournal(), Greedy(3, log), log)
    assert await turns.run_agent(lambda: Loop()) == (StopReason.FINISHED, "all done")
    assert sum(line.startswith("tool ") for line in log) == 3 * MOST_CALLS
    results = next(record.results for record in turns.records if isinstance(record, ObservationsRecord))
    assert (len(results), sum(result.error for result in results)) == (MOST_CALLS + 72, 72)
    assert "At most 128 tool calls" in results[-1].content
    assert turns.workspace.acknowledged == [1, 2, 3], "the keys of one answer at most are remembered"  # type: ignore[attr-defined]


@given(turns=st.integers(0, 6), crash=st.integers(0, 14))
def test_a_run_that_is_killed_after_any_write_repeats_no_durable_model_call(turns: int, crash: int) -> None:
    async def scenario() -> None:
        undisturbed, log = MemoryJournal(), list[str]()
        whole = turns_of(undisturbed, CountingModel(turns, log), log)
        await whole.run_agent(lambda: Loop())

        journal, first_log = MemoryJournal(crash_after=crash), list[str]()
        with contextlib.suppress(Crash):
            await turns_of(journal, CountingModel(turns, first_log), first_log).run_agent(lambda: Loop())
        journal.crash_after = None
        durable = [record.turn for record in journal.records if isinstance(record, ResponseRecord)]
        second_log: list[str] = []
        resumed = turns_of(journal, CountingModel(turns, second_log), second_log, replay=list(journal.records))
        assert await resumed.run_agent(lambda: Loop()) == (StopReason.FINISHED, "all done")
        asked_again = [int(line.split()[1]) for line in second_log if line.startswith("model")]
        assert not set(asked_again) & set(durable), "an acknowledged turn was sampled again"
        assert [_content(r) for r in resumed.records] == [_content(r) for r in whole.records]

    asyncio.run(scenario())


def _content(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.wire().items() if key not in ("time", "seconds", "agentSeconds")} | (
        {"results": [r.content for r in record.results]} if isinstance(record, ObservationsRecord) else {}
    )


async def test_nothing_is_executed_before_it_is_stored() -> None:
    log: list[str] = []

    class Watching(MemoryJournal):
        async def append(self, records: Sequence[Record]) -> None:
            await asyncio.sleep(0.01)
            await super().append(records)
            log.extend(f"durable {record.type} {getattr(record, 'turn', '')}" for record in records)

    turns = turns_of(Watching(), CountingModel(1, log), log)
    await turns.run_agent(lambda: Loop())
    assert log.index("durable intent 0") < log.index("tool c0")
    assert log.index("durable response 0") < log.index("tool c0")
    assert log.index("durable observations 0") < log.index("finish c1")
    assert log.index("model 1 sees 3") < log.index("durable observations 0"), "the call overlaps the write"


async def test_an_agent_that_swallows_errors_cannot_hide_that_the_model_was_down() -> None:
    class Swallowing(Loop):
        async def run(self, context: AgentContext) -> str | None:
            with contextlib.suppress(Exception):
                await super().run(context)
            return "all is well"

    log: list[str] = []
    model = CountingModel(3, log)
    model.error = ModelError("Unreachable", "connection refused")
    with pytest.raises(ModelError):
        await turns_of(MemoryJournal(), model, log).run_agent(lambda: Swallowing())


@pytest.mark.parametrize("reason", ["BadRequest", "NoToolParser"])
async def test_branch_whose_first_own_request_is_refused_is_not_graded(reason: str) -> None:
    source = MemoryJournal()
    await turns_of(source, CountingModel(3, []), []).run_agent(lambda: Loop())
    begun = BranchRecord(time=0.0, job="./out/source", index=0, attempt=0, turn=1)
    model = CountingModel(3, [])
    model.error = ModelError(reason, "the server takes no such request")
    branch = turns_of(MemoryJournal(), model, [], [begun, *copied(source.records, 1, keeps_ids=False)])

    with pytest.raises(ModelError):
        await branch.run_agent(lambda: Loop())

    assert branch.turn == 2
    assert not branch.exposed


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ContextExceeded("too long"), StopReason.CONTEXT_EXCEEDED),
        (Stop(StopReason.TOOL_FORMAT), StopReason.TOOL_FORMAT),
        (Stop(StopReason.FINISHED, json.loads("5")), StopReason.FINISHED),
        (RuntimeError("a bug of the agent's own"), StopReason.AGENT_ERROR),
        (SystemExit(3), StopReason.AGENT_ERROR),
        (pytest.fail.Exception("a check in the agent"), StopReason.AGENT_ERROR),
        (asyncio.CancelledError(), StopReason.AGENT_ERROR),
    ],
)
async def test_failure_caused_by_the_policy_is_a_stop_reason_and_no_retry(
    error: BaseException, reason: StopReason
) -> None:
    class Raising(Loop):
        async def run(self, context: AgentContext) -> str | None:
            raise error

    stopped, message = await turns_of(MemoryJournal(), CountingModel(1, []), []).run_agent(lambda: Raising())
    assert stopped is reason
    assert isinstance(message, str), "the record of the stop takes text alone"


async def test_agent_that_cannot_be_created_is_graded_with_its_traceback() -> None:
    class Unfinished(Loop):
        def __init__(self) -> None:
            raise KeyError("key")

    turns = turns_of(MemoryJournal(), CountingModel(1, []), [])
    reason, _ = await turns.run_agent(Unfinished)
    assert reason is StopReason.AGENT_ERROR
    assert "KeyError: 'key'" in (turns.traceback or "")


@pytest.mark.parametrize("returned", [5, {"answer": 5}, b"five"])
async def test_agent_that_returns_no_text_is_graded_and_never_retried(returned: Any) -> None:
    class Parsing(Loop):
        async def run(self, context: AgentContext) -> Any:
            return returned  # as json.loads(reply.text) does, when the model answers with a number

    turns = turns_of(MemoryJournal(), CountingModel(1, []), [])
    reason, message = await turns.run_agent(lambda: Parsing())
    assert reason is StopReason.AGENT_ERROR
    assert f"Parsing.run returned a value of type {type(returned).__name__}" in message


@pytest.mark.parametrize("value", [object(), b"x", {1}, 10**5000], ids=["object", "bytes", "set", "number"])
async def test_agent_whose_messages_no_record_can_hold_is_graded_and_never_retried(value: Any) -> None:
    class Odd(Loop):
        async def run(self, context: AgentContext) -> str | None:
            await context.call_model([{"role": "user", "content": "go", "seen": value}])
            return "done"

    journal = MemoryJournal()
    turns = turns_of(journal, CountingModel(1, []), [])
    assert (await turns.run_agent(lambda: Odd()))[0] is StopReason.AGENT_ERROR
    as_stored([*journal.records, *turns.take_unwritten()])


async def test_memory_used_up_by_a_tool_call_is_the_policys_own_resource_limit() -> None:
    log: list[str] = []
    tool = Count(log)
    tool.error = WorkspaceLimit("Memory", "over 512Mi")
    turns = turns_of(MemoryJournal(), CountingModel(3, log), log, tool=tool)
    assert await turns.run_agent(lambda: Loop()) == (StopReason.RESOURCE_LIMIT, "Memory: over 512Mi")


async def test_sandbox_that_dies_during_a_tool_call_is_infrastructure() -> None:
    log: list[str] = []
    tool = Count(log)
    tool.error = SandboxFailure("SandboxLost", "gone")
    turns = turns_of(MemoryJournal(), CountingModel(3, log), log, tool=tool)
    with pytest.raises(SandboxFailure):
        await turns.run_agent(lambda: Loop())
    assert turns.exposed


async def test_budgets_end_the_agent_with_their_own_reasons() -> None:
    for spec, reason in (({"max_turns": 3}, StopReason.MAX_TURNS), ({"token_budget": 40}, StopReason.TOKEN_BUDGET)):
        log: list[str] = []
        turns = turns_of(MemoryJournal(), CountingModel(50, log), log, (), **spec)
        assert (await turns.run_agent(lambda: Loop()))[0] is reason
        assert turns.turn == 2


async def test_a_slow_journal_never_turns_into_agent_timeout() -> None:
    log: list[str] = []
    journal = MemoryJournal()
    journal.delay = 0.3
    turns = turns_of(journal, CountingModel(4, log), log, agent_seconds=1)
    assert (await turns.run_agent(lambda: Loop()))[0] is StopReason.FINISHED


async def test_an_agent_over_its_time_is_completed_with_agent_timeout() -> None:
    log: list[str] = []
    model = CountingModel(50, log)
    model.seconds = 0.4
    turns = turns_of(MemoryJournal(), model, log, agent_seconds=1)
    assert (await turns.run_agent(lambda: Loop()))[0] is StopReason.AGENT_TIMEOUT


async def test_a_server_that_fails_until_the_time_is_over_is_not_the_policys_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.5)

    class Failing(CountingModel):
        async def complete(self, request: ModelRequest) -> ModelReply:
            request.health.note("ServerError: status 503")
            await asyncio.sleep(60)
            raise AssertionError("unreachable")

    with pytest.raises(ModelError, match="503"):
        await turns_of(MemoryJournal(), Failing(1, []), [], agent_seconds=1).run_agent(lambda: Loop())


async def test_failed_tries_of_a_model_call_use_up_none_of_the_agents_time() -> None:
    class Flaky(CountingModel):
        async def complete(self, request: ModelRequest) -> ModelReply:
            await asyncio.sleep(0.4)
            request.health.lost_seconds = 0.4
            return await super().complete(request)

    turns = turns_of(MemoryJournal(), Flaky(4, []), [], agent_seconds=1)
    assert (await turns.run_agent(lambda: Loop()))[0] is StopReason.FINISHED
    assert max(r.seconds for r in turns.records if isinstance(r, ResponseRecord)) < 0.3


async def test_time_behind_a_shut_gate_does_not_count_for_the_agent() -> None:
    held = list[float]()

    class Held(CountingModel):
        async def complete(self, request: ModelRequest) -> ModelReply:
            began = time.monotonic()
            request.health.on_hold(True)
            await asyncio.sleep(0.8)
            request.health.held_seconds = time.monotonic() - began
            request.health.on_hold(False)
            held.append(request.health.held_seconds)
            return await super().complete(request)

    turns = turns_of(MemoryJournal(), Held(4, []), [], agent_seconds=3)
    began = time.monotonic()
    assert await turns.run_agent(lambda: Loop()) == (StopReason.FINISHED, "all done")
    rest = time.monotonic() - began - sum(held)
    assert sum(held) > 3
    assert sum(record.seconds for record in turns.records if isinstance(record, ResponseRecord)) <= rest


async def test_time_used_by_an_interrupted_attempt_still_counts() -> None:
    log: list[str] = []
    journal = MemoryJournal()
    await turns_of(journal, CountingModel(3, log), log).run_agent(lambda: Loop())
    used = [r.model_copy(update={"agent_seconds": 59.9}) if hasattr(r, "agent_seconds") else r for r in journal.records]
    model = CountingModel(5, log)
    model.seconds = 0.2
    turns = turns_of(MemoryJournal(), model, log, replay=used[:-1], agent_seconds=60)
    assert (await turns.run_agent(lambda: Loop()))[0] is StopReason.AGENT_TIMEOUT


async def test_an_agent_that_makes_other_calls_on_replay_is_detected() -> None:
    log: list[str] = []
    journal = MemoryJournal()
    await turns_of(journal, CountingModel(2, log), log).run_agent(lambda: Loop())

    class Different(Loop):
        async def run(self, context: AgentContext) -> str | None:
            await context.call_model([{"role": "user", "content": "something else"}])
            return None

    with pytest.raises(NotReplayable, match="turn 0"):
        await turns_of(MemoryJournal(), CountingModel(2, log), log, replay=journal.records).run_agent(
            lambda: Different()
        )


async def test_tool_call_with_an_unknown_outcome_is_not_repeated() -> None:
    log: list[str] = []
    journal = MemoryJournal()
    await turns_of(journal, CountingModel(1, log), log, tool=Payment(log)).run_agent(lambda: Loop())
    upto_response = journal.records[:2]
    log.clear()
    turns = turns_of(MemoryJournal(), CountingModel(1, log), log, replay=upto_response, tool=Payment(log))
    await turns.run_agent(lambda: Loop())
    assert "tool c0" not in log
    observed = next(record for record in turns.records if isinstance(record, ObservationsRecord))
    assert "outcome of this call is unknown" in observed.results[0].content


class SlowFirst(Count):
    """A tool whose first call takes longer than its second one."""

    runs_in: ClassVar[Literal["Sandbox", "Runner"]] = "Runner"

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        if arguments["is_slow"]:
            await asyncio.sleep(0.05)
        return ToolResult("slow" if arguments["is_slow"] else "fast")


async def test_parallel_call_tools_get_their_own_results_after_a_resume() -> None:
    seen: list[list[str]] = []

    class Parallel(Loop):
        async def run(self, context: AgentContext) -> str | None:
            await context.call_model([{"role": "user", "content": "go"}])
            # The same id twice, as some servers give.
            calls = [ToolCall("c", "count", json.dumps({"is_slow": is_slow})) for is_slow in (True, False)]
            results = await asyncio.gather(*(context.call_tools([call]) for call in calls))
            seen.append([result.content for (result,) in results])
            await context.call_model([{"role": "user", "content": "again"}])
            return None

    journal, log = MemoryJournal(), list[str]()
    tool = SlowFirst(log)
    tool.parameters = {"type": "object", "properties": {"is_slow": {"type": "boolean"}}}
    for replay in ((), journal.records):
        turns = turns_of(journal, CountingModel(2, log), log, replay=list(replay), tool=tool)
        await turns.run_agent(lambda: Parallel())
    assert seen == [["slow", "fast"], ["slow", "fast"]]


class Chains:
    """Runs concurrent coroutines that each make several calls, of tools or of the model."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    async def run(self, context: AgentContext) -> str | None:
        async def tools(name: str) -> None:
            for number in range(2):
                call = ToolCall(f"{name}-{number}", "count", json.dumps({"is_slow": name == "slow"}))
                ((result,),) = await asyncio.gather(context.call_tools([call]))
                self.seen.append(f"{call.id}: {result.content}")

        async def talk(name: str) -> None:
            for number in range(2):
                reply = await context.call_model([{"role": "user", "content": f"{name}, question {number}"}])
                self.seen.append(reply.text)

        for _ in range(2):
            await context.call_model([{"role": "user", "content": f"seen: {self.seen}"}])
            await asyncio.gather(tools("slow"), tools("fast"))
            await context.call_model([{"role": "user", "content": f"seen: {self.seen}"}])
            await asyncio.gather(tools("slow"), talk("one"), talk("the other"))
        return None


@pytest.mark.parametrize("crash", range(1, 24, 2))
async def test_jobs_of_an_agent_get_their_own_results_after_a_resume(crash: int) -> None:
    journal, log, expected, seen = MemoryJournal(crash_after=crash), list[str](), list[str](), list[str]()
    tool = SlowFirst(log)
    tool.parameters = {"type": "object", "properties": {"is_slow": {"type": "boolean"}}}
    assert await turns_of(MemoryJournal(), Spelled(0, log), log, tool=tool).run_agent(lambda: Chains(expected))
    with contextlib.suppress(Crash):
        await turns_of(journal, Spelled(0, log), log, tool=tool).run_agent(lambda: Chains([]))
    assert journal.writes == crash
    journal.crash_after = None
    turns = turns_of(journal, Spelled(0, log), log, replay=list(journal.records), tool=tool)
    assert await turns.run_agent(lambda: Chains(seen)) == (StopReason.FINISHED, "")
    assert seen == expected


class OwnWork:
    """Two jobs whose own work between their calls takes another time in each process."""

    def __init__(self, first: float, second: float) -> None:
        self.pauses = {"first": first, "second": second}

    async def run(self, context: AgentContext) -> str | None:
        async def job(name: str) -> None:
            for number in range(2):
                await context.call_tools([ToolCall(f"{name}-{number}", "count", '{"is_slow": false}')])
                await asyncio.sleep(self.pauses[name])

        await context.call_model([{"role": "user", "content": "go"}])
        await asyncio.gather(job("first"), job("second"))
        return None


class GivesUp:
    """Gives a tool call up after some time, and makes another one."""

    async def run(self, context: AgentContext) -> str | None:
        await context.call_model([{"role": "user", "content": "go"}])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await context.call_tools([ToolCall("slow", "count", '{"is_slow": true}')])
        return (await context.call_tools([ToolCall("fast", "count", '{"is_slow": false}')]))[0].content


@pytest.mark.parametrize(("agent", "resumed"), [(OwnWork(0.05, 0), OwnWork(0, 0.05)), (GivesUp(), GivesUp())])
async def test_resumed_agent_never_gets_the_results_of_another_call(agent: Agent, resumed: Agent) -> None:
    journal, log = MemoryJournal(), list[str]()
    turns = turns_of(journal, CountingModel(9, log), log, tool=SlowFirst(log))
    assert (await turns.run_agent(lambda: agent))[0] is StopReason.FINISHED
    recorded = [*journal.records, *turns.take_unwritten()]
    turns = turns_of(MemoryJournal(), CountingModel(9, log), log, replay=recorded, tool=SlowFirst(log))
    with pytest.raises(NotReplayable, match="tool calls differ from the recorded ones"):
        await turns.run_agent(lambda: resumed)


async def test_tool_that_uses_its_agents_context_fails_instead_of_waiting_forever() -> None:
    class Asks(Count):
        async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
            await turns.call_model([{"role": "user", "content": "which?"}])
            raise AssertionError("unreachable")

    class Agent:
        async def run(self, context: AgentContext) -> str | None:
            await context.call_model([{"role": "user", "content": "go"}])
            return (await context.call_tools([ToolCall("c", "count", "{}")]))[0].content

    log: list[str] = []
    turns = turns_of(MemoryJournal(), CountingModel(9, log), log, tool=Asks(log))
    reason, message = await turns.run_agent(lambda: Agent())
    assert reason is StopReason.FINISHED
    assert "a tool cannot use its agent's context" in message


async def test_messages_that_do_not_extend_the_last_turn_start_a_new_branch() -> None:
    class Forgetful(Loop):
        async def run(self, context: AgentContext) -> str | None:
            await context.call_model([{"role": "user", "content": "one"}])
            await context.call_model([{"role": "user", "content": "two"}])
            return None

    log: list[str] = []
    turns = turns_of(MemoryJournal(), CountingModel(9, log), log)
    await turns.run_agent(lambda: Forgetful())
    assert [record.branch for record in linear(turns.records) if record.type == "intent"] == [0, 1]


class TokenModel(CountingModel):
    """Returns token ids, and records the prefix of each call."""

    token_capture = "Tokens"

    def __init__(self, turns: int, log: list[str]) -> None:
        super().__init__(turns, log)
        self.prefixes: dict[int, tuple[int, list[int]] | None] = {}

    async def complete(self, request: ModelRequest) -> ModelReply:
        given = None if request.prefix is None else (request.prefix.messages, list(request.prefix.ids))
        self.prefixes[request.turn] = given
        reply = await super().complete(request)
        before = given[1] if given is not None else []
        prompt = [*before, *range(100 * request.turn, 100 * request.turn + 3)]
        return dataclasses.replace(reply, prompt_token_ids=prompt, completion_token_ids=[7, request.turn])


async def test_each_call_extends_the_previous_ids_and_the_journal_has_each_id_once() -> None:
    log: list[str] = []
    model = TokenModel(40, log)
    turns = turns_of(MemoryJournal(), model, log, max_turns=50)
    await turns.run_agent(lambda: Loop())
    answers = [record for record in turns.records if isinstance(record, ResponseRecord)]
    assert [len(answer.prompt_token_ids or []) for answer in answers] == [3] * 41
    assert model.prefixes[0] is None
    messages, ids = model.prefixes[40] or (0, [])
    assert messages == 1 + 2 * 40 - 1, "the last answer included, its tool's result not"
    assert ids == [id for n in range(40) for id in (*range(100 * n, 100 * n + 3), 7, n)]
    assert token_forks(linear(turns.records)) == 0


@given(crash=st.integers(0, 14))
def test_killed_run_continues_from_the_same_ids(crash: int) -> None:
    async def scenario() -> None:
        undisturbed = TokenModel(6, [])
        await turns_of(MemoryJournal(), undisturbed, []).run_agent(lambda: Loop())
        journal = MemoryJournal(crash_after=crash)
        with contextlib.suppress(Crash):
            await turns_of(journal, TokenModel(6, []), []).run_agent(lambda: Loop())
        journal.crash_after = None
        model = TokenModel(6, [])
        await turns_of(journal, model, [], replay=list(journal.records)).run_agent(lambda: Loop())
        assert model.prefixes == {turn: undisturbed.prefixes[turn] for turn in model.prefixes}

    asyncio.run(scenario())


async def test_agent_that_removes_messages_or_changes_tools_gets_no_wrong_prefix() -> None:
    class Rewriting(Loop):
        async def run(self, context: AgentContext) -> str | None:
            first: list[Message] = [{"role": "user", "content": "one"}]
            reply = await context.call_model(first)
            again: Message = {"role": "user", "content": "again"}
            await context.call_model([*first, again])
            answered = [*first, again, reply.message]
            await context.call_model([*answered, again])
            await context.call_model([*answered, again, reply.message], [{"type": "function"}])
            return None

    model = TokenModel(99, [])
    turns = turns_of(MemoryJournal(), model, [])
    await turns.run_agent(lambda: Rewriting())
    assert [prefix is None for prefix in model.prefixes.values()] == [True] * 4
    assert token_forks(linear(turns.records)) == 0, "the agent's own doing"
    answers = [record for record in turns.records if isinstance(record, ResponseRecord)]
    assert [answer.prompt_keep for answer in answers] == [0] * 4


class InPlace:
    """Changes messages, an answer and a tool definition after it has passed them, and uses tuples."""

    async def run(self, context: AgentContext) -> str | None:
        tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "count", "required": ()}}]
        messages: list[Message] = [{"role": "user", "content": "go", "tags": ("a", "b")}]
        for turn in range(4):
            reply = await context.call_model(messages, tools)
            messages += [reply.message, {"role": "user", "content": f"long output {turn}"}]
            if turn == 1:
                messages[1]["content"] = "changed"
                messages[2]["content"] = "[left out]"
                tools[0]["function"]["name"] = "count_up"
        return "done"


class Keeping(CountingModel):
    """Keeps the messages that it gets, and returns token ids."""

    def __init__(self) -> None:
        super().__init__(11, [])
        self.sent: list[Any] = []
        self.prefixes: list[int] = []

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.sent.append(json.loads(json.dumps([list(request.messages), list(request.tools)])))
        self.prefixes.append(request.prefix.messages if request.prefix else 0)
        reply = await super().complete(request)
        return dataclasses.replace(reply, prompt_token_ids=[1] * len(request.messages), completion_token_ids=[2])


def as_stored(records: list[Record]) -> list[Record]:
    """Return records as the journal returns them."""
    stored = decode("segment", encode(records)) if records else []
    assert isinstance(stored, list)
    return stored


@pytest.mark.parametrize("crash", [None, *range(9)])
async def test_record_has_what_was_sent_when_agent_changes_its_messages(crash: int | None) -> None:
    model, journal = Keeping(), MemoryJournal(crash_after=crash)
    first = turns_of(journal, model, [])
    if crash is not None:
        with contextlib.suppress(Crash):
            await first.run_agent(lambda: InPlace())
        journal.crash_after = None
        journal.records = as_stored(journal.records)
        first = turns_of(journal, model, [], replay=list(journal.records))
    assert await first.run_agent(lambda: InPlace()) == (StopReason.FINISHED, "done")
    recorded = {turn.number: json.loads(json.dumps([turn.messages, turn.tools])) for turn in fold(journal.records)}
    assert list(recorded.values()) == [
        sent for number, sent in enumerate(model.sent) if sent not in model.sent[:number]
    ]
    answers = [record.message["content"] for record in journal.records if isinstance(record, ResponseRecord)]
    assert "changed" not in answers, "what the model answered stays as it was"
    if crash is None:
        assert model.prefixes == [0, 2, 0, 6], "changed messages are no prefix whose ids could be kept"


class Unencodable:
    """Sends values that a record cannot hold unchanged, and a message that its own code made from an answer."""

    async def run(self, context: AgentContext) -> str | None:
        odd = {2: math.nan, True: ("b", "\udcff")}
        messages: list[Message] = [{"role": "user", "content": "a name of bytes: \udcff", "odd": odd}]
        for _ in range(3):
            reply = await context.call_model(messages)
            messages += [reply.message, {"role": "user", "content": json.dumps(reply.text)}]
        return "done"


class Surrogates(CountingModel):
    async def complete(self, request: ModelRequest) -> ModelReply:
        reply = await super().complete(request)
        return dataclasses.replace(reply, message={"role": "assistant", "content": f"\ud800 {request.turn}"})


@pytest.mark.parametrize("crash", [None, *range(7)])
async def test_agent_whose_text_is_not_unicode_resumes_after_a_crash_at_any_write(crash: int | None) -> None:
    journal = MemoryJournal(crash_after=crash)
    with contextlib.suppress(Crash):
        await turns_of(journal, Surrogates(11, []), []).run_agent(lambda: Unencodable())
    journal.crash_after = None
    journal.records = as_stored(journal.records)
    resumed = turns_of(journal, Surrogates(11, []), [], replay=list(journal.records))
    assert await resumed.run_agent(lambda: Unencodable()) == (StopReason.FINISHED, "done")
    intents = [record for record in linear(journal.records) if isinstance(record, IntentRecord)]
    assert [(intent.keep, intent.branch) for intent in intents] == [(0, 0), (2, 0), (4, 0)]
    assert intents[0].messages == [
        {"role": "user", "content": "a name of bytes: ?", "odd": {"2": None, "true": ["b", "?"]}}
    ]


class Keyed(Count):
    """Records the idempotency keys that its calls would use."""

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        assert isinstance(context.workspace, KeyedWorkspace)
        self.log.append(context.workspace.call)
        return ToolResult(f"counted {context.call_id}")


class OneByOne:
    """Runs the tool calls of an answer one after another."""

    async def run(self, context: AgentContext) -> str | None:
        messages: list[Message] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            reply = await context.call_model(messages)
            messages.append(reply.message)
            for number in range(3):
                [result] = await context.call_tools([ToolCall(f"c{number}", "count", "{}")])
                messages.append({"role": "tool", "tool_call_id": result.call_id, "content": result.content})
        return "done"


@pytest.mark.parametrize("crash", [None, *range(5)])
async def test_tool_calls_of_one_answer_can_be_run_one_after_another(crash: int | None) -> None:
    log, journal, model = list[str](), MemoryJournal(crash_after=crash), CountingModel(9, [])
    turns = turns_of(journal, model, log, tool=Keyed(log))
    if crash is not None:
        with contextlib.suppress(Crash):
            await turns.run_agent(lambda: OneByOne())
        journal.crash_after = None
        turns = turns_of(journal, model, log, replay=list(journal.records), tool=Keyed(log))
    assert await turns.run_agent(lambda: OneByOne()) == (StopReason.FINISHED, "done")
    assert len(set(log)) == 6, "a key that a second call has gets it the result of the first, or is refused"
    await journal.append(turns.take_unwritten())
    assert [[result.call_id for result in turn.observations] for turn in fold(journal.records)] == [
        ["c0", "c1", "c2"]
    ] * 2


class Spelled(CountingModel):
    """Answers with the question, later for shorter questions."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        text = request.messages[-1]["content"]
        await asyncio.sleep(0.05 / len(text))
        return ModelReply(message={"role": "assistant", "content": f"answer to {text}"}, finish_reason="stop")


class SideBySide:
    async def run(self, context: AgentContext) -> str | None:
        questions = ["a", "long question", "longer"]
        calls = (context.call_model([{"role": "user", "content": question}]) for question in questions)
        return " ".join(reply.text for reply in await asyncio.gather(*calls))


@pytest.mark.parametrize("crash", [None, *range(6)])
async def test_model_calls_that_an_agent_makes_side_by_side_are_each_recorded(crash: int | None) -> None:
    journal = MemoryJournal(crash_after=crash)
    turns = turns_of(journal, Spelled(0, []), [])
    if crash is not None:
        with contextlib.suppress(Crash):
            await turns.run_agent(lambda: SideBySide())
        journal.crash_after = None
        turns = turns_of(journal, Spelled(0, []), [], replay=list(journal.records))
    expected = "answer to a answer to long question answer to longer"
    assert await turns.run_agent(lambda: SideBySide()) == (StopReason.FINISHED, expected)
    recorded = fold(linear(journal.records))
    assert [turn.messages[-1]["content"] for turn in recorded] == ["a", "long question", "longer"]
    for turn in recorded:
        assert turn.response is not None
        assert turn.response.message["content"] == f"answer to {turn.messages[-1]['content']}"


class Impatient:
    """Gives up its first calls, and makes them again."""

    async def run(self, context: AgentContext) -> str | None:
        messages: list[Message] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(context.call_model(messages), 0.001)
        reply = await context.call_model(messages)
        await context.call_model([*messages, reply.message, {"role": "user", "content": "and then?"}])
        return "done"


async def test_model_calls_that_an_agent_gave_up_take_no_later_turn_out_of_the_record() -> None:
    journal = MemoryJournal()
    assert await turns_of(journal, Spelled(0, []), []).run_agent(lambda: Impatient()) == (StopReason.FINISHED, "done")
    recorded = fold(linear(journal.records))
    assert [turn.response.message["content"] for turn in recorded if turn.response] == [
        "answer to go",
        "answer to and then?",
    ]
    assert {turn.branch for turn in recorded} == {0}


class Forgetful:
    """Leaves a coroutine behind that continues to call the model."""

    async def run(self, context: AgentContext) -> str | None:
        self.job = asyncio.ensure_future(self._ask(context))
        await context.call_model([{"role": "user", "content": "go"}])
        await asyncio.sleep(0)
        return "done"

    async def _ask(self, context: AgentContext) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await context.call_model([{"role": "user", "content": "more"}])


async def test_job_that_an_agent_leaves_behind_makes_no_call_after_its_end() -> None:
    journal, agent = MemoryJournal(), Forgetful()
    assert await turns_of(journal, Spelled(0, []), []).run_agent(lambda: agent) == (StopReason.FINISHED, "done")
    answers = sum(isinstance(record, ResponseRecord) for record in journal.records)
    with pytest.raises(RuntimeError, match="the agent has ended"):
        await asyncio.wait_for(agent.job, 10)
    assert sum(isinstance(record, ResponseRecord) for record in journal.records) == answers
