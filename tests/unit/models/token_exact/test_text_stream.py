"""A streaming client sees the text once, from its first piece on, and never a part of a tool call."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.token_exact.answer_text import PartialAnswers, TextStream

texts = st.text(alphabet="ab \n<[{é", max_size=40)


@given(texts, st.booleans(), st.data())
def test_pieces_together_are_the_text(text: str, tools: bool, data: st.DataObject) -> None:
    pieces: list[str] = []
    stream = TextStream(pieces.append, tools=tools)
    for length in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))):
        stream.offer(text[:length])
    stream.finish(text)
    assert "".join(pieces) == text
    assert all(pieces)


@given(texts, texts, st.data())
def test_text_of_a_tool_call_is_held_back(text: str, call: str, data: st.DataObject) -> None:
    written = f"{text}\n<tool_call>{call}"
    pieces: list[str] = []
    stream = TextStream(pieces.append, tools=True)
    for length in sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6))):
        stream.offer(written[:length])
    assert text.startswith("".join(pieces))
    stream.finish(text.rstrip())
    assert "".join(pieces) == text.rstrip(), "also where the parser strips the text"


def test_half_a_character_waits_for_its_other_half() -> None:
    pieces: list[str] = []
    stream = TextStream(pieces.append, tools=False)
    stream.offer("caf\ufffd")
    stream.finish("café")
    assert pieces == ["caf", "é"]


def test_streamed_text_is_not_sent_again_when_the_final_text_differs() -> None:
    pieces: list[str] = []
    stream = TextStream(pieces.append, tools=False)
    stream.offer("one")
    stream.finish("two")
    assert pieces == ["one"]


def test_reasoning_is_handed_out_before_the_text_without_its_closing_marker() -> None:
    said: list[str] = []
    stream = TextStream(said.append, tools=True, on_reasoning=lambda piece: said.append(f"({piece})"))
    for thought in ("Let me", "Let me see. </", "Let me see. </thi"):
        stream.offer("", thought)
    stream.offer("Yes.", "Let me see.")
    stream.finish("Yes. No.", "Let me see.")
    assert said == ["(Let me)", "( see.)", "Yes.", " No."]


async def test_partial_answers_cost_a_few_times_the_whole_and_never_stop_on_an_error() -> None:
    decoded: list[int] = []

    async def decode(ids: Sequence[int]) -> tuple[str, str]:
        decoded.append(len(ids))
        await asyncio.sleep(0)
        if len(decoded) == 3:
            raise ConnectionError
        return "x" * len(ids), ""

    pieces: list[str] = []
    partial = PartialAnswers(decode, TextStream(pieces.append, tools=False))
    ids: list[int] = []
    for token in range(4000):
        ids.append(token)
        partial.grown(ids)
        await asyncio.sleep(0)
    await partial.stop()
    assert sum(decoded) < 20 * 4000
    assert len("".join(pieces)) > 3000
