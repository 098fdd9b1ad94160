"""Time for what a policy writes grows with its length, and not with the square of it: or else a policy could stop its runner
for hours.
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.agents.react import parse_step
from agent_runtime.environments.answers import AnswerForm
from agent_runtime.grading.junit import ReportedTest, _without_folders, judge_named
from agent_runtime.models.token_exact.answer_text import TextStream, _certain_thought
from agent_runtime.models.token_exact.prefix import find_seam, have_same_text
from agent_runtime.plugins.safety_filter import simple_commands
from agent_runtime.proxy.protocols.anthropic_messages import AnthropicMessages
from agent_runtime.proxy.protocols.google_gemini import GoogleGemini
from agent_runtime.proxy.protocols.openai_chat import OpenAIChat
from agent_runtime.recording.program_trajectory import to_atif

TIMES = 8
"""How many times larger the large case is. Quadratic work would take 64 times as long."""
MOST_TIMES = 28
LEAST_SECONDS = 0.004
"""Time of the small case, from which on it is measured well."""


def seconds(work: Callable[[int], object], size: int) -> float:
    """Return the processor time of this thread, without disturbances."""

    def once() -> float:
        began = time.thread_time()
        work(size)
        return time.thread_time() - began

    return min(once() for _ in range(3))


def gemini(size: int) -> Mapping[str, Any]:
    calls = [{"functionCall": {"name": "a", **({"id": f"id-{n}"} if n % 2 else {})}} for n in range(size)]
    results: list[dict[str, Any]] = [{"functionResponse": {"name": "a", "response": {}}}] * (size // 2)
    results += [
        {"functionResponse": {"name": "a", "id": f"id-{n}", "response": {}}} for n in range(size, 0, -1) if n % 2
    ]
    unknown = [{"functionResponse": {"name": "b", "response": {}}}] * size
    contents = [("user", [{"text": "a"}]), ("model", calls), ("user", [*results, *unknown])]
    return {"model": "m", "contents": [{"role": role, "parts": parts} for role, parts in contents]}


def anthropic(size: int) -> Mapping[str, Any]:
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "x", "input": {}} for n in range(size)]
    results = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "a"} for n in range(size, 0, -1)]
    turns = [("user", "a"), ("assistant", calls), ("user", results[1:])]
    return {"model": "m", "max_tokens": 5, "messages": [{"role": role, "content": content} for role, content in turns]}


def chat(size: int) -> Mapping[str, Any]:
    calls = [{"id": f"t{n}", "type": "function", "function": {"name": "x", "arguments": "{}"}} for n in range(size)]
    results = [{"role": "tool", "tool_call_id": f"t{n}", "content": "a"} for n in reversed(range(size))]
    assistant = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"model": "m", "messages": [{"role": "user", "content": "a"}, assistant, *results]}


def trajectory(form: str, size: int) -> bytes:
    match form:
        case "Qwen":
            calls = b",".join([b'{"functionCall":{}}'] * size)
            return b'{"sessionId":"s","type":"assistant","message":{"parts":[' + calls + b"]}}"
        case "Codex":
            calls = b"\n".join([b'{"type":"response_item","payload":{"type":"_call"}}'] * size)
            return b'{"type":"session_meta","payload":{}}\n' + calls
    calls = b",".join([b"{}"] * size)
    return b'{"projectHash":"","sessionId":"s","messages":[{"type":"gemini","id":"1","toolCalls":[' + calls + b"]}]}"


def thought(size: int) -> None:
    TextStream(lambda piece: None, tools=True).offer("", "so" + " " * size + "on <" + "<" * size)


WORK: dict[str, Callable[[int], object]] = {
    "names of tests": lambda size: judge_named([ReportedTest("c", "[/a" * size, None, True)], ["one"]),
    "blanks in reasoning": thought,
    "half characters": lambda size: have_same_text("a" + "\ufffd" * size + "b", "a", (), "</end>"),
    "ends of turns": lambda size: find_seam([1, 2] * size + [3], [1, 2] * size + [4], 2),
    "blanks in an action": lambda size: AnswerForm.of(r"<answer>(.*?)\s*</answer>").action(
        "<answer>" + "\n" * size + "x"
    ),
    "lines of ReAct": lambda size: parse_step("Thought" + " " * size + "\n" + "action\n" * size + ">" * size),
    "commands": lambda size: list(simple_commands("a <<E\n" * size + "'" + " " * size)),
    "calls of Gemini": lambda size: GoogleGemini().parse(gemini(size), lambda id: None),
    "calls of Anthropic": lambda size: AnthropicMessages().parse(anthropic(size), lambda id: None),
    "calls of Chat": lambda size: OpenAIChat().parse(chat(size), lambda id: None),
    "session of Qwen": lambda size: to_atif(trajectory("Qwen", size), None, "s"),
    "session of Codex": lambda size: to_atif(trajectory("Codex", size), None, "s"),
    "session of Gemini": lambda size: to_atif(trajectory("Gemini", size), None, "s"),
}


@pytest.mark.parametrize("name", WORK)
def test_time_grows_with_the_length(name: str) -> None:
    work, size = WORK[name], 256
    while seconds(work, size) < LEAST_SECONDS and size < 1 << 18:
        size *= 2
    # Other processes of a busy machine slow down its caches, in one of the two measurements or in both.
    ratios = (seconds(work, TIMES * size) / max(seconds(work, size), LEAST_SECONDS) for _ in range(3))
    assert any(ratio < MOST_TIMES for ratio in ratios)


@given(st.text(alphabet="[]/*a \n", max_size=20))
def test_paths_in_names_are_shortened_as_by_the_harness(name: str) -> None:
    assert _without_folders(name) == re.sub(r"(?<!\])\[/(?!/)[^*]*/([^/*]*)\]\Z", r"[/\1]", name)


@given(st.text(alphabet="<[a \n", max_size=80))
def test_end_of_unfinished_reasoning_is_held_back(text: str) -> None:
    assert _certain_thought(text) == re.sub(r"\s*([<\[][^<\[]{0,32})?\Z", "", text)
