"""Call a job's plugins in order, each on its own thread and with a time limit, and record every call. A plugin that
raises, hangs or returns an invalid value has failed; others are not affected. The caller decides about the consequences
for the rollout.
"""

import asyncio
import copy
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.extensions import ExtensionError, described
from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.base import Refuse
from agent_runtime.plugins.registry import Loaded, load_plugins, unused_hooks
from agent_runtime.plugins.worker import Worker
from rollout_api.nesting import DEEPEST, too_deep
from rollout_api.records import PluginCall
from rollout_api.rollout_job import PluginUse
from rollout_api.tasks import Task

ANALYSIS_BYTES = 64 * 1024
"""Limit of one plugin's analysis of a rollout in bytes, because thousands of seals are read at once."""

_JOB_SUMS = ("calls", "seconds", "stopped", "failed")

OnFailure = Callable[[PluginCall, str], None]
"""Receives each failed call and its key."""


@dataclass(frozen=True)
class Answer:
    """One call of one plugin: its result, None if it failed, and the record of the call."""

    value: Any
    call: PluginCall

    @property
    def failed(self) -> bool:
        return self.call.did == "Failed"


@dataclass(frozen=True)
class _Method:
    plugin: Loaded
    worker: Worker
    function: Callable[..., Any]
    arguments: Sequence[str]


class Plugins:
    """The plugins of a run. Without any, every hook calls an empty list."""

    def __init__(
        self,
        methods: Mapping[str, Sequence[_Method]] | None = None,
        on_failure: OnFailure = lambda call, key: None,
        warnings: Sequence[str] = (),
    ) -> None:
        self._methods, self._on_failure, self.warnings = methods or {}, on_failure, warnings
        self.of_job: dict[str, dict[str, float]] = {}
        """Totals by plugin of calls that belong to no rollout: calls, seconds, stopped (groups), failed."""

    @classmethod
    def open(
        cls,
        uses: Sequence[PluginUse],
        in_process: Sequence[object] = (),
        on_failure: OnFailure = lambda call, key: None,
        *,
        is_command: bool = False,
    ) -> "Plugins":
        """Load the plugins. `is_command`: the agent is a program in the sandbox. Raises ExtensionError for a plugin
        that cannot work.
        """
        if not uses and not in_process:
            return cls()
        loaded = load_plugins(uses, in_process)
        return cls(_registered(loaded), on_failure, unused_hooks(loaded) if is_command else ())

    @property
    def any(self) -> bool:
        return bool(self._methods)

    def have(self, *hooks: str) -> bool:
        return any(self._methods.get(hook) for hook in hooks)

    async def ask(self, hook: str, key: str, **arguments: Any) -> AsyncIterator[Answer]:
        """Call a hook of each plugin that has it, one after another."""
        for method in self._methods.get(hook, ()):
            yield await self._call(method, hook, {**arguments, "key": key})

    async def ask_on(self, hook: str, key: str, argument: str, value: Any, **arguments: Any) -> AsyncIterator[Answer]:
        """Like `ask`, but each result replaces `argument` for the next. Stops at a refusal or a failure."""
        for method in self._methods.get(hook, ()):
            answer = await self._call(method, hook, {**arguments, argument: value, "key": key})
            yield answer
            if answer.failed or isinstance(answer.value, Refuse):
                return
            value = answer.value or value

    def count_for_job(self, call: PluginCall) -> None:
        """Add a call that belongs to no rollout to `of_job`."""
        sums = self.of_job.setdefault(call.plugin, dict.fromkeys(_JOB_SUMS, 0))
        for name, more in zip(_JOB_SUMS, (1, call.seconds, call.did == "Stopped", call.did == "Failed"), strict=True):
            sums[name] = round(sums[name] + more, 6)

    def close(self) -> None:
        for worker in {method.worker for methods in self._methods.values() for method in methods}:
            worker.close()

    async def _call(self, method: _Method, hook: str, arguments: Mapping[str, Any]) -> Answer:
        started = time.perf_counter()
        did, message, value = None, "", None
        try:
            # Each plugin gets a copy: its changes do not affect other plugins.
            wanted = {name: copy.deepcopy(arguments[name]) for name in method.arguments}
            returned = await method.worker.run(method.function, wanted, method.plugin.timeout_seconds)
            check = _CHECKS.get(hook)
            value = None if check is None else check(returned, arguments)
            did, message = _decision_name(hook, value), _reason_in(value)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 any exception is a failure of the plugin
            did, message = "Failed", described(error)
        seconds = round(time.perf_counter() - started, 6)
        call = PluginCall(plugin=method.plugin.name, hook=hook, seconds=seconds, did=did, message=message)
        if did == "Failed":
            self._on_failure(call, str(arguments["key"]))
        return Answer(value, call)


