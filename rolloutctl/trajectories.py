"""A rollout as a list of steps: observation, thought, action, result, answer.

The names are those of agentic-rollout-library's `Trajectory`. All data comes from the record of the rollout.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

from pydantic import ConfigDict, Field

from agent_runtime.agents.react import parse_step
from agent_runtime.models.answers import decoded_object
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.recording.atif import text_of
from agent_runtime.recording.branches import Branch
from agent_runtime.recording.messages import Turn, fold
from agent_runtime.recording.reader import RunReader
from rollout_api.base import ApiModel
from rollout_api.records import Message, Observation, Outcome, Record, Result, StopReason


class StepType(StrEnum):
    """Type of a step."""

    OBSERVATION = "observation"
    """Input of the model other than tool results: system prompt, task, reminders."""
    THOUGHT = "thought"
    """Text of the model that is neither a tool call nor the final answer."""
    ACTION = "action"
    """A tool call."""
    ACTION_RESULT = "action_result"
    """Result of a tool call."""
    FINAL_ANSWER = "final_answer"
    """The agent's final answer."""


class TrajectoryStep(ApiModel):
    """One step."""

    model_config = ConfigDict(frozen=False)

    step_type: StepType
    content: str
    """Text as the model wrote or saw it; for a native tool call, its arguments as JSON."""
    turn: int | None = None
    """Turn of the model call that it belongs to; None for a step that an agent's own code added."""
    metadata: dict[str, Any] = {}
    """Metadata of a step that an agent's own code added."""
    tool_name: str | None = None
    tool_args: dict[str, Any] | None = None
    """Arguments of the call; None if the model wrote no JSON object. `content` has the original text."""
    tool_result: dict[str, Any] | None = None
    """Machine-readable output of the tool, such as an exit code."""
    is_error: bool = False
    """The tool call failed."""
    log_probs: list[float] | None = None
    """Log probabilities of all sampled tokens of the answer, on its first step."""

    def to_message(self) -> Message:
        """Return the step as a chat message, tool calls and results as text."""
        role, text = _MESSAGES[self.step_type]
        content = f"{self.tool_name}({self.tool_args})" if self.tool_name and role == "assistant" else self.content
        return {"role": role, "content": text + content}


_MESSAGES: Mapping[StepType, tuple[str, str]] = {
    StepType.OBSERVATION: ("user", ""),
    StepType.THOUGHT: ("assistant", "Thought: "),
    StepType.ACTION: ("assistant", "Action: "),
    StepType.ACTION_RESULT: ("user", "Observation: "),
    StepType.FINAL_ANSWER: ("assistant", ""),
}
"""Role and prefix of each step type as a message."""


class Trajectory(ApiModel):
    """A rollout with its outcome."""

    model_config = ConfigDict(frozen=False)

    request_id: str
    """`<run's folder>/<rollout's index>`."""
    steps: list[TrajectoryStep] = Field(default=[])
    is_completed: bool = False
    """Whether the policy ended the rollout, in any way; False if it was lost to infrastructure, which makes it useless
    for training.
    """
    final_reward: float | None = None
    """The verifier's reward; None without one, never 0 for an infrastructure failure."""
    total_tokens: int = 0
    """Prompt and completion of all calls, as the server counted them."""
    tokens: list[Branch] = Field(default=[])
    """Ids, mask, logprobs and policy versions for training, one entry for each branch; empty if the model gave no ids.
    """
    metadata: dict[str, Any] = Field(default={})
    """The whole result: task, stop reason, usage, times."""

    def add_step(self, step: TrajectoryStep) -> None:
        """Append a step."""
        self.steps.append(step)

    def get_messages(self) -> list[Message]:
        """Return all steps as chat messages."""
        return [step.to_message() for step in self.steps]

    def get_final_response(self) -> str:
        """Return the final answer, else the model's last text, else an empty string."""
        written = (StepType.FINAL_ANSWER, StepType.THOUGHT, StepType.ACTION)
        answers = [step for step in self.steps if step.step_type is StepType.FINAL_ANSWER]
        last = answers or [step for step in self.steps if step.step_type in written]
        return last[-1].content if last else ""

    def get_tool_calls(self) -> list[TrajectoryStep]:
        """Return the tool calls in order."""
        return [step for step in self.steps if step.step_type is StepType.ACTION]

    def get_total_reward(self) -> float | None:
        """Return the reward of the whole rollout; None if it was not graded."""
        return self.final_reward

    def to_dict(self) -> dict[str, Any]:
        """Return all data as JSON types."""
        return self.model_dump(mode="json", by_alias=False)

    def to_json(self, indent: int | None = None) -> str:
        """Return all data as JSON text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a trajectory from the result of `to_dict`. Raises pydantic's ValidationError."""
        return cls.model_validate(data)


