"""Call a job's plugins in order, each on its own thread and with a time limit, and record every call: for a run, for a
group (which they may stop early) and for an attempt.

A plugin that raises, hangs or returns an invalid value has failed; others are not affected. The caller decides about
the consequences for the rollout.
"""

import asyncio
import copy
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_runtime.extensions import ExtensionError, described, traceback_of
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.plugins.base import FinishedRollout, GroupInfo, Refuse, RolloutInfo
from agent_runtime.plugins.registry import Loaded, load_plugins, unused_hooks
from agent_runtime.plugins.worker import HookTimeout, Worker
from agent_runtime.wall_clock import unix_time
from rollout_api.nesting import DEEPEST, too_deep
from rollout_api.records import (
    CommandVerdict,
    Observation,
    Outcome,
    PluginCall,
    PluginReport,
    PluginsRecord,
    Record,
    ResponseRecord,
    Result,
    Verdict,
)
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
        is_program: bool = False,
    ) -> "Plugins":
        """Load the plugins. `is_program`: the agent is a program in the sandbox. Raises ExtensionError for a plugin
        that cannot work.
        """
        if not uses and not in_process:
            return cls()
        loaded = load_plugins(uses, in_process)
        return cls(_registered(loaded), on_failure, unused_hooks(loaded) if is_program else ())

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
        did, message, value, traceback, has_returned = None, "", None, None, False
        try:
            # Each plugin gets a copy: its changes do not affect other plugins.
            wanted = {name: copy.deepcopy(arguments[name]) for name in method.arguments}
            returned = await method.worker.run(method.function, wanted, method.plugin.timeout_seconds)
            has_returned = True
            check = _CHECKS.get(hook)
            value = None if check is None else check(returned, arguments)
            did, message = _decision_name(hook, value), _reason_in(value)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 any exception is a failure of the plugin
            did, message = "Failed", described(error)
            traceback = None if has_returned or isinstance(error, HookTimeout) else traceback_of(error)
        call = PluginCall(
            plugin=method.plugin.name,
            hook=hook,
            seconds=round(time.perf_counter() - started, 6),
            did=did,
            message=message,
            traceback=traceback,
        )
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


STOPPED = "StoppedByPlugin"
"""`Result.reason` of members that a plugin made unnecessary."""


class GroupPlugins:
    """Calls the hooks for the first members of the group, in their order, once for each number of members."""

    def __init__(self, plugins: Plugins, group: GroupInfo, run: str) -> None:
        self._plugins, self._group, self._key = plugins, group, f"{run}/group-{group.number}"
        self._asked, self._asking = 0, asyncio.Lock()
        self.stopped: str | None = None
        """Why the rest of the group is no longer needed, with the plugin's name."""

    async def begin(self) -> None:
        await self._notify("before_group")

    async def end(self, results: Sequence[Result]) -> None:
        await self._notify("after_group", results=results)

    async def judge(self, results: Mapping[int, Result]) -> None:
        """Call the hooks for each member that has ended, in the members' order; `results` by member."""
        if not self._plugins.have("should_stop_group"):
            return
        async with self._asking:
            while self.stopped is None and self._asked in results and self._asked + 1 < self._group.size:
                self._asked += 1
                first = [results[member] for member in range(self._asked)]
                key = f"{self._key}:after-{self._asked}"
                async for answer in self._plugins.ask("should_stop_group", key, group=self._group, results=first):
                    self._plugins.count_for_job(answer.call)
                    if answer.value and self.stopped is None:
                        self.stopped = f"{answer.call.plugin}: {answer.value}"

    async def _notify(self, hook: str, **arguments: object) -> None:
        async for answer in self._plugins.ask(hook, self._key, group=self._group, **arguments):
            self._plugins.count_for_job(answer.call)


def calls_of(records: Iterable[Record]) -> list[PluginCall]:
    return [call for record in records if isinstance(record, PluginsRecord) for call in record.calls]


def reports_of(calls: Sequence[PluginCall]) -> dict[str, PluginReport]:
    """Return a report for each plugin, by name, without scores and analyses, which the caller adds."""
    reports = {}
    for name in dict.fromkeys(call.plugin for call in calls):
        own = [call for call in calls if call.plugin == name]
        failures = [call for call in own if call.did == "Failed"]
        reports[name] = PluginReport(
            calls=len(own),
            seconds=round(sum(call.seconds for call in own), 6),
            refused=sum(call.did == "Refused" for call in own),
            changed=sum(call.did == "Changed" for call in own),
            failed=len(failures),
            error=f"{failures[0].hook}: {failures[0].message}" if failures else None,
            traceback=next((call.traceback for call in failures if call.traceback), None),
        )
    return reports


REFUSED = "refused"
"""Key in `Observation.data` of a tool call that a plugin refused: the plugin's name, and the reason."""
CHANGED = "changed"
"""Key in `Observation.data` of a tool call that plugins changed: name and arguments of what ran."""


def call_that_ran(call: ToolCall, result: Observation) -> ToolCall | None:
    """Return the call that ran for a recorded result, as plugins changed it; None if it was not run."""
    if not result.seconds:
        return None
    match result.data.get(CHANGED):
        case {"name": str(name), "arguments": str(arguments)}:
            return ToolCall(call.id, name, arguments)
    return call


