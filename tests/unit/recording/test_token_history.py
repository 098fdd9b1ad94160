"""A long rollout's journal stays small, and returns every prompt as the server saw it."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.token_history import TokenHistory, common_length
from rollout_api.records import ResponseRecord

ids = st.lists(st.integers(0, 3), max_size=8)


def response(keep: int, prompt: list[int] | None, completion: list[int] | None) -> ResponseRecord:
    return ResponseRecord(
        turn=0,
        time=0,
        seconds=0,
        message={},
        finish_reason="stop",
        prompt_keep=keep,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
    )


@given(ids, ids)
def test_common_part_of_two_sequences_ends_at_their_first_difference(old: list[int], new: list[int]) -> None:
    length = common_length(old, new)
    assert old[:length] == new[:length]
    assert length in (len(old), len(new)) or old[length] != new[length]


@given(st.lists(st.tuples(ids, st.none() | ids), max_size=6))
def test_prompts_are_restored_in_full_by_a_replaying_process(turns: list[tuple[list[int], list[int] | None]]) -> None:
    writing, replaying = TokenHistory(), TokenHistory()
    for number, (prompt, completion) in enumerate(turns, start=1):
        keep, stored = writing.split(prompt if completion is not None else None)
        record = ResponseRecord.model_validate_json(response(keep, stored, completion).model_dump_json())
        expected = prompt if completion is not None else None
        assert writing.add(record, number) == replaying.add(record, number) == expected
        assert (writing.ids, writing.messages) == (replaying.ids, replaying.messages)


def test_a_long_rollout_stores_each_token_once() -> None:
    history, stored = TokenHistory(), 0
    for turn in range(200):
        keep, new = history.split([*history.ids, 1, 2, 3])
        assert new is not None
        stored += len(new)
        history.add(response(keep, new, [4, 5]), turn)
    assert stored == 3 * 200


def test_ids_correspond_to_no_messages_after_the_agent_removed_some() -> None:
    history = TokenHistory()
    history.add(response(0, [1], [2]), 3)
    history.keep_messages(3)
    assert history.messages == 3
    history.keep_messages(2)
    assert history.messages == 0
    keep, new = history.split([1, 2, 3])
    assert (keep, new) == (2, [3]), "what is stored against is not what a prompt may begin with"
