"""An attempt's log: records of an earlier process answer first, and nothing is written twice or out of order."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.attempt.attempt_log import AttemptLog, NotReplayable
from rollout_api.records import (
    IntentRecord,
    ObservationsRecord,
    Record,
    ResponseRecord,
    StepRecord,
    StopReason,
    StopRecord,
)
from tests.support.records import asked, gave, said
from tests.unit.engine.test_turns import MemoryJournal


def note(text: str) -> Record:
    return StopRecord(time=0, stop_reason=StopReason.FINISHED, message=text)


def test_records_of_an_earlier_process_answer_in_their_order_and_then_calls_are_real() -> None:
    recorded: list[Record] = [asked(0, 0), said(0, "a"), gave(0), asked(1, 1)]
    log = AttemptLog(MemoryJournal(), recorded)
    assert log.replaying
    forms: list[Any] = [IntentRecord, ResponseRecord, ObservationsRecord, IntentRecord]
    found = [log.next(form, 0) for form in forms]
    assert found == recorded
    assert log.records == recorded
    assert not log.replaying
    assert log.next(ResponseRecord, 1) is None


def test_running_call_is_repeated_and_a_different_call_is_detected() -> None:
    log = AttemptLog(MemoryJournal(), [asked(1, 0)])
    assert log.next(ObservationsRecord, 0) is None, "its tools had not returned"
    with pytest.raises(NotReplayable, match="turn 0: the journal continues with intent"):
        log.next(StepRecord, 0)


@given(st.lists(st.sampled_from(["add", "write", "begin", "take"]), max_size=12))
def test_each_record_is_written_once_and_in_order_whatever_it_waits_for(deeds: list[str]) -> None:
    async def scenario() -> None:
        journal = MemoryJournal()
        log = AttemptLog(journal, (), [note("first")])
        for number, deed in enumerate(deeds):
            if deed == "add":
                log.add(note(f"{number}"))
            elif deed == "write":
                await log.write(note(f"{number}"))
            elif deed == "begin":
                if (writing := log.begin_write()) is not None:
                    await writing
            else:
                await journal.append(log.take_unwritten())

        assert [*journal.records, *log.take_unwritten()] == log.records

    asyncio.run(scenario())
