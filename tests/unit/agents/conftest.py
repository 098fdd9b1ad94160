"""A context that runs an attempt in this process: a scripted model, real tools, real commands, and a record."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.agents.base import Agent, AgentContext, AgentReport, Stop, SubTask
from agent_runtime.models.base import ModelReply, ModelRequest, ToolCall
from agent_runtime.models.factory import open_model
from agent_runtime.sandboxes.base import CommandResult
from agent_runtime.tools.base import Tool, ToolContext, dispatch, openai_definition
from agent_runtime.tools.registry import open_tools
from rollout_api.files import TaskFile
from rollout_api.model import ModelSpec, Sampling
from rollout_api.records import Message, Observation, StopReason
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.tasks import Task


class Context:
    """An `AgentContext`. `finish_reasons` overrides those of the scripted turns; None keeps the turn's own."""

    def __init__(
        self, turns: list[dict[str, Any]], spec: AgentSpec, task: Task, finish_reasons: Sequence[str | None] = ()
    ) -> None:
        script = {"tasks": [{"task": task.name, "members": [{"turns": turns}]}]}
        self.model = open_model(ModelSpec.model_validate({"scripted": script}), {})
        self.spec, self.task, self.working_dir = spec, task, "/"
        self.tools: Mapping[str, Tool] = open_tools(spec.tools)
        self.finish_reasons = finish_reasons
        self.requests: list[tuple[list[Message], list[Any]]] = []
        self.observations: list[Observation] = []

    async def call_model(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelReply:
        turn = len(self.requests)
        if turn == self.spec.max_turns:
            raise Stop(StopReason.MAX_TURNS)
        offered = [openai_definition(tool) for tool in self.tools.values()] if tools is None else list(tools)
        self.requests.append((list(messages), offered))
        reply = await self.model.complete(ModelRequest(messages, offered, Sampling(), 1, "s", self.task.name, 0, turn))
        reason = self.finish_reasons[turn] if turn < len(self.finish_reasons) else None
        return ModelReply(reply.message, reason or reply.finish_reason)

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Observation]:
        context: Any = None
        done = [await dispatch(self.tools, call, ToolContext(context, self.task, call.id, 60)) for call in calls]
        self.observations += done
        if any(one.stop for one in done):
            raise Stop(StopReason.FINISHED, done[-1].content)
        return done

    async def delegate(self, agent: Agent, part: SubTask) -> AgentReport:
        other = copy.copy(self)
        other.task = self.task.model_copy(update={"prompt": part.prompt})
        other.tools = {name: self.tools[name] for name in part.tools or self.tools}
        return AgentReport(StopReason.FINISHED, await agent.run(other) or "")

    async def run_command(self, command: str) -> CommandResult:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        return CommandResult(process.returncode, None, None, 0, out, err, len(out), len(err))

    async def put_files(self, files: Sequence[TaskFile]) -> None:
        for file in files:
            await asyncio.to_thread((Path(self.working_dir) / file.path).write_bytes, file.data())

    async def snapshot(self) -> None:
        raise NotImplementedError

    async def checkpoint(self) -> str:
        raise NotImplementedError

    async def go_back(self, checkpoint: str) -> None:
        raise NotImplementedError


@pytest.fixture
def attempt() -> Callable[..., Context]:
    def make(
        *turns: dict[str, Any],
        task: dict[str, Any] | None = None,
        finish_reasons: Sequence[str | None] = (),
        **spec: Any,
    ) -> Context:
        agent = AgentSpec.model_validate({"tools": ["calculator", "finish"], **spec})
        made = Context(
            list(turns) or [{"content": "x"}],
            agent,
            Task.model_validate({"name": "t", "prompt": "Solve it."} | (task or {})),
            finish_reasons,
        )
        _: AgentContext = made
        return made

    return make
