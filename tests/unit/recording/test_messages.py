"""The journal keeps only changes between two calls, and every call can still be read completely."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.messages import fold, last_of_each_branch
from rollout_api.records import IntentRecord, Message, Observation, ObservationsRecord, Record, ResponseRecord

few_messages = st.lists(st.sampled_from("abc").map(lambda text: {"role": "user", "content": text}), max_size=5)


def answer(turn: int) -> ResponseRecord:
    return ResponseRecord(
        turn=turn, time=1, seconds=0, message={"role": "assistant", "content": f"answer {turn}"}, finish_reason="stop"
    )


def common(before: list[Message], now: list[Message]) -> int:
    return next((n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))


def journal_of(calls: list[list[Message]]) -> list[Record]:
    records: list[Record] = []
    before: list[Message] = []
    branch = 0
    for turn, messages in enumerate(calls):
        keep = common(before, messages)
        branch += keep < len(before)
        records.append(IntentRecord(turn=turn, time=0, keep=keep, messages=messages[keep:], branch=branch))
        records.append(answer(turn))
        before = [*messages, answer(turn).message]
    return records


@given(st.lists(st.tuples(st.integers(0, 8), few_messages), min_size=1, max_size=6))
def test_every_call_is_read_completely_after_any_edits_of_the_history(edits: list[tuple[int, list[Message]]]) -> None:
    calls: list[list[Message]] = []
    history: list[Message] = []
    for turn, (kept, more) in enumerate(edits):
        calls.append([*history[:kept], *more])
        history = [*calls[-1], answer(turn).message]
    turns = fold(journal_of(calls))
    assert [turn.messages for turn in turns] == calls
    assert [turn.response for turn in turns] == [answer(turn) for turn in range(len(calls))]
    branches = last_of_each_branch(turns)
    assert [turn.branch for turn in branches] == list(range(len(branches)))
    assert branches[-1].conversation() == history


def test_journal_that_ends_before_the_answer_is_readable() -> None:
    turns = fold(journal_of([[{"role": "user", "content": "a"}]])[:1])
    assert turns[0].response is None
    assert turns[0].conversation() == [{"role": "user", "content": "a"}]


def test_tool_definitions_stand_until_they_change_and_results_follow_their_call() -> None:
    tools = [{"type": "function", "function": {"name": "bash"}}]
    records: list[Record] = [
        IntentRecord(turn=0, time=0, keep=0, messages=[{"role": "user", "content": "a"}], tools=tools),
        answer(0),
        ObservationsRecord(turn=0, time=0, results=[Observation(call_id="c", tool="bash", content="ok")]),
        IntentRecord(turn=1, time=0, keep=2, messages=[{"role": "tool", "tool_call_id": "c", "content": "ok"}]),
        answer(1),
    ]
    first, second = fold(records)
    assert second.tools == tools
    assert second.messages == first.conversation()
