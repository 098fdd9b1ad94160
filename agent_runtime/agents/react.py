"""The agent for models without native tool calls: Thought, Action and Action Input as text."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.agents.base_class import BaseAgent, ParsedAnswer, Trajectory
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.tools.base import Tool
from rollout_api.records import Message, Observation

FORM = """\
Thought: what you think
Action: the name of one tool
Action Input: its arguments as one JSON object

You then get the result as an Observation. When you are done, answer instead:

Thought: what you think
Final Answer: your answer"""

COMPLAINT = (
    f"Your answer has neither an Action nor a Final Answer. Answer in this form, one action at a time:\n\n{FORM}"
)

# A label at the start of a line, in any case. Models often add Markdown: **Action:** `bash`
_LABEL = re.compile(
    r"^[ \t>*_#`-]*(thought|action[ \t_]*input|action|final[ \t_]*answer|observation)[ \t*_`]*:[ \t*_]*",
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(r"^```[\w-]*[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class ReActStep:
    """One answer: `action` with the unchanged `action_input`, or `final_answer`, or neither."""

    thought: str = ""
    action: str | None = None
    action_input: str = ""
    final_answer: str | None = None


def parse_step(text: str) -> ReActStep:
    """Parse an answer. The first action or final answer counts. An observation in the answer was invented by the model,
    and is dropped with everything after it.
    """
    labels = list(_LABEL.finditer(text))
    if not labels:
        return ReActStep(text.strip())
    ends = [label.start() for label in labels[1:]] + [len(text)]
    parts = [(_name(label), text[label.end() : end].strip()) for label, end in zip(labels, ends, strict=True)]
    thought = text[: labels[0].start()].strip()
    for position, (name, value) in enumerate(parts):
        if name == "observation":
            break
        if name == "thought":
            thought = value
        elif name == "finalanswer":
            # A final answer includes all following lines, even if they look like labels.
            return ReActStep(thought, final_answer=text[labels[position].end() :].strip())
        elif name == "action":
            if call := _json_call(_input_text(text, labels[position])):
                return ReActStep(thought, action=call[0], action_input=call[1])
            follows = parts[position + 1] if position + 1 < len(parts) else ("", "")
            argument = _input_text(text, labels[position + 1]) if follows[0] == "actioninput" else ""
            tool = value.partition("\n")[0].strip("`*[]\"' \t")
            return ReActStep(thought, action=tool or None, action_input=argument)
    return ReActStep(thought)


def _name(label: re.Match[str]) -> str:
    return re.sub(r"[ \t_]", "", label[1]).lower()


def _json_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of an action that is a single JSON object, as some models write it."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
    return (name, json.dumps(call.get("parameters", call.get("arguments", {})))) if isinstance(name, str) else None


def _input_text(text: str, label: re.Match[str]) -> str:
    """Return the text of an Action Input: one JSON object if it starts with one, else everything up to the next label."""
    rest = text[label.end() :].lstrip()
    if fence := _FENCE.match(rest):
        rest = fence[1].strip()
    if rest.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return rest[: json.JSONDecoder(strict=False).raw_decode(rest)[1]]
    next_label = _LABEL.search(rest)
    return rest[: next_label.start()].strip() if next_label else rest.strip()


def call_arguments(action_input: str, parameters: Mapping[str, Any]) -> str:
    """Return a call's arguments as JSON. Plain text becomes the tool's only required argument, if that is a text."""
    required = parameters.get("required", [])
    properties = parameters.get("properties", {})
    try:
        decoded = json.loads(action_input, strict=False)
    except (ValueError, RecursionError):
        looks_like_json = action_input.startswith("{")
        decoded = action_input
    else:
        looks_like_json = isinstance(decoded, dict)
    if looks_like_json or not action_input or len(required) != 1:
        return action_input
    if properties.get(required[0], {}).get("type") != "string":
        return action_input
    return json.dumps({required[0]: decoded if isinstance(decoded, str) else action_input})


class ReAct(BaseAgent):
    """Repeats Thought, Action, Action Input and Observation until a Final Answer.

    Setting `sampling.stop` to "\\nObservation:" keeps models from writing observations themselves.
    """

    system_prompt = "You work on a task with tools."

    def initial_messages(self) -> list[Message]:
        """Return the base class's messages. The system prompt also describes the tools and the answer format."""
        messages = super().initial_messages()
        protocol = f"Tools:\n{describe(self.tools)}\n\nAnswer in this form, one action at a time:\n\n{FORM}"
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": protocol}, *messages]
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{protocol}"}, *messages[1:]]

    def tool_definitions(self, trajectory: Trajectory) -> Sequence[Mapping[str, Any]]:
        """Return None: tools are called in text."""
        return []

    def parse_llm_output(self, reply: ModelReply) -> ParsedAnswer:
        if not reply.text.strip():
            return ParsedAnswer()
        step = parse_step(reply.text)
        if step.final_answer is not None:
            return ParsedAnswer(final=step.final_answer)
        if step.action is None:
            return ParsedAnswer(complaint=COMPLAINT)
        tool = self.tools.get(step.action)
        arguments = call_arguments(step.action_input, tool.parameters if tool else {})
        return ParsedAnswer([ToolCall("action", step.action, arguments)], cut_off=reply.finish_reason == "length")

    def observation_message(self, call: ToolCall, observation: Observation) -> Message:
        """Return the result as a user's message."""
        return {"role": "user", "content": f"Observation: {observation.content}"}


def describe(tools: Mapping[str, Tool]) -> str:
    """Return names, descriptions and arguments of tools, one tool per line."""
    return "\n".join(
        f"- {tool.name}: {tool.description} Arguments, as a JSON schema: {json.dumps(tool.parameters)}"
        for tool in tools.values()
    )
