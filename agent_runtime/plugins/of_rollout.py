"""The plugins of one attempt of a rollout: calls them, applies their results, and adds up their calls."""

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.plugins.base import FinishedRollout, Refuse, RolloutInfo
from agent_runtime.plugins.plugins import Answer, Plugins
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
from rollout_api.tasks import Task


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
        return [PluginsRecord(time=time.time(), calls=calls)] if calls else []

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
