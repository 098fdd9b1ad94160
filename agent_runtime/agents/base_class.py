"""The loop that most agents share, split into methods that can be overridden.

One instance works on one attempt. The loop is `run_trajectory`; it sends the model the result of
`format_messages_for_llm`, parses the answer with `parse_llm_output`, and runs tool calls with `execute_tool_call`.

If a conversation is too long, its oldest turns are dropped, or a summary replaces all of them. The next call then
starts a new branch, because its messages do not extend those of the previous call. So tokens are only trained on with
the context in which they were sampled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.agents.base import AgentContext, Stop
from agent_runtime.models.answers import answer_message
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.tools.base import FORMAT_ERROR, Tool, openai_definition
from rollout_api.records import Message, Observation, StopReason
from rollout_api.rollout_job import ContextLimit, ContextMethod

KEPT_FRACTION = 0.5
"""Fraction of the limit to which a conversation is cut. Each cut begins a branch and loses the server's prefix cache,
so cuts should be rare.
"""
LEFT_OUT = "[Earlier messages were left out here to save space.]"
SUMMARISE = (
    "The conversation has become too long and will go on without its earlier messages. Call no tool now. Write "
    "down all "
    "that is needed to go on with the task: what was asked, what was found out and done so far, what is left to "
    "do, and "
    "the names of files, commands and values that matter."
)
SUMMARY = "Earlier messages were left out. This is your own summary of them:\n\n{summary}\n\nGo on with the task."


@dataclass(frozen=True)
class Size:
    """Length of a conversation. `tokens` is the server's count for its latest call and answer; 0 if it gives none."""

    messages: int
    tokens: int


def is_over(limit: ContextLimit, size: Size) -> bool:
    """Whether the conversation must be shortened before the next call."""
    if limit.max_messages is not None:
        return size.messages > limit.max_messages
    return limit.max_tokens is not None and size.tokens > limit.max_tokens


def truncated(limit: ContextLimit, messages: Sequence[Message], head: int, tokens: int) -> list[Message]:
    """Return the first `head` messages, a note, and as many of the latest whole turns as fit in half the limit.

    A turn is an answer and the messages after it, so that results follow their calls. The latest turn is always kept.
    If everything fits, return the same messages.
    """
    starts = [position for position in range(head, len(messages)) if messages[position].get("role") == "assistant"]
    kept = starts[-1:]
    lengths = [len(json.dumps(message, default=str)) for message in messages]
    for start in reversed(starts[:-1]):
        if not _fits(limit, lengths, head, start, tokens):
            break
        kept = [start]
    if not kept or kept[0] <= head:
        return list(messages)
    return [*messages[:head], {"role": "user", "content": LEFT_OUT}, *messages[kept[0] :]]


def summarised(messages: Sequence[Message], head: int, summary: str) -> list[Message]:
    """Return the first `head` messages, and the summary instead of all others."""
    return [*messages[:head], {"role": "user", "content": SUMMARY.format(summary=summary)}]


def _fits(limit: ContextLimit, lengths: Sequence[int], head: int, start: int, tokens: int) -> bool:
    if limit.max_messages is not None:
        return head + 1 + len(lengths) - start <= limit.max_messages * KEPT_FRACTION
    # The server only counts whole prompts. Estimate a part's tokens by its share of the text.
    share = (sum(lengths[:head]) + sum(lengths[start:])) / sum(lengths)
    return share * tokens <= (limit.max_tokens or 0) * KEPT_FRACTION


EMPTY_REMINDER = "Your answer was empty. Call a tool, or give your final answer as text."
CUT_OFF = "Your answer was cut off at its token limit inside of this call. Send a shorter call, or split the work."


@dataclass(frozen=True)
class ParsedAnswer:
    """The contents of a model's answer: tool calls, or the end (`final`), or neither.

    `complaint` explains a format error to the model. An answer without any content is empty.
    """

    calls: Sequence[ToolCall] = ()
    final: str | None = None
    complaint: str | None = None
    cut_off: bool = False
    """The answer reached its token limit, so that its last call may be incomplete."""

    @property
    def is_empty(self) -> bool:
        return not self.calls and self.final is None and self.complaint is None


@dataclass
class Trajectory:
    """An agent's state, which derives from its context's results."""

    messages: list[Message] = field(default_factory=list)
    final: str | None = None
    format_errors: int = 0
    """Consecutive malformed answers."""
    empty_answers: int = 0
    """Consecutive empty answers."""
    head: int = 0
    """Number of first messages that are never left out."""
    tokens: int = 0
    """Tokens of the latest call and its answer, by the server's count; 0 before the first call and after a cut."""


