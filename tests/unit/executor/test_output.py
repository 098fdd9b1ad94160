"""What is kept of a command's output."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.attempts import StoredReply
from agent_runtime.executor.commands import streams as module
from agent_runtime.executor.commands.streams import Caps, Output, Piece
from agent_runtime.executor.http.messages import Reply
from agent_runtime.sandboxes.executor_client.values import bytes_of

CAPS = st.builds(Caps, st.integers(0, 30), st.integers(0, 30), st.integers(0, 60))


@given(CAPS, st.lists(st.binary(min_size=1, max_size=50), max_size=20), st.integers(1, 40))
def test_every_byte_is_kept_at_its_place_or_counted_as_lost(caps: Caps, pieces: list[bytes], limit: int) -> None:
    slack, module._SLACK_BYTES = module._SLACK_BYTES, 7
    try:
        with tempfile.TemporaryDirectory() as folder:
            kept = Output(caps, f"{folder}/spill")
            for piece in pieces:
                kept.feed(piece)
            whole = b"".join(pieces)
            summary = kept.summary()
            head, tail = bytes_of(summary["head"]), bytes_of(summary["tail"])
            assert head == whole[: caps.head]
            assert tail == whole[len(head) :][-caps.tail :] if caps.tail else tail == b""
            assert summary["bytes"] == len(whole) == len(head) + len(tail or b"") + summary["omitted"]
            cursor = lost = 0
            while cursor < len(whole):
                piece_read = kept.read(cursor, limit)
                assert len(piece_read.data) <= limit
                assert piece_read.next > cursor
                start = cursor + piece_read.lost
                assert piece_read.data == whole[start : piece_read.next]
                assert piece_read.next == start + len(piece_read.data)
                lost += piece_read.lost
                cursor = piece_read.next
            assert lost == 0 or len(whole) > caps.head + caps.spill
            assert kept.read(len(whole), limit) == module.Piece(b"", len(whole), 0)
            kept.discard()
            assert not list(Path(folder).iterdir())
    finally:
        module._SLACK_BYTES = slack


def test_full_disk_loses_the_middle_of_an_output_and_keeps_both_ends() -> None:
    kept = Output(Caps(10, 10, 10**6), "/proc/no-file-can-be-made-here")
    kept.feed(b"a" * 10)
    for _ in range(100):
        kept.feed(b"b" * 10_000)
    kept.feed(b"c" * 10)
    summary = kept.summary()
    assert (summary["head"]["data"], summary["tail"]["data"]) == ("a" * 10, "c" * 10)
    assert summary["bytes"] == 20 + 100 * 10_000
    piece = kept.read(10, 100)
    assert piece.lost > 0


def test_output_whose_file_a_tool_replaces_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLACK_BYTES", 0)
    kept = Output(Caps(2, 2, 60), str(tmp_path / "spill"))
    kept.feed(b"0123456789")
    (tmp_path / "spill").unlink()
    os.mkdir(tmp_path / "spill")
    assert kept.read(2, 40) == Piece(b"89", 10, 6)
    kept.discard()


def test_reply_whose_file_a_tool_replaces_is_forgotten_with_its_turn(tmp_path: Path) -> None:
    stored = StoredReply(Reply(b"x" * 5000), str(tmp_path / "reply"))
    (tmp_path / "reply").unlink()
    os.mkdir(tmp_path / "reply")
    stored.discard()
