"""The loop that most agents share, cut into hooks: override the one that differs.

One instance works on one attempt. The loop is `run_trajectory`; it asks the model with what `format_messages_for_llm`
returns, has `parse_llm_output` read the answer, and runs tool calls by `execute_tool_call`.

A conversation that has grown too long loses its oldest turns, or all of them for a summary. The next call's messages do not
extend the last one's then, so a new branch begins: nothing is trained on a context that the model did not have.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.agents.base import AgentContext, Stop
from agent_runtime.models.answers import answer_message
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.tools.base import Tool
from agent_runtime.tools.dispatch import FORMAT_ERROR
from agent_runtime.tools.schema import openai_definition
from rollout_api.records import Message, Observation, StopReason
from rollout_api.rollout_job import ContextLimit, ContextMethod

KEPT_FRACTION = 0.5
"""Of the limit that is left after a cut. A cut begins a branch and costs the server's prefix cache, so it should last."""
LEFT_OUT = "[Earlier messages were left out here to save space.]"
SUMMARISE = (
    "The conversation has become too long and will go on without its earlier messages. Call no tool now. Write down all "
    "that is needed to go on with the task: what was asked, what was found out and done so far, what is left to do, and "
    "the names of files, commands and values that matter."
)
SUMMARY = "Earlier messages were left out. This is your own summary of them:\n\n{summary}\n\nGo on with the task."


@dataclass(frozen=True)
class Size:
    """How long a conversation is. `tokens` are the server's count for its latest call and answer; 0 where it gives none."""

    messages: int
    tokens: int


def is_over(limit: ContextLimit, size: Size) -> bool:
    """Whether something has to go before the next call."""
    if limit.max_messages is not None:
        return size.messages > limit.max_messages
    return limit.max_tokens is not None and size.tokens > limit.max_tokens


def truncated(limit: ContextLimit, messages: Sequence[Message], head: int, tokens: int) -> list[Message]:
    """The first `head` messages, a note, and as many of the latest whole turns as half the limit has room for.

    A turn is an answer with what followed it, so that no result stands without its call. The latest turn always stays. The
    same messages where there is nothing to leave out.
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
    """The first `head` messages, and the summary in place of all others."""
    return [*messages[:head], {"role": "user", "content": SUMMARY.format(summary=summary)}]


def _fits(limit: ContextLimit, lengths: Sequence[int], head: int, start: int, tokens: int) -> bool:
    if limit.max_messages is not None:
        return head + 1 + len(lengths) - start <= limit.max_messages * KEPT_FRACTION
    # The server counts whole prompts alone: a part of one has its share by the length of its text.
    share = (sum(lengths[:head]) + sum(lengths[start:])) / sum(lengths)
    return share * tokens <= (limit.max_tokens or 0) * KEPT_FRACTION


EMPTY_REMINDER = "Your answer was empty. Call a tool, or give your final answer as text."
CUT_OFF = "Your answer was cut off at its token limit inside of this call. Send a shorter call, or split the work."


@dataclass(frozen=True)
class ParsedAnswer:
    """What an answer of the model asks for: tool calls, or the end (`final`), or neither.

    `complaint` tells the model what was wrong with the form of its answer; an answer that has nothing at all is empty.
    """

    calls: Sequence[ToolCall] = ()
    final: str | None = None
    complaint: str | None = None
    cut_off: bool = False
    """The answer ended at its token limit, so its last call may be incomplete."""

    @property
    def is_empty(self) -> bool:
        return not self.calls and self.final is None and self.complaint is None


@dataclass
class Trajectory:
    """Where an agent is: all of it follows from what its context returned."""

    messages: list[Message] = field(default_factory=list)
    final: str | None = None
    format_errors: int = 0
    """Malformed answers in a row."""
    empty_answers: int = 0
    """Empty answers in a row."""
    head: int = 0
    """Messages at the start that are never left out."""
    tokens: int = 0
    """Of the latest call and its answer, as the server counts them; 0 until there is one, and after a cut."""


class BaseAgent:
    """An agent that calls the model and its tools in turn until the model gives a final answer."""

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
        """Choose the tools that the model is offered; all of the manifest here."""
        self.tools = tools
        self.definitions = [openai_definition(tool) for tool in tools.values()]

    def initial_messages(self) -> list[Message]:
        """What the conversation starts with: the system prompt, if there is one, and the task."""
        prompt = self.context.spec.system_prompt
        system = self.system_prompt if prompt is None else prompt
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": self.context.task.prompt}]

    async def run_trajectory(self, trajectory: Trajectory) -> None:
        """The loop. Raises Stop with ToolFormat, EmptyAnswer or ContentFilter, and what the context raises."""
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
        """Whether to ask the model once more; budgets are the context's to keep."""
        return trajectory.final is None

    async def manage_context(self, trajectory: Trajectory) -> None:
        """Before each call: shorten a conversation that is over `agent.context`, by what that names."""
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
            # Asked for, or the model wrote no summary.
            trajectory.messages = truncated(limit, trajectory.messages, trajectory.head, trajectory.tokens)
        trajectory.tokens = 0

    def format_messages_for_llm(self, trajectory: Trajectory) -> Sequence[Message]:
        """What is sent. Leaving messages out, or changing them, starts a new branch of the recorded token sequence."""
        return trajectory.messages

    def tool_definitions(self, trajectory: Trajectory) -> Sequence[Mapping[str, Any]]:
        """Tool definitions that are sent, in OpenAI's form."""
        return self.definitions

    def parse_llm_output(self, reply: ModelReply) -> ParsedAnswer:
        """Read an answer: its tool calls, else its text as the final answer."""
        if reply.tool_calls:
            return ParsedAnswer(calls=reply.tool_calls, cut_off=reply.finish_reason == "length")
        # OpenAI's servers put a refusal of the model itself beside the content.
        text = reply.text or str(reply.message.get("refusal") or "")
        return ParsedAnswer(final=text) if text.strip() else ParsedAnswer()

    async def execute_tool_call(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Run the tool calls of one answer, side by side."""
        return await self.context.call_tools(calls)

    def observation_message(self, call: ToolCall, observation: Observation) -> Message:
        """How the model is told the result of a call."""
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
