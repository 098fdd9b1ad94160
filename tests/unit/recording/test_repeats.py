"""A message that is recorded again is written once, and is returned in each record that contains it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording import segments
from agent_runtime.recording.segments import Closing, RecordCorrupt, Repeats, decode, restored
from rollout_api.records import IntentRecord, Message, Record
from tests.unit.recording.strategies import records


def decoded(data: Sequence[bytes]) -> list[Record]:
    found: list[Record] = []
    for segment in data:
        content = decode("k", segment)
        assert not isinstance(content, Closing)
        found += content
    return found


@given(st.lists(st.lists(records, min_size=1, max_size=4), max_size=6), st.integers(0, 6))
def test_records_are_restored_after_any_takeover(written: list[list[Record]], taken_over: int) -> None:
    repeats, data = Repeats(), list[bytes]()
    for number, batch in enumerate(written):
        if number == taken_over:
            repeats = Repeats(restored("k", decoded(data)))
        data.append(repeats.encode(batch))
    assert restored("k", decoded(data)) == [record for batch in written for record in batch]


def rewritten(turn: int, messages: list[Message]) -> IntentRecord:
    tools = [{"type": "function", "function": {"name": "bash", "description": "runs a command " * 100}}]
    return IntentRecord(turn=turn, time=0, keep=0, messages=messages, tools=tools)


def test_rewritten_history_adds_its_new_messages_to_the_journal() -> None:
    history: list[Message] = [
        {"role": "user", "content": f"{number} {number * 'lorem ipsum '}"} for number in range(200)
    ]
    repeats = Repeats()
    sizes = [
        len(segments.decompress("k", repeats.encode([rewritten(turn, history[turn : turn + 100])])))
        for turn in range(100)
    ]
    assert max(sizes[1:]) < sizes[0] / 10


def test_missing_record_is_reported_when_a_later_one_repeats_it() -> None:
    message: Message = {"role": "user", "content": "hello"}
    repeats = Repeats()
    repeats.encode([rewritten(0, [message])])
    with pytest.raises(RecordCorrupt, match="turn 1 repeats message 0 of turn 0, which does not exist"):
        restored("k", decoded([repeats.encode([rewritten(1, [message])])]))
