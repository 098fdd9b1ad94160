"""A user's extensions for verl: an agent, and a tool of verl's kind."""

from collections.abc import Sequence
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from agent_runtime.agents.base_class import Trajectory
from agent_runtime.agents.tool_calling import ToolCalling
from rollout_api.records import Message

FORGETS_AFTER = 1
"""Answers after which the agent drops the conversation, in tasks whose prompt says so."""


class Forgetful(ToolCalling):
    """Starts again in the middle of some tasks, so that their rollouts have two branches."""

    def format_messages_for_llm(self, trajectory: Trajectory) -> Sequence[Message]:
        answers = sum(message["role"] == "assistant" for message in trajectory.messages)
        if "FORGET" not in self.context.task.prompt or answers < FORGETS_AFTER:
            return trajectory.messages
        return [*trajectory.messages[:2], {"role": "user", "content": "Finish now."}]


class Lookup(BaseTool):
    """Returns the word in the row's `tools_kwargs`."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._words: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance, response = await super().create(instance_id)
        self._words[instance] = kwargs["create_kwargs"]["word"]
        return instance, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        text = f"{self.config['greeting']} {parameters['name']}, the word is {self._words[instance_id]}."
        return ToolResponse(text=text), 0.25, {"asked": 1}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._words[instance_id]
