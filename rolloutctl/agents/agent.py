"""Agents of the Python API in `agent_rollouts.agentic_rollout_library`. Each trajectory is a job with one task."""

import asyncio
import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_runtime.agents.base import Agent
from agent_runtime.agents.react import ReAct
from agent_runtime.agents.registry import find_agent
from agent_runtime.agents.tool_calling import Coding, ToolCalling
from agent_runtime.engine.run import run_job
from agent_runtime.recording.job_record import output_uri
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.base import API_VERSION
from rollout_api.model import ModelSpec
from rollout_api.records import StopReason
from rollout_api.rollout_job import RolloutJob
from rolloutctl.agents.llm import LLMFunction, as_model, client_of, name_of
from rolloutctl.agents.loop import ActionParser, Logged, ParsedActions, logger, saves_trajectories, set_log_level
from rolloutctl.agents.tools import NamedTool, create_tool
from rolloutctl.completion import DEFAULT_OUTPUT
from rolloutctl.trajectories import StepType, Trajectory, TrajectoryStep, read_trajectory

NAME_CHARACTERS = 40
"""Most characters of a request's id in the name of a run's folder."""


class RolloutFailed(Exception):
    """A trajectory was lost to infrastructure, such as an unavailable model. `trajectory` has the record so far."""

    def __init__(self, trajectory: Trajectory) -> None:
        reason, message = (trajectory.metadata.get(field) for field in ("reason", "message"))
        super().__init__(f"{trajectory.request_id}: {reason}: {message}")
        self.trajectory = trajectory


