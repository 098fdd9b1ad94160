"""One conversation of an attempt with the model, and the sub-agent that holds one: what is new in its next call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_runtime.agents.base import Agent, AgentReport, Stop, SubTask
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.recording.token_history import TokenHistory, common_length
from agent_runtime.tools.base import Tool
from agent_runtime.tools.schema import openai_definition
from rollout_api.records import IntentRecord, Message, Observation, StopReason

if TYPE_CHECKING:
    from agent_runtime.engine.attempt.turns import Turns


class Conversation:
    """Its messages up to the latest answer, and the ids that the engine has seen of them."""

    def __init__(self) -> None:
        self.tokens = TokenHistory()
        self._id: int | None = None
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] | None = None
        self._asked: tuple[int, list[Message], list[dict[str, Any]]] = -1, [], []
        """The latest call. No call follows it before it is answered, because an agent may give a call up."""
        self.turn: int | None = None
        """Its latest answered turn."""

    def intent(self, turn: int, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> IntentRecord:
        """The record of its next call, which is turn `turn` of the attempt."""
        # Copies: agents may change what they passed, and a changed message has to differ from the one before.
        sent: list[Message] = _copied(messages)
        definitions: list[dict[str, Any]] = _copied(tools)
        keep = common_length(self._messages, sent)
        same_tools = definitions == self._tools
        self.tokens.keep_messages(keep if same_tools else 0)
        if self._id is None:
            self._id = turn
        record = IntentRecord(
            turn=turn,
            time=time.time(),
            conversation=self._id,
            parent=self.turn,
            keep=keep,
            messages=sent[keep:],
            tools=None if same_tools else definitions,
        )
        self._asked = turn, sent, definitions
        return record

    def unrecorded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Those behind the ones that its latest answered call has in common with `messages`."""
        return messages[common_length(self._messages, messages) :]

    def answered(self, message: Message) -> int:
        """Take the answer in; how many messages there are now."""
        self.turn, self._messages, self._tools = self._asked
        self._messages.append(_copied(message))
        return len(self._messages)


def _copied(value: Any) -> Any:
    """A copy of the value as the journal returns it: tuples become lists."""
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


class SubAgent:
    """Implements `AgentContext` for it. Its turns count for the attempt's budgets, and stand in the attempt's journal."""

    def __init__(self, turns: Turns, conversation: Conversation, part: SubTask) -> None:
        names = turns.tools if part.tools is None else part.tools
        if unknown := [name for name in names if name not in turns.tools]:
            raise ValueError(
                f"sub-agent: there is no tool {', '.join(unknown)} in this job; it has {', '.join(turns.tools) or 'none'}"
            )
        self.task = turns.task.model_copy(update={"prompt": part.prompt})
        changes = {"system_prompt": part.system_prompt, "max_turns": part.max_turns or turns.spec.max_turns}
        self.spec = turns.spec.model_copy(update=changes)
        self.working_dir = turns.working_dir
        self.tools: Mapping[str, Tool] = {name: turns.tools[name] for name in names}
        self._definitions = [openai_definition(tool) for tool in self.tools.values()]
        self._turns, self._conversation = turns, conversation
        self._calls = 0
        # As the attempt's own agent has them.
        self.run_command, self.put_files = turns.run_command, turns.put_files
        self.snapshot, self.checkpoint, self.go_back = turns.snapshot, turns.checkpoint, turns.go_back

    async def run(self, agent: Agent) -> AgentReport:
        """Run it to its end. What ends the attempt is raised."""
        try:
            return AgentReport(StopReason.FINISHED, await agent.run(self) or "")
        except Stop as stop:
            if self._turns.fault is not None:
                raise
            return AgentReport(stop.reason, stop.message)

    async def call_model(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelReply:
        """See AgentContext."""
        if self._calls >= self.spec.max_turns:
            raise Stop(StopReason.MAX_TURNS)
        self._calls += 1
        definitions = self._definitions if tools is None else tools
        return await self._turns.call_model(messages, definitions, conversation=self._conversation)

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """See AgentContext. A tool that ends the rollout ends this agent alone."""
        observations = await self._turns.call_tools(calls, conversation=self._conversation, tools=self.tools)
        for observation in observations:
            if observation.stop:
                raise Stop(StopReason.FINISHED, observation.content)
        return observations

    async def delegate(self, agent: Agent, part: SubTask) -> AgentReport:
        """See AgentContext."""
        return await self._turns.delegate(agent, part, conversation=self._conversation)
