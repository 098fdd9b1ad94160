import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.vllm_server.template import tool_call_text
from tests.support.vllm_server.tool_parser import ToolCallStream, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8).filter(lambda text: "tool_call" not in text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["bash", "edit"]), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), max_size=3
)
TEXTS = st.text("abc <>\n{}", max_size=20)


def streamed(text: str, cuts: list[int]) -> tuple[str, list[dict[str, Any]]]:
    stream = ToolCallStream()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    content = ""
    calls: list[dict[str, Any]] = []
    for number, piece in enumerate([*pieces, ""]):
        for delta in stream.feed(piece, final=number == len(pieces)):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "name" in function:
                    assert call["index"] == len(calls)
                    calls.append({"name": function["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += function["arguments"]
    return content, calls


@given(TEXTS, CALLS, st.lists(st.integers(0, 200), max_size=12))
def test_a_stream_cut_anywhere_gives_the_calls_that_the_whole_text_has(
    text: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    written = text
    for name, arguments in calls:
        written = tool_call_text(written, name, arguments)
    content, found = parse(written)
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
    assert streamed(written, cuts) == (content or "", found)


def test_truncated_call_is_text_and_a_partial_call_in_a_stream() -> None:
    written = 'Look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls'
    assert parse(written) == (written, [])
    assert streamed(written, [9, 30, 50]) == ("Look.\n", [{"name": "bash", "arguments": '{"command": "ls'}])
