"""A rollout whose conversation was cut continues after a crash as if it had not crashed."""

import asyncio
import contextlib
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.agents.base_class import SUMMARISE
from agent_runtime.agents.tool_calling import ToolCalling
from agent_runtime.models.base import ModelReply, ModelRequest
from agent_runtime.recording.messages import linear
from rollout_api.records import IntentRecord
from rollout_api.rollout_job import ContextLimit, ContextMethod
from tests.unit.engine.test_turns import CountingModel, Crash, MemoryJournal, _content, turns_of


class Summarising(CountingModel):
    async def complete(self, request: ModelRequest) -> ModelReply:
        reply = await super().complete(request)
        if request.messages[-1]["content"] == SUMMARISE:
            return ModelReply({"role": "assistant", "content": f"summary {request.turn}"}, "stop", usage=reply.usage)
        return reply


@given(method=st.sampled_from(ContextMethod), unit=st.sampled_from(["messages", "tokens"]), crash=st.integers(0, 26))
def test_shortened_conversation_is_the_same_after_a_crash_at_any_write(
    method: ContextMethod, unit: Literal["messages", "tokens"], crash: int
) -> None:
    limit = (
        ContextLimit(max_messages=6, method=method)
        if unit == "messages"
        else ContextLimit(max_tokens=14, method=method)
    )

    async def scenario() -> None:
        log: list[str] = []
        whole = turns_of(MemoryJournal(), Summarising(11, log), log, context=limit)
        ended = await whole.run_agent(lambda: ToolCalling())
        branches = [record.branch for record in linear(whole.records) if isinstance(record, IntentRecord)]
        assert branches[-1] >= 2, "it was cut, more than once"
        journal = MemoryJournal(crash_after=crash)
        with contextlib.suppress(Crash):
            await turns_of(journal, Summarising(11, []), [], context=limit).run_agent(lambda: ToolCalling())
        journal.crash_after = None
        resumed = turns_of(journal, Summarising(11, []), [], replay=list(journal.records), context=limit)
        assert await resumed.run_agent(lambda: ToolCalling()) == ended
        assert [_content(record) for record in resumed.records] == [_content(record) for record in whole.records]

    asyncio.run(scenario())