async def read_trajectory(run: RunReader, index: int) -> Trajectory:
    """Read a sealed rollout of a run. Raises KeyError if it is not sealed, RecordCorrupt."""
    result = run.seals[index].result
    return Trajectory(
        request_id=f"{run.folder}/{index}",
        steps=steps_of(await run.records(index), result),
        is_completed=result.outcome is Outcome.COMPLETED,
        final_reward=result.reward,
        total_tokens=result.usage.prompt_tokens + result.usage.completion_tokens,
        tokens=await run.tokens(index),
        metadata=result.wire(),
    )


def steps_of(records: Sequence[Record], result: Result) -> list[TrajectoryStep]:
    """Return the steps of an attempt in order, the final answer last. Several conversations follow one another."""
    steps: list[TrajectoryStep] = []
    known: set[str] = set()
    answered: set[str] = set()
    names: dict[str, str] = {}
    pending: list[Observation] = []
    branch = turn_number = 0
    for turn in fold(records):
        for message in turn.messages[turn.kept :]:
            # A new branch repeats messages of an earlier one, which are skipped. Within a branch, an equal message was
            # sent twice and is kept.
            written = json.dumps(message, sort_keys=True)
            if (turn.branch != branch and written in known) or str(message.get("tool_call_id")) in answered:
                continue
            known.add(written)
            content = text_of(message.get("content"))
            # An agent with tool calls in text sends their results as user messages. These results are steps already.
            if pending and message.get("role") == "user" and pending[0].content in content:
                pending = pending[1:]
                continue
            steps.append(_message_step(message, content, turn.number, names))
        steps += _answer_steps(turn)
        message = turn.response.message if turn.response else {}
        known.add(json.dumps(message, sort_keys=True))
        names |= {call.id: call.name for call in ModelReply(message, "").tool_calls}
        answered |= {observation.call_id for observation in turn.observations}
        pending = [] if message.get("tool_calls") else list(turn.observations)
        branch, turn_number = turn.branch, turn.number
    return _with_final_answer(steps, result, turn_number)


def _with_final_answer(steps: list[TrajectoryStep], result: Result, turn: int) -> list[TrajectoryStep]:
    if result.stop_reason is not StopReason.FINISHED or not result.message:
        return steps
    answer = TrajectoryStep(step_type=StepType.FINAL_ANSWER, content=result.message, turn=turn)
    if not steps or steps[-1].step_type is not StepType.THOUGHT:
        return [*steps, answer]
    *before, last = steps
    parsed = parse_step(last.content)
    if parsed.final_answer == result.message and parsed.thought:
        return [*before, last.model_copy(update={"content": parsed.thought}), answer]
    if result.message in (last.content.strip(), last.content, parsed.final_answer):
        return [*before, answer.model_copy(update={"log_probs": last.log_probs})]
    return [*steps, answer]


def _message_step(message: Message, content: str, turn: int, names: Mapping[str, str]) -> TrajectoryStep:
    """Return the step of a message in a prompt. A message with role `tool` is a result of a program's own tool."""
    if message.get("role") != "tool":
        return TrajectoryStep(step_type=StepType.OBSERVATION, content=content, turn=turn)
    name = names.get(str(message.get("tool_call_id")))
    return TrajectoryStep(step_type=StepType.ACTION_RESULT, content=content, turn=turn, tool_name=name)


def result_step(result: Observation, **fields: Any) -> TrajectoryStep:
    """Return a tool call's result as a step with further fields."""
    return TrajectoryStep(
        step_type=StepType.ACTION_RESULT,
        content=result.content,
        tool_name=result.tool,
        tool_result=result.data,
        is_error=result.error,
        **fields,
    )


def _answer_steps(turn: Turn) -> list[TrajectoryStep]:
    if turn.response is None:
        return []
    text, calls = _parts(turn.response.message, turn.observations)
    steps = [TrajectoryStep(step_type=StepType.THOUGHT, content=text, turn=turn.number)] if text.strip() else []
    steps += [
        TrajectoryStep(
            step_type=StepType.ACTION,
            content=call.arguments,
            turn=turn.number,
            tool_name=call.name,
            tool_args=decoded_object(call.arguments),
        )
        for call in calls
    ]
    steps += [result_step(result, turn=turn.number) for result in turn.observations]
    if steps and turn.response.logprobs is not None:
        steps[0] = steps[0].model_copy(update={"log_probs": turn.response.logprobs})
    return steps


def _parts(message: Message, results: Sequence[Observation]) -> tuple[str, list[ToolCall]]:
    """Return text and tool calls of a message. If it has no native calls but results, its text is the call."""
    reply = ModelReply(message, "")
    text = text_of(message.get("content"))
    if reply.tool_calls or not results:
        return text, reply.tool_calls
    step = parse_step(text)
    if step.action is not None and [result.tool for result in results] == [step.action]:
        return step.thought, [ToolCall(results[0].call_id, step.action, step.action_input)]
    # The agent uses its own format. The results show which tools were called.
    return "", [ToolCall(result.call_id, result.tool, text) for result in results]
