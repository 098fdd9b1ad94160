"""An agent that starts sub-agents: one record, one budget, a branch for each conversation, and the same results after
any crash.
"""

import asyncio
import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.agents.base import Agent, AgentContext, SubTask
from agent_runtime.agents.tool_calling import ToolCalling
from agent_runtime.engine.attempt.assignment import Oversight
from agent_runtime.models.base import ModelReply, ModelRequest, ToolCall
from agent_runtime.plugins.base import RolloutInfo
from agent_runtime.plugins.plugins import Plugins, RolloutPlugins
from agent_runtime.recording.branches import token_branches, token_forks
from agent_runtime.recording.messages import fold, last_of_each_branch, linear
from agent_runtime.tools.base import ToolContext, ToolResult
from rollout_api.records import Message, Observation, Record, StopReason, Usage
from rollout_api.tasks import Task
from tests.unit.engine.test_turns import Count, CountingModel, Crash, MemoryJournal, _content, turns_of

DELEGATED = 2
"""Number of parts of the task that sub-agents get."""


class Leading(ToolCalling):
    """Starts sub-agents for its calls of `delegate`, then makes the other calls itself."""

    async def execute_tool_call(self, calls: Sequence[ToolCall]) -> list[Observation]:
        results = {}
        for call in calls:
            if call.name == "delegate":
                part = SubTask(f"part of {call.id}", system_prompt="You are a helper.", tools=["count", "finish_it"])
                report = await self.context.delegate(ToolCalling(), part)
                results[call.id] = Observation(call_id=call.id, tool=call.name, content=report.message)
        own = [call for call in calls if call.name != "delegate"]
        results |= {result.call_id: result for result in await self.context.call_tools(own)}
        return [results[call.id] for call in calls]


class Model(CountingModel):
    """Token ids are different numbers for each message, so that they show what the engine has seen."""

    token_capture = "Tokens"

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.log.append(f"model {request.turn} sees {len(request.messages)}")
        said = [message for message in request.messages if message["role"] == "assistant"]
        helper = request.messages[0]["content"] == "You are a helper."
        if len(said) == (2 if helper else DELEGATED):
            names = ["finish_it"]
        else:
            names = ["count"] if helper else ["delegate", "count"]
        calls = [
            {"id": f"{name}-{request.turn}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            for name in names
        ]
        prompt = [hash(str(message)) % 1000 for message in request.messages]
        message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        return ModelReply(
            message, "tool_calls", usage=Usage(prompt_tokens=10, completion_tokens=5), prompt_token_ids=prompt,
            completion_token_ids=[hash(str(message)) % 1000], logprobs=[-1.0],
        )  # fmt: skip


def leading(journal: MemoryJournal, log: list[str], replay: Sequence[Record] = (), **spec: Any) -> Any:
    return turns_of(journal, Model(0, log), log, replay, **spec)


async def test_each_conversation_is_one_branch_and_every_answer_is_trained_once() -> None:
    turns = leading(MemoryJournal(), [])
    assert await turns.run_agent(lambda: Leading()) == (StopReason.FINISHED, "all done")
    records = linear(turns.records)
    last = last_of_each_branch(fold(records))
    assert [turn.messages[1]["content"] for turn in last] == ["count", "part of delegate-0", "part of delegate-4"]
    assert [len(turn.messages) for turn in last] == [8, 6, 6]
    samples = token_branches(records)
    assert [sum(sample.mask) for sample in samples] == [3, 3, 3]
    assert token_forks(records) == 0
    own = [turn for turn in fold(records) if turn.branch == 0]
    assert [[result.call_id for result in turn.observations] for turn in own] == [
        ["count-0"],
        ["count-4"],
        ["finish_it-8"],
    ]


@given(crash=st.integers(0, 20))
def test_runner_that_dies_at_any_write_continues_a_sub_agent(crash: int) -> None:
    async def scenario() -> None:
        whole = leading(MemoryJournal(), [])
        ended = await whole.run_agent(lambda: Leading())
        journal = MemoryJournal(crash_after=crash)
        with contextlib.suppress(Crash):
            await leading(journal, []).run_agent(lambda: Leading())
        journal.crash_after = None
        resumed = leading(journal, [], replay=list(journal.records))
        assert await resumed.run_agent(lambda: Leading()) == ended
        assert [_content(record) for record in resumed.records] == [_content(record) for record in whole.records]

    asyncio.run(scenario())


async def test_the_rollouts_budget_ends_the_sub_agent_and_the_agent_that_started_it() -> None:
    turns = leading(MemoryJournal(), [], max_turns=3)
    assert (await turns.run_agent(lambda: Leading()))[0] is StopReason.MAX_TURNS
    assert turns.turn == 2


class Once:
    """Starts one sub-agent in a way that the test determines."""

    def __init__(self, part: SubTask, beside: bool = False) -> None:
        self.part, self.beside = part, beside

    async def run(self, context: AgentContext) -> str | None:
        started = [context.delegate(ToolCalling(), self.part) for _ in range(1 + self.beside)]
        reports = await asyncio.gather(*started)
        return f"{reports[0].stop_reason.value}: {reports[0].message}"


async def test_sub_agent_that_uses_up_its_turns_ends_only_itself() -> None:
    part = SubTask("p", system_prompt="You are a helper.", max_turns=1)
    assert await leading(MemoryJournal(), []).run_agent(lambda: Once(part)) == (StopReason.FINISHED, "MaxTurns: ")


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (Once(SubTask("p", tools=["bash"])), "there is no tool bash"),
        (Once(SubTask("p", system_prompt="You are a helper."), beside=True), "while its sub-agent runs"),
    ],
)
async def test_unrepeatable_or_impossible_sub_agent_is_refused_with_the_reason(agent: Once, said: str) -> None:
    reason, message = await leading(MemoryJournal(), []).run_agent(lambda: agent)
    assert reason is StopReason.AGENT_ERROR
    assert said in message


