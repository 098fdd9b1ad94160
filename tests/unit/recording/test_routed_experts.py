"""Experts for router replay: each token has those that its server reported for it, and no token has others."""

import array
import asyncio
import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from agent_runtime.models.routed_experts import AnswerExperts, ExpertRows, joined, located, parse_flat, parse_npy
from agent_runtime.models.token_history import TokenHistory, experts_from
from agent_runtime.recording.attempt_folder import digest_of
from agent_runtime.recording.branches import decode_branches, encode_branches, token_branches
from agent_runtime.recording.expert_arrays import ExpertArray, read_experts
from agent_runtime.recording.segments import compress
from agent_runtime.recording.store import Store
from rollout_api.records import ObjectDigest, RecordedExperts, ResponseRecord

LAYERS, TOP_K = 2, 2


def row(ids: Sequence[int], turn: int) -> list[int]:
    """What the model of a test uses for the last of these tokens, in the pass of a turn."""
    return [turn, len(ids), ids[-1], sum(ids) % 251]


def rows(ids: Sequence[int], first: int, turn: int, item_bytes: Literal[1, 2]) -> ExpertRows:
    """What a server reports after it has sampled the last of these tokens."""
    numbers = [number for end in range(first + 1, len(ids)) for number in row(ids[:end], turn)]
    return ExpertRows(struct.pack(f"<{len(numbers)}{'_BH'[item_bytes]}", *numbers), item_bytes, LAYERS, TOP_K)


@dataclass
class Script:
    """Turns of a conversation, and the objects that they store."""

    turns: list[ResponseRecord] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    sampled: list[tuple[list[int], int, bool]] = field(default_factory=list)
    """Ids up to each sampled token, its turn, and whether a server reported the experts with which it was chosen."""

    def add(self, history: TokenHistory, prompt: list[int], completion: list[int], **how: int) -> None:
        turn, earlier = len(self.turns), how.get("earlier", 0)
        keep, new = history.split(prompt)
        first = experts_from(history.experts, history.ids, prompt)
        whole = [*prompt, *completion]
        item_bytes: Literal[1, 2] = 2 if how.get("wide") else 1
        # A server may ignore from where it should report.
        told = rows(whole, 0 if how.get("all") else first, turn, item_bytes)
        found = located(told, asked_from=first, prompt=len(prompt), earlier=earlier, tokens=len(whole))
        experts = None
        if found is not None and not how.get("silent"):
            key, data = f"experts-{turn}", compress(found.rows.data)
            self.objects[key] = data
            experts = RecordedExperts(
                object=digest_of(key, data), item_bytes=item_bytes, layers=LAYERS, top_k=TOP_K, spans=found.spans
            )
        record = ResponseRecord(
            turn=turn,
            time=0,
            seconds=0,
            message={"role": "assistant"},
            finish_reason="stop",
            prompt_keep=keep,
            prompt_token_ids=new,
            completion_token_ids=completion,
            routed_experts=experts,
        )
        for number in range(len(completion)):
            known = experts is not None and number >= earlier
            self.sampled.append((whole[: len(prompt) + number + 1], turn, known))
        history.add(record, turn)
        self.turns.append(record)

    def arrays(self) -> list[tuple[list[int], list[int], ExpertArray | None]]:
        """Ids, mask and experts of each branch, as they are read from storage."""
        store = Store("memory:", MemoryStore())

        async def read() -> list[tuple[list[int], list[int], ExpertArray | None]]:
            for key, data in self.objects.items():
                await store.create(key, data)
            branches = decode_branches("k", encode_branches(token_branches(self.turns)))
            return [(branch.token_ids, branch.mask, await read_experts(store, branch)) for branch in branches]

        return asyncio.run(read())


def reported_rows(found: ExpertArray) -> dict[int, list[int]]:
    """The numbers of each reported position. All others are zeros."""
    kind, size = {"uint8": "B", "uint16": "H"}[found.dtype], LAYERS * TOP_K
    numbers = [list(group) for group in struct.iter_unpack(f"<{size}{kind}", found.data)]
    assert found.shape == (len(numbers), LAYERS, TOP_K)
    positions = [position for begin, end in found.reported for position in range(begin, end)]
    assert positions == sorted(set(positions))
    assert not any(any(numbers[position]) for position in {*range(len(numbers))} - {*positions})
    return {position: numbers[position] for position in positions}


@st.composite
def scripts(draw: st.DrawFn, *, faults: bool) -> Script:
    script, history = Script(), TokenHistory()
    for _ in range(draw(st.integers(1, 6))):
        so_far = history.ids
        kept = len(so_far) if draw(st.booleans()) else draw(st.integers(0, len(so_far)))
        prompt = so_far[:kept] + draw(st.lists(st.integers(1, 9), min_size=not kept, max_size=5))
        completion = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        how: dict[str, int] = {"wide": draw(st.booleans()), "all": draw(st.booleans())}
        if faults:
            how |= {"silent": draw(st.booleans()), "earlier": draw(st.integers(0, len(completion) - 1))}
        script.add(history, prompt, completion, **how)
    return script


