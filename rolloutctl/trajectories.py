"""A rollout as a list of steps, to be read by a person's own program: observation, thought, action, result, answer.

The names are those of agentic-rollout-library's `Trajectory`. Everything is derived from what is recorded.
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
    """What a step is."""

    OBSERVATION = "observation"
    """What the model was told that is no tool's result: system prompt, task, reminders."""
    THOUGHT = "thought"
    """What the model wrote beside its tool calls."""
    ACTION = "action"
    """A tool call."""
    ACTION_RESULT = "action_result"
    """Its result."""
    FINAL_ANSWER = "final_answer"
    """With it the agent finished."""


class TrajectoryStep(ApiModel):
    """One step."""

    model_config = ConfigDict(frozen=False)

    step_type: StepType
    content: str
    """As the model wrote or saw it; the arguments' JSON of a native tool call."""
    turn: int | None = None
    """The model call that it belongs to; None in a step that an agent made itself."""
    metadata: dict[str, Any] = {}
    """What an agent that made the step itself says about it."""
    tool_name: str | None = None
    tool_args: dict[str, Any] | None = None
    """None where the model wrote no JSON object; `content` has what it wrote."""
    tool_result: dict[str, Any] | None = None
    """What the tool has to say to machines, such as an exit code."""
    is_error: bool = False
    """The tool call failed."""
    log_probs: list[float] | None = None
    """Of the sampled tokens of the whole answer, on its first step."""

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
"""Role and first words of a step as a message."""


class Trajectory(ApiModel):
    """A rollout with its outcome."""

    model_config = ConfigDict(frozen=False)

    request_id: str
    """`<run's folder>/<rollout's index>`."""
    steps: list[TrajectoryStep] = Field(default=[])
    is_completed: bool = False
    """The policy's own end, whatever it was; False for what infrastructure lost, which is no training data."""
    final_reward: float | None = None
    """The verifier's; None where there is none, never 0 for a failure of infrastructure."""
    total_tokens: int = 0
    """Prompt and completion of all calls, as the server counted them."""
    tokens: list[Branch] = Field(default=[])
    """Ids, mask, logprobs and policy versions to train on, an entry a branch; empty where the model gave no ids."""
    metadata: dict[str, Any] = Field(default={})
    """The whole result: task, stop reason, usage, times."""

    def add_step(self, step: TrajectoryStep) -> None:
        """Add a step at the end."""
        self.steps.append(step)

    def get_messages(self) -> list[Message]:
        """Return all steps as chat messages."""
        return [step.to_message() for step in self.steps]

    def get_final_response(self) -> str:
        """The final answer; else what the model wrote last; else nothing."""
        written = (StepType.FINAL_ANSWER, StepType.THOUGHT, StepType.ACTION)
        answers = [step for step in self.steps if step.step_type is StepType.FINAL_ANSWER]
        last = answers or [step for step in self.steps if step.step_type in written]
        return last[-1].content if last else ""

    def get_tool_calls(self) -> list[TrajectoryStep]:
        """The tool calls in order."""
        return [step for step in self.steps if step.step_type is StepType.ACTION]

    def get_total_reward(self) -> float | None:
        """The reward of the whole rollout; None where it was not graded."""
        return self.final_reward

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return self.model_dump(mode="json", by_alias=False)

    def to_json(self, indent: int | None = None) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave. Raises pydantic's ValidationError."""
        return cls.model_validate(data)


async def read_trajectory(run: RunReader, index: int) -> Trajectory:
    """A sealed rollout of a run. Raises KeyError for one that is not sealed, RecordCorrupt."""
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
    """The steps of an attempt, in order, the final answer last. Several conversations stand one after another."""
    steps: list[TrajectoryStep] = []
    known: set[str] = set()
    answered: set[str] = set()
    names: dict[str, str] = {}
    told: list[Observation] = []
    branch = turn_number = 0
    for turn in fold(records):
        for message in turn.messages[turn.kept :]:
            # A new branch repeats what stood in an earlier one; within one, what is told twice was told twice.
            written = json.dumps(message, sort_keys=True)
            if (turn.branch != branch and written in known) or str(message.get("tool_call_id")) in answered:
                continue
            known.add(written)
            content = text_of(message.get("content"))
            # An agent that calls tools in text tells their results as the user; they are steps already.
            if told and message.get("role") == "user" and told[0].content in content:
                told = told[1:]
                continue
            steps.append(_told_step(message, content, turn.number, names))
        steps += _answer_steps(turn)
        message = turn.response.message if turn.response else {}
        known.add(json.dumps(message, sort_keys=True))
        names |= {call.id: call.name for call in ModelReply(message, "").tool_calls}
        answered |= {observation.call_id for observation in turn.observations}
        told = [] if message.get("tool_calls") else list(turn.observations)
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


def _told_step(message: Message, content: str, turn: int, names: Mapping[str, str]) -> TrajectoryStep:
    """What the model was told by no tool of ours; a program's own tools tell their results so."""
    if message.get("role") != "tool":
        return TrajectoryStep(step_type=StepType.OBSERVATION, content=content, turn=turn)
    name = names.get(str(message.get("tool_call_id")))
    return TrajectoryStep(step_type=StepType.ACTION_RESULT, content=content, turn=turn, tool_name=name)


def result_step(result: Observation, **fields: Any) -> TrajectoryStep:
    """A tool call's result as a step, with further fields of it."""
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
    """Text and tool calls of a message. A call in text is one where a tool answered it."""
    reply = ModelReply(message, "")
    text = text_of(message.get("content"))
    if reply.tool_calls or not results:
        return text, reply.tool_calls
    step = parse_step(text)
    if step.action is not None and [result.tool for result in results] == [step.action]:
        return step.thought, [ToolCall(results[0].call_id, step.action, step.action_input)]
    # A form of the agent's own: which tool was called is known from who answered.
    return "", [ToolCall(result.call_id, result.tool, text) for result in results]
