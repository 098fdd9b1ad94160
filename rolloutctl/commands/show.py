"""`rolloutctl show`: show one rollout in a terminal."""

import os
from collections.abc import Mapping
from typing import Annotated

import typer
import yaml
from rich.text import Text

from agent_runtime.extensions import raised_in
from agent_runtime.recording.health import last_error
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Outcome, PluginReport, Result, Seal, Verdict
from rollout_api.tasks import VerifierMode
from rolloutctl.completion import complete_rollout
from rolloutctl.errors import CommandError, did_you_mean
from rolloutctl.runs import JobArgument, find_run
from rolloutctl.ui.console import Form, FormOption, amount, answer_json, answer_text, duration, harmless, number
from rolloutctl.ui.figures import how_it_ended
from rolloutctl.ui.transcript import Call, Step, readable_arguments, steps

LINES = 40
"""Most lines shown of one tool result; `--full` shows all."""

_SHOWN = 20
"""Most indices in a message."""
_HINT = "`rolloutctl results` lists the tasks that have finished rollouts. An index works for any rollout."
RolloutArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK/MEMBER",
        help="The rollout, such as fix-median/0; or its index: task × groupSize + member.",
        autocompletion=complete_rollout,
    ),
]
_ROLE_STYLES = {"assistant": "bold blue", "user": "bold yellow", "system": "bold magenta"}


