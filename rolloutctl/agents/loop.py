"""Parts of GeneralAgent: tool calls in a user-defined format, and logging.

Logging uses agentic-rollout-library's environment variables.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.agents.base import Agent, AgentContext
from agent_runtime.agents.base_class import BaseAgent, ParsedAnswer
from agent_runtime.agents.react import ReAct
from agent_runtime.models.base import ModelReply, ToolCall
from rollout_api.records import Message

ActionParser = Callable[[str], Mapping[str, Any] | None]
"""Maps an answer's text to `{"tool_name": ..., "tool_args": {...}}`, or to None if it has no action."""

NO_ACTION = "Your answer contains no valid action. Answer in the required format."

logger = logging.getLogger("rolloutctl.agents")


class ParsedActions(ReAct):
    """An agent with tool calls in a format that the user's prompt and parser define."""

    def __init__(self, parser: ActionParser, *, has_end: bool) -> None:
        """`has_end`: whether a tool ends the work. If so, an answer without an action is an error, not the final one."""
        self._parser, self._has_end = parser, has_end

    def initial_messages(self) -> list[Message]:
        return BaseAgent.initial_messages(self)

    def parse_llm_output(self, reply: ModelReply) -> ParsedAnswer:
        if not reply.text.strip():
            return ParsedAnswer()
        action = self._parser(reply.text)
        if action is None:
            return ParsedAnswer(complaint=NO_ACTION) if self._has_end else ParsedAnswer(final=reply.text)
        return ParsedAnswer([ToolCall("action", str(action["tool_name"]), json.dumps(action.get("tool_args") or {}))])


class Logged:
    """An agent that logs its model's messages and answers."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, context: AgentContext) -> str | None:
        return await self._agent.run(_LoggedContext(context))


class _LoggedContext:
    def __init__(self, context: AgentContext) -> None:
        self._context, self._logged = context, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def call_model(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelReply:
        for message in messages[self._logged :]:
            logger.info("%s: %s", message["role"], message.get("content"))
        reply = await self._context.call_model(messages, tools)
        self._logged = len(messages) + 1  # includes the answer, which the next line logs
        logger.info("assistant: %s", json.dumps(reply.message, ensure_ascii=False))
        return reply


_YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def saves_trajectories(environ: Mapping[str, str] | None = None) -> bool:
    """Return the value of AGENTIC_SAVE_TRAJECTORIES; True if it is not set. Raises ValueError."""
    value = (os.environ if environ is None else environ).get("AGENTIC_SAVE_TRAJECTORIES", "true")
    if value.lower() not in _YES_OR_NO:
        raise ValueError(f"AGENTIC_SAVE_TRAJECTORIES is {value!r}; expected true or false")
    return _YES_OR_NO[value.lower()]


def set_log_level(environ: Mapping[str, str] | None = None) -> None:
    """Log at the level of AGENTIC_LOG_LEVEL, to standard error unless the program has set up logging. Raises ValueError."""
    level = (os.environ if environ is None else environ).get("AGENTIC_LOG_LEVEL")
    if not level:
        return
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"AGENTIC_LOG_LEVEL is {level!r}; expected DEBUG, INFO, WARNING, ERROR or CRITICAL")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
