"""Runs plugins for Real Work's classes (ritser-labs/real-work, `src/plugins/base.py`) at our hooks.

Real Work's packages are only needed if such plugins are used.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_runtime.export.real_work import action_of, action_result_of, episode_result_of, test_result_of, trajectory_of
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.base import FinishedRollout, GroupInfo, Refuse, RolloutInfo
from rollout_api.records import CommandVerdict, Observation, Result
from rollout_api.tasks import Task


class RealWork:
    """Runs the plugin classes of a module written for Real Work, with Real Work's hooks and types.

    `execute` is called at the hooks that they support, and so is the deciding method of their kind: `filter_actions`,
    `modify_environment`, `should_continue_rollout`, `evaluate_episode`, `analyze_trajectory` with
    `suggest_improvements`. `modify_rollout_strategy` is not called: the manifest determines timeouts and retries.
    """

    def __init__(self, modules: list[str], config: dict[str, Any] | None = None) -> None:
        """`config` is passed to each class. Raises ExtensionError for a module without such a class."""
        classes = [own for module in modules for own in _classes_of(module)]
        if not classes:
            raise ExtensionError("plugin RealWork: config.modules is empty; name at least one module")
        base = next(parent for parent in classes[0].__mro__ if parent.__name__ == "BasePlugin")
        self._types = sys.modules[base.__module__]
        """Real Work's `src.plugins.base`, which imports all types of their interface."""
        made = [own(config or {}) for own in classes]
        self._plugins = sorted(made, key=lambda plugin: -plugin.priority)
        self._results: dict[int, list[Any]] = {}
        """Real Work's episode results by group, for `should_continue_rollout`."""
        self._ready = False

    async def before_group(self, group: GroupInfo) -> None:
        await self._execute("pre_rollout", environment_id=group.task.name)

    async def after_group(self, group: GroupInfo, results: Sequence[Result]) -> None:
        await self._execute("post_rollout", environment_id=group.task.name, results=self._results.pop(group.number, []))

    async def before_rollout(self, rollout: RolloutInfo) -> None:
        await self._execute("pre_episode", **_where(rollout))

    async def modify_task(self, rollout: RolloutInfo, task: Task) -> Task | None:
        """Call their modify_environment, which may change prompt, init_commands and working_directory."""
        environment = self._types.EnvironmentConfig(
            id=task.name,
            docker_image=(task.sandbox.image if task.sandbox else None) or "",
            init_commands=list(task.setup),
            unit_tests=list(task.verifier.commands) if task.verifier else [],
            prompt=task.prompt,
        )
        changed = environment
        for plugin in await self._enabled("modify_environment"):
            changed = await plugin.modify_environment(changed, self._types.PluginContext(**_where(rollout)))
        if changed == environment:
            return None
        refused = [
            name
            for name in ("id", "docker_image", "unit_tests")
            if getattr(changed, name) != getattr(environment, name)
        ]
        if refused:
            raise ValueError(f"modify_environment changed {', '.join(refused)}; prompt and init_commands may change")
        return task.model_copy(update={"prompt": changed.prompt, "setup": list(changed.init_commands)})

    async def filter_tool_call(self, rollout: RolloutInfo, call: ToolCall) -> Refuse | ToolCall | None:
        """Call their pre_action and filter_actions: an action left out is refused, a changed one runs instead."""
        asked = action_of(call)
        actions = [self._types.Action(**asked)]
        context = await self._execute("pre_action", actions=actions, **_where(rollout))
        actions = context.get("actions", actions)
        for plugin in await self._enabled("filter_actions"):
            actions = await plugin.filter_actions(actions, context)
        if not actions:
            return Refuse("a Real Work plugin removed the action")
        content = actions[0].content
        if content == asked["content"]:
            return None
        arguments = json.loads(call.arguments)
        name = {"command": "command", "file_read": "filepath", "done": "message"}.get(actions[0].type.value)
        if name not in arguments:
            raise ValueError(f"a changed action of tool {call.name} cannot be turned into its arguments")
        return replace(call, arguments=json.dumps({**arguments, name: content}, ensure_ascii=False))

    async def after_tool_call(self, rollout: RolloutInfo, call: ToolCall, result: Observation) -> None:
        done = self._types.ActionResult(**action_result_of(result, ""))
        await self._execute("post_action", action=self._types.Action(**action_of(call)), result=done, **_where(rollout))

    async def before_verifier_command(self, rollout: RolloutInfo, command: str) -> None:
        await self._execute("pre_test", command=command, **_where(rollout))

    async def after_verifier_command(self, rollout: RolloutInfo, command: str, result: CommandVerdict) -> None:
        tested = self._types.TestResult(**test_result_of(result, ""))
        await self._execute("post_test", command=command, test_result=tested, **_where(rollout))

    async def evaluate_rollout(self, finished: FinishedRollout) -> Mapping[str, float]:
        """Call their evaluate_episode; return the numbers in its result."""
        scores: dict[str, float] = {}
        for plugin in await self._enabled("evaluate_episode"):
            trajectory = self._trajectory(finished)
            evaluated = await plugin.evaluate_episode(trajectory.episode_result, trajectory)
            scores |= {
                f"{plugin.name}.{name}": float(value)
                for name, value in evaluated.items()
                if isinstance(value, int | float)
            }
        return scores

    async def analyze_trajectory(self, finished: FinishedRollout) -> Mapping[str, Any]:
        """Call their post_episode, analyze_trajectory and suggest_improvements; return the results by plugin name."""
        trajectory = self._trajectory(finished)
        self._results.setdefault(finished.rollout.group, []).append(trajectory.episode_result)
        await self._execute(
            "post_episode",
            episode_result=trajectory.episode_result,
            trajectory=trajectory,
            test_results=trajectory.test_results,
            **_where(finished.rollout),
        )
        analysis: dict[str, Any] = {}
        for plugin in await self._enabled("analyze_trajectory"):
            found = await plugin.analyze_trajectory(trajectory)
            suggestions = await plugin.suggest_improvements(trajectory)
            # default=str, because their analyses contain enums.
            analysis[plugin.name] = json.loads(json.dumps({**found, "suggestions": suggestions}, default=str))
        return analysis

    async def should_stop_group(self, group: GroupInfo, results: Sequence[Result]) -> str | None:
        known = [self._types.EpisodeResult(**episode_result_of(result, (), result.tool_calls)) for result in results]
        for plugin in await self._enabled("should_continue_rollout"):
            context = self._types.PluginContext(
                environment_id=group.task.name,
                episode_count=len(results),
                results=self._results.get(group.number, known),
            )
            if not await plugin.should_continue_rollout(context):
                return f"{plugin.name}: should_continue_rollout returned False"
        return None

    async def _enabled(self, method: str) -> list[Any]:
        if not self._ready:
            self._ready = True
            for plugin in self._plugins:
                if not await plugin.initialize():
                    raise RuntimeError(f"plugin {plugin.name}: initialize returned False")
        return [plugin for plugin in self._plugins if plugin.is_enabled() and hasattr(plugin, method)]

    async def _execute(self, hook: str, **data: Any) -> Any:
        """Call `execute` of each plugin that supports the hook, by priority; return the changed context."""
        kind, context = self._types.PluginHookType(hook), self._types.PluginContext(**data)
        for plugin in await self._enabled("execute"):
            if kind in plugin.supported_hooks:
                context = await plugin.execute(kind, context) or context
        return context

    def _trajectory(self, finished: FinishedRollout) -> Any:
        info = finished.rollout
        form = trajectory_of(f"attempt-{info.attempt}", finished.records, finished.result, finished.verdict)
        types, step = self._types, sys.modules[self._types.Trajectory.__module__].TrajectoryStep
        tests = [types.TestResult(**{**test, "timestamp": test["timestamp"] or ""}) for test in form["test_results"]]
        return types.Trajectory(
            **{
                **form,
                "start_time": form["start_time"] or "",
                "steps": [
                    step(
                        **{
                            **one,
                            "action": types.Action(**one["action"]),
                            "result": types.ActionResult(**one["result"]),
                        }
                    )
                    for one in form["steps"]
                ],
                "test_results": tests,
                "episode_result": types.EpisodeResult(**{**form["episode_result"], "test_results": tests}),
            }
        )


def _where(rollout: RolloutInfo) -> dict[str, Any]:
    return {"episode_id": f"rollout-{rollout.index}-{rollout.attempt}", "environment_id": rollout.task.name}


def _classes_of(module: str) -> list[type[Any]]:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ExtensionError(
            f"plugin RealWork: module {module!r} cannot be imported: {error}; put its folder, and the folder of Real "
            "Work's `src`, on PYTHONPATH"
        ) from error
    classes = [
        thing
        for _, thing in inspect.getmembers(found, inspect.isclass)
        if thing.__module__ == found.__name__ and hasattr(thing, "supported_hooks")
    ]
    for own in classes:
        if missing := sorted(getattr(own, "__abstractmethods__", ())):
            raise ExtensionError(f"plugin RealWork: {module}:{own.__name__} lacks {', '.join(missing)}")
    if not classes:
        raise ExtensionError(f"plugin RealWork: module {module!r} has no class with `supported_hooks`")
    return classes
