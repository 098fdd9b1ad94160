"""Records of a journal are returned exactly, and damage must not look like a shorter journal."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.segments import Closing, RecordCorrupt, compress, decode, encode, encode_closing
from rollout_api.records import Record, StopReason, StopRecord
from tests.unit.recording.strategies import records

some_records = st.lists(records, min_size=1, max_size=4)


@given(some_records)
def test_every_record_is_read_as_it_was_written(written: list[Record]) -> None:
    assert decode("k", encode(written)) == written


@given(some_records, st.data())
def test_a_truncated_segment_is_reported_and_never_read_as_a_shorter_one(
    written: list[Record], data: st.DataObject
) -> None:
    segment = encode(written)
    cut = data.draw(st.integers(0, len(segment) - 1))
    with pytest.raises(RecordCorrupt, match="attempts/0/0/1-0"):
        decode("attempts/0/0/1-0.jsonl.zst", segment[:cut])


@given(some_records, st.data())
def test_changed_byte_is_reported_or_has_no_effect(written: list[Record], data: st.DataObject) -> None:
    segment = bytearray(encode(written))
    position = data.draw(st.integers(0, len(segment) - 1))
    segment[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(RecordCorrupt):
        assert decode("k", bytes(segment)) == written  # a bit of the frame's header that says nothing


def test_frame_with_a_false_size_is_reported_before_it_fills_the_memory() -> None:
    frame = bytearray(encode([]))
    frame[4:5] = bytes([frame[4] | 0xC0])  # RFC 8878, 3.1.1.1.1: the content size has 8 bytes now
    frame[5:5] = (2**62).to_bytes(8, "little")
    with pytest.raises(RecordCorrupt, match="claims 4611686018427387904 bytes"):
        decode("k", bytes(frame))


@given(some_records, st.binary(min_size=1, max_size=64))
def test_bytes_behind_the_segment_are_reported(written: list[Record], more: bytes) -> None:
    with pytest.raises(RecordCorrupt):
        decode("k", encode(written) + more)


def test_the_line_and_the_field_that_are_wrong_are_named() -> None:
    lines = b'{"type":"stop","time":1,"stopReason":"Finished"}\n{"type":"stop","time":1,"stopReason":"Bored"}\n'
    with pytest.raises(RecordCorrupt, match=r"k: line 2, stop.stopReason: "):
        decode("k", compress(lines))


def test_a_record_of_a_kind_that_this_version_does_not_know_is_reported() -> None:
    with pytest.raises(RecordCorrupt, match="line 1"):
        decode("k", compress(b'{"type":"dream"}\n'))


def test_closing_segment_is_decoded_as_closing() -> None:
    closing = Closing(closed_by=3, holder="abc")
    assert decode("k", encode_closing(closing)) == closing


def test_half_a_surrogate_pair_from_a_tool_does_not_stop_the_journal() -> None:
    record = StopRecord(time=1, stop_reason=StopReason.FINISHED, message="caf\ud83d")
    assert decode("k", encode([record])) == [record.model_copy(update={"message": "caf?"})]