@given(scripts(faults=False))
def test_all_tokens_but_the_last_have_the_experts_of_their_own_turn(script: Script) -> None:
    sampled = iter(script.sampled)
    for tokens, mask, found in script.arrays():
        assert found is not None
        assert found.reported == ([(0, len(tokens) - 1)] if len(tokens) > 1 else [])
        known = reported_rows(found)
        for position, trained in enumerate(mask):
            if position + 1 < len(tokens):
                # The pass of some turn that had the same tokens before it.
                assert known[position][1:] == row(tokens[: position + 1], 0)[1:]
            if trained:
                before, turn, _ = next(sampled)
                assert before == tokens[: position + 1]
                assert position == 0 or known[position - 1] == row(before[:-1], turn)
    assert not list(sampled)


@given(scripts(faults=True))
def test_tokens_whose_experts_were_lost_are_marked_and_get_no_others(script: Script) -> None:
    sampled = iter(script.sampled)
    for tokens, mask, found in script.arrays():
        known = {} if found is None else reported_rows(found)
        for position, numbers in known.items():
            assert numbers[1:] == row(tokens[: position + 1], 0)[1:]
        for position, trained in enumerate(mask):
            if trained:
                before, turn, is_known = next(sampled)
                if position:
                    assert known.get(position - 1) == (row(before[:-1], turn) if is_known else None)


def test_an_array_that_is_damaged_is_refused() -> None:
    script, history = Script(), TokenHistory()
    script.add(history, [1, 2], [3, 4])
    script.objects["experts-0"] = compress(b"other")
    with pytest.raises(Exception, match="experts-0: its SHA-256 or size differs"):
        script.arrays()


def npy(kind: str, shape: Sequence[int], data: bytes, version: int = 1, order: bool = False) -> str:
    header = f"{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {tuple(shape)}, }}".encode().ljust(118) + b"\n"
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return base64.b64encode(b"\x93NUMPY" + bytes([version, 0]) + size + header + data).decode()


@pytest.mark.parametrize("version", [1, 2])
def test_vllms_arrays_are_read_in_one_or_two_bytes(version: int) -> None:
    assert parse_npy(npy("|u1", (1, 2, 2), b"\1\2\3\xff", version)) == ExpertRows(b"\1\2\3\xff", 1, 2, 2)
    wide = struct.pack("<4H", 1, 2, 3, 256)
    assert parse_npy(npy("<u2", (1, 2, 2), wide, version)) == ExpertRows(wide, 2, 2, 2)
    assert parse_npy(npy("<i4", (1, 2, 2), struct.pack("<4i", 1, 2, 3, 256), version)) == ExpertRows(wide, 2, 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("abc", "padding"),
        (base64.b64encode(b"0123456789ab").decode(), "expected a .npy file in base64"),
        (npy("<f4", (1, 1, 1), b"\0" * 4), "expected an array of type"),
        (npy("|u1", (1, 2, 2), b"\0" * 4, order=True), "in C order"),
        (npy("|u1", (1, 2, 2), b"\0" * 3), r"got 3 bytes of shape \[1, 2, 2\]"),
        (npy("|u1", (4,), b"\0" * 4), r"got 4 bytes of shape \[4\]"),
        (npy("<i4", (1, 1, 1), struct.pack("<i", -1)), "expected expert numbers from 0 to 65535"),
    ],
)
def test_other_arrays_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_npy(text)


def test_sglangs_numbers_are_read_by_the_number_of_their_tokens() -> None:
    numbers = base64.b64encode(array.array("i", range(12)).tobytes()).decode()
    assert parse_flat(numbers, 2, 3) == ExpertRows(bytes(range(12)), 1, 2, 2)
    with pytest.raises(ValueError, match=r"check model\.routedExperts\.topK"):
        parse_flat(numbers, 5, 3)


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the experts of 3 tokens, got those of 4"):
        located(ExpertRows(b"\0" * 4, 1, 1, 1), asked_from=2, prompt=3, earlier=0, tokens=6)


def test_digests_name_each_array_once() -> None:
    script, history = Script(), TokenHistory()
    script.add(history, [1, 2], [3, 4])
    script.add(history, [*history.ids, 5], [6])
    named: list[ObjectDigest] = [turn.routed_experts.object for turn in script.turns if turn.routed_experts]
    assert [digest.key for digest in named] == ["experts-0", "experts-1"]
    # The second array begins with the last sampled token of the first turn.
    assert [turn.routed_experts.spans for turn in script.turns if turn.routed_experts] == [[(0, 3)], [(3, 5)]]


def test_parts_of_an_answer_whose_numbers_have_different_sizes_are_joined() -> None:
    small, large = (
        ExpertRows(bytes([1, 2, 3, 4]), 1, LAYERS, TOP_K),
        ExpertRows(struct.pack("<4H", 5, 300, 7, 8), 2, LAYERS, TOP_K),
    )
    whole = joined([AnswerExperts(small, [(0, 1)]), AnswerExperts(large, [(1, 2)])])
    assert whole is not None
    assert (whole.rows.item_bytes, struct.unpack("<8H", whole.rows.data)) == (2, (1, 2, 3, 4, 5, 300, 7, 8))
    assert whole.spans == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="different shapes"):
        joined([AnswerExperts(small, [(0, 1)]), AnswerExperts(ExpertRows(bytes(2), 1, 1, TOP_K), [(1, 2)])])
