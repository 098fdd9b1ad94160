"""A single agent in Python: each of its trajectories is a job with one task."""

import asyncio
import contextlib
import os
import re
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
from rolloutctl.runs import DEFAULT_OUTPUT
from rolloutctl.trajectories import StepType, Trajectory, TrajectoryStep, read_trajectory

NAME_CHARACTERS = 40
"""Most characters of a request's id in the name of a run's folder."""


class RolloutFailed(Exception):
    """Model or sandbox were unavailable, which the policy did not cause. `trajectory` has everything recorded until
    then.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        reason, message = (trajectory.metadata.get(field) for field in ("reason", "message"))
        super().__init__(f"{trajectory.request_id}: {reason}: {message}")
        self.trajectory = trajectory


class GeneralAgent:
    """Thinks, calls a tool, reads the result, and repeats until it has a final answer, all in text: for any model.

    It may work on many prompts, also side by side.
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
        """`max_rounds` are model calls; `termination_tool_names` are tools whose call ends the work.

        The model gets the form of tool calls after the `system_prompt`. With an `action_parser` the prompt says it all.
        `loop` is an agent as docs/agents-and-tools.md has them, which works instead; `config` are its options, `loop_name`
        its name in the record. `tool_names` go to `create_tool`; `set_tools` takes any tools. At most `concurrent_requests`
        trajectories run at once. `sandbox` and `plugins` are those of a manifest, a plugin also by its name alone. All is
        recorded below `output`, a folder or URI, unless `save` is False; AGENTIC_SAVE_TRAJECTORIES decides where it is None.
        `debug` logs messages and answers of the model.
        """
        set_log_level()
        if action_parser is not None and loop is not ReAct:
            raise ValueError("an action_parser reads the answers of the built-in loop; give it, or a loop, not both")
        self.system_prompt, self.max_rounds = system_prompt, max_rounds
        self.termination_tool_names, self.action_parser = termination_tool_names, action_parser
        self.loop, self.config = loop, config
        self.max_tokens_per_step, self.temperature = max_tokens_per_step, temperature
        self.sandbox, self.output, self.debug = sandbox, output, debug
        self.plugins = [{"name": use} if isinstance(use, str) else dict(use) for use in plugins]
        self.save = saves_trajectories() if save is None else save
        self._loop_name = loop_name or getattr(loop, "__name__", type(self).__name__)
        self._places = asyncio.Semaphore(concurrent_requests) if concurrent_requests else contextlib.nullcontext()
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
        """Work on a prompt (text, or a mapping with `content`) in a sandbox, to the end.

        The model is a client's `generate`, or an async function of messages, max_tokens and temperature. `request_id` names
        the run. `task` are further fields of a task as in a manifest: `files`, `setup`, and `verifier`, which gives the
        reward. Raises RolloutFailed where infrastructure failed, ValidationError, and what storage and model raise.
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
        async with self._places:
            summary = await run_job(
                job,
                base_dir=Path.cwd(),
                environ=client.environ if client else os.environ,
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
        """Record a call in a user-defined format unchanged. Its parser provides the arguments."""
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

    `General`, `React` and `Coding` call tools in text, `Tool` natively; other names are those of `agent.type` in a manifest.
    Raises ExtensionError, TypeError.
    """
    kind = _KINDS[name.lower()] if name.lower() in _KINDS else {"loop": find_agent(name)}
    given = {"max_rounds" if option == "max_steps" else option: value for option, value in (options or {}).items()}
    return GeneralAgent(**{**kind, **given})


def create_agents(agents: Mapping[str, Mapping[str, Any]]) -> dict[str, GeneralAgent]:
    """Create several agents from options by name."""
    return {name: create_agent(name, options) for name, options in agents.items()}