async def test_no_two_tool_calls_of_a_rollout_have_the_same_key() -> None:
    keys: list[str] = []

    class Keyed(Count):
        async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
            keys.append(context.workspace.call)  # type: ignore[attr-defined]
            return ToolResult("counted")

    turns = leading(MemoryJournal(), [], tool=Keyed([]))
    await turns.run_agent(lambda: Leading())
    assert len(keys) == len(set(keys)) == DELEGATED + 2 * DELEGATED
    assert [int(key.split(":")[0]) for key in keys] == sorted(int(key.split(":")[0]) for key in keys)


async def test_plugins_get_another_key_for_each_tool_call_of_a_rollout() -> None:
    class Around(Leading):
        """Makes its own calls twice, also before its sub-agents."""

        async def execute_tool_call(self, calls: Sequence[ToolCall]) -> list[Observation]:
            await self.context.call_tools([call for call in calls if call.name == "count"] * 2)
            return await super().execute_tool_call(calls)

    keys: list[str] = []

    class Sees:
        def before_tool_call(self, key: str) -> None:
            keys.append(key)

    plugins = Plugins.open([], [Sees()])
    info = RolloutInfo(0, 0, 0, 0, 0, Task(name="t", prompt="p"))
    turns = leading(MemoryJournal(), [], oversight=Oversight(plugins=RolloutPlugins(plugins, info, "run")))
    await turns.run_agent(lambda: Around())
    plugins.close()
    assert len(keys) == len(set(keys))
    first = [key for key in keys if ":turn-0:" in key]
    assert first == [f"run/rollout-0-0:turn-0:call-{number}" for number in range(3)]


class TriesAgain:
    """Catches the error of each call, and calls again. `caught` may include its cancellation."""

    def __init__(self, content: Any = "go", caught: type[BaseException] = Exception) -> None:
        self.content, self.caught = content, caught

    async def run(self, context: AgentContext) -> str | None:
        while True:
            with contextlib.suppress(self.caught):
                await context.call_model([{"role": "user", "content": self.content}])


class TriesAgainBelow:
    def __init__(self, caught: type[BaseException] = Exception) -> None:
        self.caught = caught

    async def run(self, context: AgentContext) -> str | None:
        return (await context.delegate(TriesAgain(caught=self.caught), SubTask("Go on.", max_turns=1))).message


class TriesAgainBeside(TriesAgain):
    async def run(self, context: AgentContext) -> str | None:
        await asyncio.gather(*(super(TriesAgainBeside, self).run(context) for _ in range(3)))
        return None


@pytest.mark.timeout(60, method="thread")  # agents would catch the exception of the other method
@pytest.mark.parametrize("caught", [Exception, BaseException])
@pytest.mark.parametrize(
    ("make", "reason", "said"),
    [
        (lambda caught: TriesAgain(caught=caught), StopReason.MAX_TURNS, ""),
        (lambda caught: TriesAgain(object(), caught), StopReason.AGENT_ERROR, "calls of the agent failed in a row"),
        (TriesAgainBelow, StopReason.AGENT_ERROR, "calls of the agent failed in a row"),
        (lambda caught: TriesAgainBeside(caught=caught), StopReason.MAX_TURNS, ""),
    ],
    ids=["budget", "content", "sub-agent", "parallel"],
)
async def test_agent_that_calls_again_after_each_error_is_ended(
    make: Callable[[type[BaseException]], Agent], reason: StopReason, said: str, caught: type[BaseException]
) -> None:
    turns = turns_of(MemoryJournal(), CountingModel(0, []), [], max_turns=3)
    found, message = await turns.run_agent(lambda: make(caught))
    assert (found, said in message) == (reason, True)
    assert (turns.traceback is None) == (reason is StopReason.MAX_TURNS)
    assert turns.traceback is None or "in run\n" in turns.traceback