def _registered(plugins: Sequence[Loaded]) -> dict[str, list[_Method]]:
    """Return the methods of each hook in pluggy's order. Raises ExtensionError."""
    import pluggy

    from agent_runtime.plugins.hooks import HOOKS, PROJECT, Hooks

    class Manager(pluggy.PluginManager):
        def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
            return super().parse_hookimpl_opts(plugin, name) or (_BY_NAME.copy() if name in HOOKS else None)

    manager = Manager(PROJECT)
    manager.add_hookspecs(Hooks)
    by_name = {plugin.name: (plugin, Worker(plugin.name)) for plugin in plugins}
    # pluggy calls the last registered plugin first.
    for plugin in reversed(plugins):
        try:
            manager.register(plugin.plugin, plugin.name)
        except pluggy.PluginValidationError as error:
            raise ExtensionError(f"plugin {plugin.name!r}: {' '.join(str(error).split())}") from error
    methods: dict[str, list[_Method]] = {}
    for hook in HOOKS:
        implementations = reversed(getattr(manager.hook, hook).get_hookimpls())
        methods[hook] = [
            _method(implementation, *by_name[implementation.plugin_name]) for implementation in implementations
        ]
    return methods


def _method(implementation: Any, plugin: Loaded, worker: Worker) -> _Method:
    if implementation.wrapper or implementation.hookwrapper:
        raise ExtensionError(
            f"plugin {plugin.name!r}: {implementation.function.__name__} is a hook wrapper, which is not supported"
        )
    return _Method(plugin, worker, implementation.function, implementation.argnames)


_BY_NAME: Any = {
    "wrapper": False,
    "hookwrapper": False,
    "optionalhook": False,
    "tryfirst": False,
    "trylast": False,
    "specname": None,
}


# What a hook may return


def _reason(value: Any, _arguments: Mapping[str, Any]) -> str | None:
    return _one_of(value, (str, type(None)), "a reason or None") or None


def _task(value: Any, arguments: Mapping[str, Any]) -> Task | None:
    task = _one_of(value, (Task, type(None)), "a Task or None")
    if task is not None and task.name != arguments["task"].name:
        raise ValueError(f"the task's name was changed to {task.name}; it must stay {arguments['task'].name}")
    return None if task is None or task == arguments["task"] else Task.model_validate(task.model_dump())


def _filtered(value: Any, arguments: Mapping[str, Any]) -> Refuse | ToolCall | None:
    call = _one_of(value, (Refuse, ToolCall, type(None)), "Refuse, a ToolCall or None")
    if isinstance(call, ToolCall) and call.id != arguments["call"].id:
        raise ValueError(f"the call's id was changed to {call.id!r}; it must stay {arguments['call'].id!r}")
    return None if call == arguments["call"] else call


def _scores(value: Any, _arguments: Mapping[str, Any]) -> dict[str, float]:
    scores = {str(name): float(score) for name, score in _one_of(value, (Mapping,), "scores by name").items()}
    if wrong := [name for name, score in scores.items() if not math.isfinite(score)]:
        raise ValueError(f"score {wrong[0]} is not a finite number")
    return scores


def _analysis(value: Any, _arguments: Mapping[str, Any]) -> dict[str, Any]:
    analysis = dict(_one_of(value, (Mapping,), "a mapping"))
    if too_deep(analysis):
        raise ValueError(f"the analysis is nested more than {DEEPEST} levels deep; reduce the nesting")
    text = json.dumps(analysis, allow_nan=False)
    if len(text) > ANALYSIS_BYTES:
        raise ValueError(f"the analysis has {len(text)} bytes; the limit is {ANALYSIS_BYTES}")
    kept: dict[str, Any] = json.loads(text)
    return kept


def _one_of(value: Any, types: tuple[type[Any], ...], expected: str) -> Any:
    if not isinstance(value, types):
        raise TypeError(f"returned {value!r:.80}, expected {expected}")
    return value


def _decision_name(hook: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Refuse):
        return "Refused"
    return {"modify_task": "Changed", "filter_tool_call": "Changed", "should_stop_group": "Stopped"}.get(hook)


def _reason_in(value: Any) -> str:
    if isinstance(value, Refuse):
        return value.reason
    return value if isinstance(value, str) else ""


_CHECKS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "should_stop_group": _reason,
    "modify_task": _task,
    "filter_tool_call": _filtered,
    "evaluate_rollout": _scores,
    "analyze_trajectory": _analysis,
}
"""Checks and conversions of hooks' results. Results of other hooks, which only observe, are ignored."""