async def show(
    job: JobArgument,
    rollout: RolloutArgument,
    full: Annotated[
        bool, typer.Option("--full", help=f"Show whole tool results, not only their first {LINES} lines.")
    ] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Show one rollout: messages, tool calls, results and verdict. With -o json, print the ATIF trajectory."""
    run = await find_run(job, os.environ)
    index = index_of(run, rollout)
    seal = run.seals.get(index)
    if form is Form.JSON:
        answer_json(await run.trajectory(index))
        return
    records = await run.records(index)
    _print_head(run, index, seal.result if seal else None)
    for step in steps(records):
        print_step(step, full)
    if seal is None:
        answer_text(Text("The rollout is not finished; this is the record so far.", "bold yellow"))
        if (error := await last_error(run.store)) is not None:
            answer_text(Text(harmless(f"The run ended with an error: {error}"), "red"))
    else:
        print_end(seal, full)


def index_of(run: RunReader, rollout: str) -> int:
    """Return the index of the rollout that the argument names. Raises CommandError."""
    if rollout.isdecimal():
        if run.total is not None and int(rollout) >= run.total:
            raise CommandError(f"{run.folder} has no rollout {rollout}; its rollouts are 0 to {run.total - 1}")
        return int(rollout)
    task, _, member = rollout.rpartition("/")
    if not task or not member.isdecimal():
        raise CommandError(f"{rollout!r} is neither TASK/MEMBER nor an index", hint=_HINT)
    size = run.job.spec.group_size
    if int(member) >= size:
        raise CommandError(f"{rollout}: groupSize is {size}, so members are 0 to {size - 1}")
    names = run.job_file.tasks.names  # empty for a stream of tasks
    named = enumerate(names) if names else ((one.group, one.task) for one in run.results())
    groups = sorted({group for group, name in named if name == task})
    if not groups:
        known = "task" if names else "finished rollout of task"
        near = did_you_mean(task, names or {one.task for one in run.results()})
        raise CommandError(f"{run.folder} has no {known} {task!r}.{near}", hint=_HINT)
    if len(groups) > 1:
        indices = ", ".join(str(group * size + int(member)) for group in groups[:_SHOWN])
        more = ", …" if len(groups) > _SHOWN else ""
        raise CommandError(
            f"{task!r} was submitted {len(groups)} times; give an index instead of {rollout}: {indices}{more}"
        )
    return groups[0] * size + int(member)


def ending(result: Result) -> Text:
    """Return how a rollout ended, and its reward."""
    style = "green" if result.passed else "yellow" if result.outcome is Outcome.COMPLETED else "red"
    reward = "" if result.reward is None else f", reward {number(result.reward, 3)}"
    return Text(f"{how_it_ended(result)}{reward}", style)


def _print_head(run: RunReader, index: int, result: Result | None) -> None:
    if result is None:
        answer_text(Text(f"Rollout {index} of {run.folder}", "bold"))
        return
    answer_text(Text(harmless(f"Rollout {index}: {result.task}, member {result.member}"), "bold"))
    answer_text(ending(result))
    counts = [
        amount(result.turns, "turn"),
        amount(result.tool_calls, "tool call"),
        f"{result.usage.prompt_tokens} + {amount(result.usage.completion_tokens, 'token')}",
        duration(result.seconds.get("total")),
        f"attempt {result.attempt}",
    ]
    answer_text(Text(", ".join(counts), "dim"))
    if result.message:
        reason = f"{result.reason}: " if result.reason else ""
        answer_text(Text(harmless(reason + result.message)))
    if result.traceback:
        answer_text(Text(harmless(result.traceback.rstrip()), "red"))
    for tool, traceback in result.tool_tracebacks.items():
        answer_text(Text(harmless(f"The code of tool {tool} raised: {raised_in(traceback)}"), "red"))
    if (own := result.program_trajectory) is not None:
        answer_text(
            Text(harmless(f"The program's own trajectory: {own.note or f'{own.bytes} bytes, {own.format}'}"), "dim")
        )
    for failed in result.failed_attempts:
        answer_text(Text(harmless(f"Attempt {failed.attempt} was lost: {failed.reason}: {failed.message}"), "dim"))


def print_step(step: Step, full: bool) -> None:
    """Print one step of a transcript; long results are cut unless `full`."""
    if step.role == "note":
        answer_text(Text(harmless(step.text), "dim italic"))
        return
    title = step.role if step.turn is None or step.role != "assistant" else f"assistant, turn {step.turn + 1}"
    right = f"  {duration(step.seconds)}, {amount(step.tokens[1], 'token')}" if step.role == "assistant" else ""
    head = Text(harmless(title), _ROLE_STYLES.get(step.role, "bold")).append(right, "dim not bold")
    answer_text(Text("\n── ", "dim").append_text(head))
    if step.reasoning:
        answer_text(Text(harmless(step.reasoning), "dim italic"))
    if step.text:
        answer_text(Text(harmless(step.text)))
    for call in step.calls:
        _print_call(call, full)


def print_end(seal: Seal, full: bool) -> None:
    """Print the verdict of a finished rollout, and what plugins did."""
    if seal.verdict is not None:
        _print_verdict(seal.verdict, full)
    elif seal.result.outcome is Outcome.COMPLETED:
        answer_text("No reward: the task has no verifier (spec.tasks[].verifier).")
    _print_plugins(seal.result.plugins, full)


def _print_call(call: Call, full: bool) -> None:
    head = Text("→ ").append(harmless(call.name), "bold cyan")
    if call.seconds:
        head.append(f"  {duration(call.seconds)}", "dim")
    if call.error:
        head.append("  error", "bold red")
    answer_text(head)
    for name, value in readable_arguments(call.arguments) if call.arguments else []:
        _print_block(f"{name}: {value}" if name else value, "cyan", full)
    if call.result is None:
        _print_block("(no result was recorded)", "dim", full)
    else:
        _print_block(call.result or "(empty)", "red" if call.error else "", full)
    if call.traceback:
        _print_block(call.traceback, "red", full=True)


def _print_block(text: str, style: str, full: bool) -> None:
    lines = harmless(text).rstrip("\n").split("\n")
    hidden = 0 if full else max(0, len(lines) - LINES)
    shown = lines[: len(lines) - hidden]
    answer_text(Text("\n".join(f"    {line}" for line in shown), style))
    if hidden:
        answer_text(Text(f"    … {hidden} more lines; --full shows them", "dim"))


def _print_verdict(verdict: Verdict, full: bool) -> None:
    style = "bold green" if verdict.passed else "bold red"
    answer_text(Text("\n── ", "dim").append(f"verdict: reward {number(verdict.reward, 3)}", style))
    if verdict.message:
        answer_text(Text(harmless(verdict.message)))
    if verdict.mode is VerifierMode.SHARED:
        answer_text(Text("Graded in the agent's own workspace (Shared): the agent could have forged it.", "yellow"))
    if verdict.dropped:
        answer_text(Text("Not carried into the grading, because these files could change the verdict:", "yellow"))
        _print_block("\n".join(verdict.dropped), "yellow", full)
    failed = [test for test in verdict.tests if not test.passed]
    if verdict.tests:
        answer_text(Text(f"{len(verdict.tests) - len(failed)} of {len(verdict.tests)} tests passed"))
    for test in failed:
        answer_text(Text(harmless(f"✗ {test.name}"), "red"))
        if test.message:
            _print_block(test.message, "", full)
    for command in verdict.commands:
        end = f"ended by {command.cause}" if command.cause else f"exit {command.exit_code}"
        line = Text(harmless(f"$ {command.command}"), "cyan").append(f"  {end}, {duration(command.seconds)}", "dim")
        answer_text(line)
        if command.output:
            _print_block(command.output, "", full)


def _print_plugins(plugins: Mapping[str, PluginReport], full: bool) -> None:
    for name, report in plugins.items():
        did = [f"{count} {what}" for what, count in (("refused", report.refused), ("changed", report.changed)) if count]
        calls = f"{amount(report.calls, 'call')}, {duration(report.seconds)}"
        answer_text(
            Text("\n── ", "dim")
            .append(f"plugin {harmless(name)}", "bold")
            .append(f"  {', '.join([calls, *did])}", "dim")
        )
        if report.failed:
            times = "once" if report.failed == 1 else f"{report.failed} times"
            text = f"failed {times}, first in {report.error}"
            answer_text(Text(harmless("\n".join(filter(None, (text, report.traceback)))), "red"))
        for score, value in report.scores.items():
            answer_text(Text(harmless(f"{score}: {number(value, 3)}")))
        if report.analysis:
            text = yaml.safe_dump(report.analysis, sort_keys=False, allow_unicode=True, width=120)
            _print_block(text, "", full)
