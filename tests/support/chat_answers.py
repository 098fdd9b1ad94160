"""Hypothesis strategies for answers of a model and the messages between them."""

import json
from typing import Any

from hypothesis import strategies as st

from agent_runtime.models.base import ModelReply
from rollout_api.records import Message, Usage

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3)


@st.composite
def written_arguments(draw: st.DrawFn) -> str:
    """Arguments as models write them: any spacing, any escapes, and sometimes invalid JSON."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(["", "{", '{"a": 1', "[1]", "null", '{"a":}', "rm -rf"]))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    indent = draw(st.sampled_from([None, 2]))
    return json.dumps(draw(OBJECTS), separators=separators, indent=indent, ensure_ascii=draw(st.booleans()))


@st.composite
def answers(draw: st.DrawFn, turn: int = 0) -> Message:
    """Assistant messages of one answer, as a server returns them."""
    message: Message = {"role": "assistant", "content": draw(st.none() | st.text(max_size=20))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(st.text(min_size=1, max_size=20))
    arguments = draw(st.lists(written_arguments(), max_size=3))
    if arguments:
        message["tool_calls"] = [
            {"id": f"call_{turn}_{i}", "type": "function", "function": {"name": "run", "arguments": text}}
            for i, text in enumerate(arguments)
        ]
    return message


def reply(message: Message, **fields: Any) -> ModelReply:
    """Return a reply with counts of tokens."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    usage = Usage(prompt_tokens=11, completion_tokens=5, cached_tokens=3)
    given: dict[str, Any] = {"message": message, "finish_reason": reason, "model": "m", "usage": usage}
    return ModelReply(**given | fields)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[Message], Message]]:
    """Turns: the messages before each answer, first the results of all calls of the previous answer, and the answer."""
    turns: list[tuple[list[Message], Message]] = []
    said: list[Message] = [{"role": "system", "content": "Be good."}] if draw(st.booleans()) else []
    said.append({"role": "user", "content": draw(st.text(min_size=1, max_size=10))})
    for turn in range(draw(st.integers(2, 4))):
        answer = draw(answers(turn))
        turns.append((said, answer))
        said = [
            {"role": "tool", "content": draw(st.text(max_size=10)), "tool_call_id": call["id"]}
            for call in answer.get("tool_calls", [])
        ]
        if not said or draw(st.booleans()):
            said.append({"role": "user", "content": draw(st.text(min_size=1, max_size=10))})
    return turns