class Unending:
    """Ends neither by an error nor by a cancellation."""

    def __init__(self, *, calls: bool) -> None:
        self.calls, self.rounds = calls, 0

    async def run(self, context: AgentContext) -> str | None:
        while True:
            self.rounds += 1
            with contextlib.suppress(BaseException):
                if self.calls:
                    await context.call_model([{"role": "user", "content": "go"}])
                else:
                    await asyncio.sleep(0.01)


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.timeout(60, method="thread")  # agents would catch the exception of the other method
@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("is_stopped", [True, False])
async def test_agent_that_swallows_its_cancellation_is_left_behind(
    calls: bool, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.engine.attempt.turns.GRACE_SECONDS", 0.1)
    journal, model, agent = MemoryJournal(), CountingModel(0, []), Unending(calls=calls)
    model.seconds = 0.05
    turns = turns_of(journal, model, [], max_turns=10_000, agent_seconds=60 if is_stopped else 1)
    running = asyncio.create_task(turns.run_agent(lambda: agent))
    if is_stopped:
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        assert (await running)[0] is StopReason.AGENT_TIMEOUT
    assert turns.left_behind
    written, asked = len(journal.records), len(model.log)
    await asyncio.sleep(0.2)
    assert (len(journal.records), len(model.log)) == (written, asked), "its calls have no effect"
    if calls:
        rounds = agent.rounds
        await asyncio.sleep(0.1)
        assert agent.rounds == rounds, "its further calls wait"


@pytest.mark.timeout(60, method="thread")  # agents would catch the exception of the other method
async def test_agent_that_was_left_behind_ends_for_the_same_reason_after_a_crash() -> None:
    journal, agent = MemoryJournal(), TriesAgain(caught=BaseException)
    ended = await turns_of(journal, CountingModel(9, []), [], max_turns=3).run_agent(lambda: agent)
    records = list(journal.records)
    resumed = turns_of(journal, CountingModel(9, []), [], replay=records, max_turns=3)
    assert await resumed.run_agent(lambda: agent) == ended == (StopReason.MAX_TURNS, "")
    assert [_content(record) for record in resumed.records] == [_content(record) for record in records]
    assert journal.records == records


class CallsAtItsEnd:
    def __init__(self) -> None:
        self.error: RuntimeError | None = None

    async def run(self, context: AgentContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            try:
                await context.call_model([{"role": "user", "content": "go"}])
            except RuntimeError as error:
                self.error = error
                raise


@pytest.mark.usefixtures("virtual_clock")
async def test_agent_whose_time_is_over_makes_no_call_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    agent, journal, model = CallsAtItsEnd(), MemoryJournal(), CountingModel(0, [])
    turns = turns_of(journal, model, [], agent_seconds=1)
    assert (await turns.run_agent(lambda: agent))[0] is StopReason.AGENT_TIMEOUT
    assert "has ended" in str(agent.error)
    assert (journal.records, model.log, turns.left_behind) == ([], [], False)
    agent.error = None
    gc.collect()
    assert not caplog.records, "asyncio reports no error that was not retrieved"


ABANDONED = """
import asyncio, gc
from tests.unit.engine.test_sub_agent import *

async def main():
    for agent in (TriesAgain(object(), BaseException), TriesAgainBeside(caught=BaseException), Unending(calls=False)):
        turns = turns_of(MemoryJournal(), CountingModel(0, []), [], max_turns=3, agent_seconds=1)
        print((await turns.run_agent(lambda: agent))[0].value, turns.left_behind)
        del turns
        gc.collect()

import agent_runtime.engine.attempt.turns as engine
engine.GRACE_SECONDS = 0.1
engine.log.disabled = True
asyncio.run(main())
"""


@pytest.mark.timeout(60, method="thread")  # agents would catch the exception of the other method
def test_process_ends_although_agents_were_left_behind() -> None:
    ended = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=50, check=False)
    assert ended.stdout.split("\n")[:3] == ["AgentError True", "MaxTurns True", "AgentTimeout True"]
    assert (ended.returncode, ended.stderr) == (0, "")