class PluginFailed(Exception):
    """A plugin that changes the task failed. This is an infrastructure failure, because the policy was not called yet."""

    reason = "PluginFailed"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RolloutPlugins:
    """Keeps records of calls until `take_record` returns them for the journal, or `finished` for the result."""

    def __init__(self, plugins: Plugins, info: RolloutInfo, run: str) -> None:
        self._plugins = plugins
        self._key = f"{run}/rollout-{info.index}-{info.attempt}"
        self._calls: list[PluginCall] = []
        self._info = info

    def use_task(self, task: Task) -> None:
        """Use this task in later calls of the plugins."""
        self._info = replace(self._info, task=task)

    def take_record(self) -> list[PluginsRecord]:
        """Return the calls since the last time, for the journal; empty if there were none."""
        calls, self._calls = self._calls, []
        return [PluginsRecord(time=unix_time(), calls=calls)] if calls else []

    async def begin(self, task: Task) -> Task | None:
        """Call the hooks before the sandbox is requested: return the task as changed by plugins, None if unchanged.
        Raises PluginFailed.
        """
        await self._notify("before_rollout")
        changed = failed = None
        async for answer in self._plugins.ask_on("modify_task", f"{self._key}:task", "task", task, rollout=self._info):
            self._calls.append(answer.call)
            changed = answer.value or changed
            failed = answer.call if answer.failed else None
        if failed is not None:
            raise PluginFailed(f"plugin {failed.plugin} could not change the task: {failed.message}")
        return changed

    async def admit(self, turn: int, calls: Sequence[ToolCall], first: int) -> list[ToolCall | Observation]:
        """Before the first call of a turn runs, return for each call what to run, or its result if it was refused.

        `first` calls of the turn came before.
        """
        if not self._plugins.have("filter_tool_call", "before_tool_call"):
            return list(calls)
        return [await self._admit(f":turn-{turn}:call-{number}", call) for number, call in enumerate(calls, first)]

    async def ran(
        self,
        turn: int,
        calls: Sequence[ToolCall],
        admitted: Sequence[ToolCall | Observation],
        results: Sequence[Observation],
        first: int,
    ) -> list[Observation]:
        """Return the results as they are recorded; a changed call is marked."""
        said = []
        for number, (call, made, result) in enumerate(zip(calls, admitted, results, strict=True), first):
            if isinstance(made, ToolCall):
                if self._plugins.have("after_tool_call"):
                    shown = {"call": made, "result": result}
                    await self._notify("after_tool_call", f":turn-{turn}:call-{number}", **shown)
                if made != call:
                    ran = {"name": made.name, "arguments": made.arguments}
                    result = result.model_copy(update={"data": {**result.data, CHANGED: ran}})
            said.append(result)
        return said

    async def note_program_calls(self, response: ResponseRecord) -> None:
        """Report the tool calls in an answer to a program in the sandbox, which runs them itself."""
        if self._plugins.have("before_tool_call"):
            for number, call in enumerate(ModelReply(response.message, "").tool_calls):
                await self._notify("before_tool_call", f":turn-{response.turn}:call-{number}", call=call)

    async def before_verifier_command(self, number: int, command: str) -> None:
        await self._notify("before_verifier_command", f":verifier-{number}", command=command)

    async def after_verifier_command(self, number: int, result: CommandVerdict) -> None:
        shown = {"command": result.command, "result": result}
        await self._notify("after_verifier_command", f":verifier-{number}", **shown)

    async def finished(self, result: Result, verdict: Verdict | None, records: Sequence[Record]) -> Result:
        """Return the result with the plugins' scores, analyses and reports; nothing else in it can change."""
        if not self._plugins.any:
            return result
        scores: dict[str, dict[str, float]] = {}
        analyses: dict[str, dict[str, object]] = {}
        if result.outcome is Outcome.COMPLETED and self._plugins.have("evaluate_rollout", "analyze_trajectory"):
            finished = FinishedRollout(self._info, result, verdict, records)
            async for answer in self._ask("evaluate_rollout", finished=finished):
                scores[answer.call.plugin] = answer.value or {}
            async for answer in self._ask("analyze_trajectory", finished=finished):
                analyses[answer.call.plugin] = answer.value or {}

        def with_reports() -> Result:
            reports = {
                name: report.model_copy(update={"scores": scores.get(name, {}), "analysis": analyses.get(name, {})})
                for name, report in reports_of([*calls_of(records), *self._calls]).items()
            }
            return result.model_copy(update={"plugins": reports})

        if self._plugins.have("after_rollout"):
            await self._notify("after_rollout", result=with_reports())
        return with_reports()

    async def _admit(self, occasion: str, call: ToolCall) -> ToolCall | Observation:
        made, refused, key = call, None, self._key + occasion
        async for answer in self._plugins.ask_on("filter_tool_call", key, "call", call, rollout=self._info):
            self._calls.append(answer.call)
            if answer.failed or isinstance(answer.value, Refuse):
                refused = answer.call
            else:
                made = answer.value or made
        if refused is not None:
            return _refusal(call, refused)
        await self._notify("before_tool_call", occasion, call=made)
        return made

    async def _notify(self, hook: str, occasion: str = "", **arguments: object) -> None:
        async for _ in self._ask(hook, occasion, **arguments):
            pass

    async def _ask(self, hook: str, occasion: str = "", **arguments: object) -> AsyncIterator[Answer]:
        async for answer in self._plugins.ask(hook, self._key + occasion, rollout=self._info, **arguments):
            self._calls.append(answer.call)
            yield answer


def _refusal(call: ToolCall, by: PluginCall) -> Observation:
    if by.did == "Failed":
        # If a filter fails, the call is refused, because the policy may have caused the failure.
        content = f"Not run: {by.plugin}, which looks at every call first, failed on this one. Write it in another way."
    else:
        content = f"Refused by {by.plugin}, not run: {by.message}"
    refused = {"plugin": by.plugin, "reason": by.message}
    return Observation(call_id=call.id, tool=call.name, content=content, error=True, data={REFUSED: refused})