class BaseAgent:
    """An agent that alternates between model and tool calls until the model gives a final answer."""

    system_prompt = "You work on a task with the tools that you are given. When you are done, give your final answer."
    tools: Mapping[str, Tool]

    async def run(self, context: AgentContext) -> str | None:
        """Work until done; see `Agent.run`."""
        self.context = context
        self.set_tools(context.tools)
        messages = self.initial_messages()
        trajectory = Trajectory(messages, head=len(messages))
        await self.run_trajectory(trajectory)
        return self.finalize_trajectory(trajectory)

    def set_tools(self, tools: Mapping[str, Tool]) -> None:
        """Select the tools for the model. Default: all tools of the manifest."""
        self.tools = tools
        self.definitions = [openai_definition(tool) for tool in tools.values()]

    def initial_messages(self) -> list[Message]:
        """Return the first messages: the system prompt, if there is one, and the task."""
        prompt = self.context.spec.system_prompt
        system = self.system_prompt if prompt is None else prompt
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": self.context.task.prompt}]

    async def run_trajectory(self, trajectory: Trajectory) -> None:
        """Run the loop. Raises Stop with ToolFormat, EmptyAnswer or ContentFilter, and errors of the context."""
        while self.should_continue(trajectory):
            await self.manage_context(trajectory)
            reply = await self.context.call_model(
                self.format_messages_for_llm(trajectory), self.tool_definitions(trajectory)
            )
            if reply.finish_reason == "content_filter":
                raise Stop(StopReason.CONTENT_FILTER, "the server's content filter ended the answer")
            answer = self.parse_llm_output(reply)
            trajectory.messages.append(answer_message(reply))
            trajectory.tokens = reply.usage.prompt_tokens + reply.usage.completion_tokens
            await self._act(trajectory, answer)

    def should_continue(self, trajectory: Trajectory) -> bool:
        """Whether to call the model again. The context enforces budgets."""
        return trajectory.final is None

    async def manage_context(self, trajectory: Trajectory) -> None:
        """Shorten a conversation that exceeds `agent.context`. Called before each model call."""
        limit = self.context.spec.context
        if limit is None or not is_over(limit, Size(len(trajectory.messages), trajectory.tokens)):
            return
        summary = ""
        if limit.method is ContextMethod.SUMMARIZE:
            asked = [*self.format_messages_for_llm(trajectory), {"role": "user", "content": SUMMARISE}]
            reply = await self.context.call_model(asked, self.tool_definitions(trajectory))
            summary = reply.text.strip()
        if summary:
            trajectory.messages = summarised(trajectory.messages, trajectory.head, summary)
        else:
            # The method is Truncate, or the model wrote no summary.
            trajectory.messages = truncated(limit, trajectory.messages, trajectory.head, trajectory.tokens)
        trajectory.tokens = 0

    def format_messages_for_llm(self, trajectory: Trajectory) -> Sequence[Message]:
        """Return the messages to send. Leaving out or changing messages starts a new branch of the recorded token
        sequence.
        """
        return trajectory.messages

    def tool_definitions(self, trajectory: Trajectory) -> Sequence[Mapping[str, Any]]:
        """Return the tool definitions to send, in OpenAI's format."""
        return self.definitions

    def parse_llm_output(self, reply: ModelReply) -> ParsedAnswer:
        """Parse an answer: its tool calls, or its text as the final answer."""
        if reply.tool_calls:
            return ParsedAnswer(calls=reply.tool_calls, cut_off=reply.finish_reason == "length")
        # OpenAI's servers return the model's own refusal in a separate field next to the content.
        text = reply.text or str(reply.message.get("refusal") or "")
        return ParsedAnswer(final=text) if text.strip() else ParsedAnswer()

    async def execute_tool_call(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Run the tool calls of one answer concurrently."""
        return await self.context.call_tools(calls)

    def observation_message(self, call: ToolCall, observation: Observation) -> Message:
        """Return the message that reports a call's result to the model."""
        return {"role": "tool", "tool_call_id": call.id, "content": observation.content}

    def finalize_trajectory(self, trajectory: Trajectory) -> str | None:
        return trajectory.final

    async def _act(self, trajectory: Trajectory, answer: ParsedAnswer) -> None:
        if answer.is_empty:
            trajectory.empty_answers += 1
            if trajectory.empty_answers > 1:
                raise Stop(StopReason.EMPTY_ANSWER, "the model answered with nothing, again after a reminder")
            trajectory.messages.append({"role": "user", "content": EMPTY_REMINDER})
            return
        trajectory.empty_answers = 0
        malformed = answer.complaint is not None
        if answer.calls:
            observations = list(await self.execute_tool_call(answer.calls))
            malformed = all(FORMAT_ERROR in observation.data for observation in observations)
            if answer.cut_off and FORMAT_ERROR in observations[-1].data:
                explained = f"{CUT_OFF}\n{observations[-1].content}"
                observations[-1] = observations[-1].model_copy(update={"content": explained})
            trajectory.messages.extend(map(self.observation_message, answer.calls, observations))
        elif answer.complaint is not None:
            trajectory.messages.append({"role": "user", "content": answer.complaint})
        trajectory.format_errors = trajectory.format_errors + 1 if malformed else 0
        if trajectory.format_errors >= self.context.spec.max_format_errors:
            last = trajectory.messages[-1]["content"]
            raise Stop(
                StopReason.TOOL_FORMAT, f"{trajectory.format_errors} malformed answers in a row; the last: {last}"
            )
        trajectory.final = answer.final
