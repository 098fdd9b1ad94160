"""Base class of agents that build their own trajectory, with the interface of agentic-rollout-library's `BaseAgent`."""

import copy
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_runtime.agents.base import AgentContext
from agent_runtime.models.base import ToolCall
from rollout_api.records import Message
from rolloutctl.agents.agent import GeneralAgent
from rolloutctl.agents.llm import LLMFunction
from rolloutctl.completion import DEFAULT_OUTPUT
from rolloutctl.trajectories import StepType, Trajectory, TrajectoryStep, result_step

_TASK_FIELDS = frozenset({"files", "setup", "verifier", "timeouts", "sandbox", "tags"})
"""Keyword arguments of `run_trajectory` that are fields of the task. The other ones are passed to the agent's method."""

OwnLoop = Callable[..., Awaitable[Trajectory]]


class BaseAgent(ABC):
    """Base class of an agent with its own loop: `run_trajectory` calls the model and tools, and builds the trajectory.

    A call of `run_trajectory` from outside runs the loop as a recorded job with one task and its tools in a sandbox. In
    the loop, each `llm_generate_func(messages)` is one recorded turn. `max_steps` limits the steps of the trajectory.
    `max_tokens_per_step` and `temperature` apply to every model call.
    """

    def __init__(
        self,
        max_steps: int = 10,
        max_tokens_per_step: int | None = 512,
        temperature: float | None = 0.7,
        tools_config: Mapping[str, Any] = MappingProxyType({}),
        *,
        sandbox: Mapping[str, Any] = MappingProxyType({}),
        output: str | Path = DEFAULT_OUTPUT,
        plugins: Sequence[str | Mapping[str, Any]] = (),
        **config: Any,
    ) -> None:
        self.max_steps, self.max_tokens_per_step, self.temperature = max_steps, max_tokens_per_step, temperature
        self.tools_config, self.config = dict(tools_config), config
        self.tools: dict[str, Any] = {}
        self.interactions: dict[str, Any] = {}
        self._sandbox, self._output, self._plugins = sandbox, output, plugins
        self._context: AgentContext | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the subclass's `run_trajectory`, so that its runs are recorded."""
        super().__init_subclass__(**options)
        if "run_trajectory" in cls.__dict__:
            setattr(cls, "run_trajectory", _wrap_as_job(cls.__dict__["run_trajectory"]))  # noqa: B010 mypy's own exception

    @abstractmethod
    async def run_trajectory(
        self, prompt: Any, llm_generate_func: LLMFunction, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Work on the prompt and return the trajectory. Subclasses implement the loop here."""

    def set_tools(self, tools: Mapping[str, Any]) -> None:
        """Set the tools by name: those of `create_tool`, `@tool` functions, or objects with an async `execute`."""
        self.tools = dict(tools)

    def set_interactions(self, interactions: Mapping[str, Any]) -> None:
        """Set objects that only the agent's own code uses."""
        self.interactions = dict(interactions)

    def should_continue(self, trajectory: Trajectory) -> bool:
        """Return whether to take another step: False after `max_steps` steps, a final answer, or completion."""
        answered = bool(trajectory.steps) and trajectory.steps[-1].step_type is StepType.FINAL_ANSWER
        return len(trajectory.steps) < self.max_steps and not trajectory.is_completed and not answered

    def create_system_prompt(self) -> str:
        """Return the system prompt; empty for none."""
        return "You solve tasks, with tools if they help. Think step by step."

    def format_messages_for_llm(self, trajectory: Trajectory, additional_message: str | None = None) -> list[Message]:
        """Return the system prompt, the trajectory's steps, and the additional message, as chat messages."""
        system, added = self.create_system_prompt(), additional_message
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages += trajectory.get_messages()
        return [*messages, {"role": "user", "content": added}] if added else messages

    def parse_llm_output(self, output: str, step_type: StepType = StepType.THOUGHT) -> TrajectoryStep:
        """Return a step with the answer's text. Override it to parse tool calls and final answers."""
        return TrajectoryStep(step_type=step_type, content=output.strip(), metadata={"raw_output": output})

    async def execute_tool_call(
        self, tool_name: str, tool_args: Mapping[str, Any], trajectory: Trajectory
    ) -> TrajectoryStep:
        """Run a tool in the sandbox; return its result, errors included, as a step. Raises RuntimeError outside a run."""
        if self._context is None:
            raise RuntimeError("execute_tool_call can only be called while run_trajectory runs")
        call = ToolCall(f"call-{len(trajectory.steps)}", tool_name, json.dumps(dict(tool_args or {})))
        (observation,) = await self._context.call_tools([call])
        succeeded = {"execution_successful": not observation.error}
        return result_step(observation, metadata=succeeded, tool_args=dict(tool_args or {}))

    def finalize_trajectory(self, trajectory: Trajectory) -> None:
        """Mark the trajectory as completed."""
        trajectory.is_completed = True


def _wrap_as_job(loop: OwnLoop) -> OwnLoop:
    """Wrap a loop so that it runs as a job. Within a job, as in `super().run_trajectory`, the wrapper calls it directly."""

    @functools.wraps(loop)
    async def run_trajectory(
        self: BaseAgent, prompt: Any, llm_generate_func: LLMFunction, request_id: str, **kwargs: Any
    ) -> Trajectory:
        if self._context is not None:
            return await loop(self, prompt, llm_generate_func, request_id, **kwargs)
        run = _Run(self, loop, prompt, request_id, {k: v for k, v in kwargs.items() if k not in _TASK_FIELDS})
        recorder = GeneralAgent(
            max_rounds=self.max_steps,
            loop=lambda: run,
            loop_name=type(self).__name__,
            max_tokens_per_step=self.max_tokens_per_step,
            temperature=self.temperature,
            sandbox=self._sandbox,
            output=self._output,
            plugins=self._plugins,
        )
        recorder.set_tools(self.tools)
        task = {name: value for name, value in kwargs.items() if name in _TASK_FIELDS}
        recorded = await recorder.run_trajectory(prompt, llm_generate_func, request_id, **task)
        own = run.trajectory
        if own is None:
            return recorded
        return recorded.model_copy(update={"steps": own.steps, "metadata": {**own.metadata, **recorded.metadata}})

    return run_trajectory


class _Run:
    """Implements `Agent`: one run of an agent's own loop with the model and tools of the context."""

    def __init__(self, agent: BaseAgent, loop: OwnLoop, prompt: Any, request_id: str, kwargs: dict[str, Any]) -> None:
        self._agent, self._loop, self._prompt, self._request_id, self._kwargs = agent, loop, prompt, request_id, kwargs
        self.trajectory: Trajectory | None = None

    async def run(self, context: AgentContext) -> str | None:
        """See `Agent.run`. Works on a copy of the agent, so that concurrent runs share no state."""
        agent = copy.copy(self._agent)
        agent._context = context
        fixed = {"max_tokens": agent.max_tokens_per_step, "temperature": agent.temperature}

        async def generate(
            messages: Sequence[Message],
            max_tokens: int | None = None,
            temperature: float | None = None,
            tools: Sequence[Mapping[str, Any]] | None = None,
        ) -> str | dict[str, Any]:
            for name, value in (("max_tokens", max_tokens), ("temperature", temperature)):
                if value is not None and value != fixed[name]:
                    field = "max_tokens_per_step" if name == "max_tokens" else name
                    raise ValueError(
                        f"{name} is {value} in a call of llm_generate_func, but {field} of the agent is {fixed[name]}; "
                        f"all calls of a run have the same value, so set {field} of {type(agent).__name__}"
                    )
            reply = await context.call_model(list(messages), tools or [])
            return reply.text if tools is None else dict(reply.message)

        self.trajectory = await self._loop(agent, self._prompt, generate, self._request_id, **self._kwargs)
        if not isinstance(self.trajectory, Trajectory):
            raise TypeError(
                f"{type(agent).__name__}.run_trajectory returned {self.trajectory!r:.80}; expected a Trajectory"
            )
        return self.trajectory.get_final_response()
