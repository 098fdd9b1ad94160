"""Concurrent turns, put in order for readers of a journal (the property test: tests/unit/proxy/test_session.py)."""

from agent_runtime.recording.branches import token_branches, token_forks
from agent_runtime.recording.messages import fold, linear
from rollout_api.records import DeliveryRecord, IntentRecord, Message, Record, ResponseRecord, StopReason, StopRecord


def said(role: str, content: str) -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def intent(turn: int, keep: int, *messages: Message, parent: int | None = None) -> IntentRecord:
    """Return an intent as the proxy records it."""
    return IntentRecord(
        turn=turn,
        time=turn,
        keep=keep,
        messages=list(messages),
        tools=[] if parent is None else None,
        parent=parent,
        request_digest="d",
    )


def response(turn: int, keep: int, prompt: list[int], completion: list[int]) -> ResponseRecord:
    """Return an answer with ids."""
    return ResponseRecord(
        turn=turn,
        time=turn,
        seconds=0,
        message=said("assistant", f"answer {turn}"),
        finish_reason="stop",
        prompt_keep=keep,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
    )


def test_two_conversations_that_interleave_are_two_branches_without_a_fork() -> None:
    records: list[Record] = [
        intent(0, 0, said("user", "a")),
        intent(1, 0, said("user", "b")),
        response(1, 0, [2], [21]),
        response(0, 0, [1], [11]),
        intent(2, 2, said("user", "a2"), parent=0),
        intent(3, 2, said("user", "b2"), parent=1),
        response(2, 2, [3], [31]),
        response(3, 2, [4], [41]),
        StopRecord(time=9, stop_reason=StopReason.FINISHED),
    ]
    in_line = linear(records)
    assert [turn.number for turn in fold(in_line)] == [0, 2, 1, 3]
    assert [branch.token_ids for branch in token_branches(in_line)] == [[1, 11, 3, 31], [2, 21, 4, 41]]
    assert token_forks(in_line) == 0
    assert in_line[-1] == records[-1]
    assert linear(in_line) == in_line


def test_two_answers_to_one_conversation_share_its_tokens_and_train_them_once() -> None:
    records: list[Record] = [
        intent(0, 0, said("user", "a")),
        response(0, 0, [1], [11]),
        intent(1, 2, said("user", "x"), parent=0),
        intent(2, 2, said("user", "y"), parent=0),
        response(1, 2, [3], [31]),
        response(2, 2, [4], [41]),
    ]
    first, second = token_branches(linear(records))
    assert (first.token_ids, first.mask) == ([1, 11, 3, 31], [0, 1, 0, 1])
    assert (second.token_ids, second.mask) == ([1, 11, 4, 41], [0, 0, 0, 1])


def test_undelivered_answer_is_left_out_and_its_retry_counts_last() -> None:
    records: list[Record] = [
        intent(0, 0, said("user", "a")),
        response(0, 0, [1], [11]),
        DeliveryRecord(turn=0, time=1, delivered=False),
        intent(1, 0, said("user", "a")),
        response(1, 0, [1], [21]),
        DeliveryRecord(turn=1, time=2, delivered=False),
        DeliveryRecord(turn=1, time=3, delivered=True),
    ]
    assert [turn.number for turn in fold(linear(records))] == [1]


def test_records_of_the_built_in_loop_are_unchanged() -> None:
    records: list[Record] = [
        IntentRecord(turn=0, time=0, keep=0, messages=[said("user", "a")]),
        response(0, 0, [1], [11]),
        IntentRecord(turn=1, time=1, parent=0, keep=2, messages=[said("user", "b")]),
    ]
    assert linear(records) == records


def test_tokens_are_exact_when_an_answer_is_overtaken_by_another_conversation() -> None:
    """Call 0, such as one for a title, is answered after calls 1 and 2 of a concurrent conversation."""

    def asks(turn: int, parent: int | None, keep: int) -> IntentRecord:
        first = turn if parent is None else 1
        new: list[Message] = [{"role": "user", "content": str(turn)}]
        return IntentRecord(turn=turn, time=0, conversation=first, parent=parent, keep=keep, messages=new)

    def answers(turn: int, keep: int, prompt: list[int], sampled: list[int]) -> ResponseRecord:
        return ResponseRecord(
            turn=turn, time=0, seconds=0, message={"role": "assistant", "content": f"answer {turn}"}, finish_reason="stop",
            prompt_keep=keep, prompt_token_ids=prompt, completion_token_ids=sampled,
        )  # fmt: skip

    records: list[Record] = [
        *(asks(0, None, 0), asks(1, None, 0), answers(1, 0, [11], [12])),
        *(asks(2, 1, 2), answers(2, 2, [13], [14]), answers(0, 0, [1], [2])),
        *(asks(3, 2, 4), answers(3, 4, [15], [16])),
    ]
    sequences = [(branch.token_ids, branch.mask) for branch in token_branches(linear(records))]
    assert sequences == [([1, 2], [0, 1]), ([11, 12, 13, 14, 15, 16], [0, 1] * 3)]
    assert token_forks(linear(records)) == 0