class GeneralAgent:
    """An agent that thinks, calls a tool, reads the result, and repeats until it has a final answer.

    By default tool calls are written as text, so that any model can be used. One agent can work on many prompts, also
    concurrently.
    """

    def __init__(
        self,
        system_prompt: str | None = None,
        tool_names: Sequence[str] = (),
        max_rounds: int = 10,
        termination_tool_names: Sequence[str] = ("finish",),
        *,
        action_parser: ActionParser | None = None,
        loop: Callable[[], Agent] = ReAct,
        config: Mapping[str, Any] = MappingProxyType({}),
        max_tokens_per_step: int | None = None,
        temperature: float | None = 0.7,
        concurrent_requests: int | None = None,
        sandbox: Mapping[str, Any] = MappingProxyType({}),
        output: str | Path = DEFAULT_OUTPUT,
        plugins: Sequence[str | Mapping[str, Any]] = (),
        loop_name: str | None = None,
        save: bool | None = None,
        debug: bool = False,
    ) -> None:
        """Create an agent.

        Args:
            system_prompt: the format of tool calls is appended to it, unless there is an `action_parser`.
            tool_names: names for `create_tool`. `set_tools` sets any other tools.
            max_rounds: most model calls.
            termination_tool_names: tools whose call ends the work.
            action_parser: reads tool calls from answers in a format that the system prompt describes.
            loop: another agent class, as in docs/agents-and-tools.md, that works instead of the built-in loop.
            config: options of `loop`.
            concurrent_requests: most concurrent trajectories.
            sandbox: `spec.sandbox` as in a manifest.
            output: folder or URI below which trajectories are recorded.
            plugins: plugins as in a manifest, or their names.
            loop_name: name of the agent in the record.
            save: whether to record; AGENTIC_SAVE_TRAJECTORIES decides if it is None.
            debug: whether to log the model's messages and answers.
        """
        set_log_level()
        if action_parser is not None and loop is not ReAct:
            raise ValueError("action_parser works only with the built-in loop; give action_parser or loop, not both")
        self.system_prompt, self.max_rounds = system_prompt, max_rounds
        self.termination_tool_names, self.action_parser = termination_tool_names, action_parser
        self.loop, self.config = loop, config
        self.max_tokens_per_step, self.temperature = max_tokens_per_step, temperature
        self.sandbox, self.output, self.debug = sandbox, output, debug
        self.plugins = [{"name": use} if isinstance(use, str) else dict(use) for use in plugins]
        self.save = saves_trajectories() if save is None else save
        self._loop_name = loop_name or getattr(loop, "__name__", type(self).__name__)
        self._slots = asyncio.Semaphore(concurrent_requests) if concurrent_requests else contextlib.nullcontext()
        self.set_tools({name: create_tool(name) for name in tool_names})

    def set_tools(self, tools: Mapping[str, Any]) -> None:
        """Set the tools by the names that the model sees: tools of `create_tool`, functions decorated with `@tool`,
        async functions, or objects with an async `execute`. Raises TypeError for anything else.
        """
        self.tools = dict(tools)
        self._named_tools()

    async def run_trajectory(
        self, prompt: str | Mapping[str, Any], llm_generate_func: LLMFunction, request_id: str, **task: Any
    ) -> Trajectory:
        """Work on one prompt in a sandbox and return the trajectory.

        Args:
            prompt: text, or a mapping with `content`.
            llm_generate_func: `LLMClient.generate`, or an async function of messages, max_tokens and temperature.
            request_id: name of the recorded run.
            task: further fields of a task as in a manifest, such as `files`, `setup`, and `verifier` for a reward.

        Raises RolloutFailed if infrastructure failed, ValidationError, and the errors of storage and model.
        """
        if self.save:
            return await self._run(prompt, llm_generate_func, request_id, task, str(self.output))
        with tempfile.TemporaryDirectory(prefix="trajectory-") as folder:
            trajectory = await self._run(prompt, llm_generate_func, request_id, task, folder)
        del trajectory.metadata["uri"]
        return trajectory

    async def _run(
        self,
        prompt: str | Mapping[str, Any],
        llm_generate_func: LLMFunction,
        request_id: str,
        task: Mapping[str, Any],
        output: str,
    ) -> Trajectory:
        client = client_of(llm_generate_func)
        model = client.spec if client else ModelSpec(function=name_of(llm_generate_func))
        job = self._job(prompt, request_id, task, model, output)
        async with self._slots:
            summary = await run_job(
                job,
                base_dir=Path.cwd(),
                environ=client.variables if client else os.environ,
                model=None if client else as_model(llm_generate_func),
                new=True,
                agent=self._new_loop,
                tools=self._named_tools(),
            )
        run = await open_run(Store.open(output_uri(job, Path.cwd()), os.environ), summary.folder)
        recorded = await read_trajectory(run, 0)
        trajectory = recorded.model_copy(
            update={
                "request_id": request_id,
                "steps": [self._with_arguments(step) for step in recorded.steps],
                "metadata": {**recorded.metadata, "uri": summary.uri},
            }
        )
        if not trajectory.is_completed:
            raise RolloutFailed(trajectory)
        if trajectory.metadata["stopReason"] == StopReason.AGENT_ERROR:
            logger.warning("%s: the agent failed: %s", request_id, trajectory.metadata.get("message"))
        return trajectory

    def _new_loop(self) -> Agent:
        loop: Agent = self.loop()
        if self.action_parser is not None:
            has_end = not set(self.termination_tool_names).isdisjoint(self.tools)
            loop = ParsedActions(self.action_parser, has_end=has_end)
        return Logged(loop) if self.debug else loop

    def _named_tools(self) -> dict[str, NamedTool]:
        ends = self.termination_tool_names
        return {name: NamedTool(name, thing, stops=name in ends) for name, thing in self.tools.items()}

    def _job(
        self, prompt: str | Mapping[str, Any], request_id: str, task: Mapping[str, Any], model: ModelSpec, output: str
    ) -> RolloutJob:
        text = prompt if isinstance(prompt, str) else prompt.get("content")
        if text is None:
            raise ValueError(f"the prompt is {prompt!r:.200}; expected text, or a mapping with `content`")
        name = re.sub("[^a-z0-9]+", "-", request_id.lower())[:NAME_CHARACTERS].strip("-") or "trajectory"
        in_text = self.loop is ReAct and self.action_parser is None
        return RolloutJob.model_validate(
            {
                "apiVersion": API_VERSION,
                "kind": "RolloutJob",
                "metadata": {"name": name},
                "spec": {
                    "mode": "Eval",
                    "seed": secrets.randbits(31),  # equal prompts are samples of their own
                    "model": model,
                    "agent": {
                        "type": self._loop_name,
                        "tools": list(self.tools),
                        "systemPrompt": self.system_prompt,
                        "maxTurns": self.max_rounds,
                        "config": dict(self.config),
                    },
                    "sampling": {
                        "temperature": self.temperature,
                        "maxTokens": self.max_tokens_per_step,
                        "stop": ["\nObservation:"] if in_text else [],
                    },
                    "sandbox": dict(self.sandbox),
                    "tasks": {"inline": [{"name": name, "prompt": text, **task}]},
                    "attempts": {"limit": 1},
                    "completion": {"maxInfraFailureFraction": 1.0},
                    "plugins": self.plugins,
                    "output": {"uri": output},
                },
            }
        )

    def _with_arguments(self, step: TrajectoryStep) -> TrajectoryStep:
        """Add the arguments that the `action_parser` reads to a recorded call in a user-defined format."""
        if self.action_parser is None or step.step_type is not StepType.ACTION or step.tool_args is not None:
            return step
        action = self.action_parser(step.content)
        return step.model_copy(update={"tool_args": dict(action["tool_args"])}) if action else step


_KINDS: Mapping[str, Mapping[str, Any]] = {
    "general": {},
    "react": {},
    "coding": {"system_prompt": Coding.system_prompt},
    "tool": {"loop": ToolCalling},
}


def create_agent(name: str, options: Mapping[str, Any] | None = None) -> GeneralAgent:
    """Create an agent by name, with options of GeneralAgent; `max_steps` is an alias of `max_rounds`.

    `General`, `React` and `Coding` write tool calls as text. `Tool` uses the model's native tool calls. Other names are
    values of `agent.type` in a manifest. Raises ExtensionError, TypeError.
    """
    kind = _KINDS[name.lower()] if name.lower() in _KINDS else {"loop": find_agent(name)}
    given = {"max_rounds" if option == "max_steps" else option: value for option, value in (options or {}).items()}
    return GeneralAgent(**{**kind, **given})


def create_agents(agents: Mapping[str, Mapping[str, Any]]) -> dict[str, GeneralAgent]:
    """Create several agents, given their options by name."""
    return {name: create_agent(name, options) for name, options in agents.items()}
