"""Progress of a run: counts of its events, shown as a progress bar or as plain lines."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from agent_runtime.engine.events import (
    AgentFailed,
    AttemptFailed,
    Event,
    JobStarted,
    ModelCallFailing,
    ModelSilent,
    PluginFailed,
    RolloutSealed,
    RolloutStarted,
    StepBuilt,
    ToolEnded,
    VerifierFailed,
)
from rollout_api.records import Outcome, Result
from rolloutctl.ui.console import duration, harmless, number

SHOWN_BUILD_SECONDS = 1.0
"""Shorter steps of Dockerfiles are not shown: a data set has thousands."""

ISOLATION_CHARACTERS = 76
"""Longest text about isolation in the line that every run prints, so that the line has at most 160 characters."""

PLAIN_SECONDS = 10.0
"""Interval between progress lines if the output is not a terminal."""


class Tally:
    """Counts of the events so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self.total: int | None = None
        self.sealed = 0
        self.running: set[int] = set()
        self.waiting: dict[int, str] = {}
        """Rollouts whose model call is being retried."""
        self.silence: ModelSilent | None = None
        self.outcomes: Counter[str] = Counter()
        self._here = 0
        """Rollouts sealed by this process, from which the rate is computed."""
        self._reward_sum, self._rewarded = 0.0, 0
        self._steps: dict[tuple[str, float, int], bool] = {}
        """Whether each step of Dockerfiles was stored when this process first needed it."""

    def add(self, event: Event) -> None:
        if isinstance(event, JobStarted):
            self.total, self.sealed, self._since = event.total, event.sealed, self._clock()
            for result in event.results:
                self._count(result)
        elif isinstance(event, RolloutStarted):
            self.running.add(event.index)
        elif isinstance(event, ModelCallFailing):
            if event.message is None:
                self.waiting.pop(event.index, None)
            else:
                self.waiting[event.index] = event.message
        elif isinstance(event, ModelSilent):
            self.silence = event if event.calls else None
        elif isinstance(event, RolloutSealed):
            self.running.discard(event.result.index)
            self.sealed += 1
            self._here += 1
            self._count(event.result)
        elif isinstance(event, StepBuilt):
            self._steps.setdefault((event.step, event.seconds, event.bytes), event.was_stored)

    def _count(self, result: Result) -> None:
        self.outcomes[result.outcome.value] += 1
        if result.reward is not None:
            self._reward_sum += result.reward
            self._rewarded += 1

    @property
    def mean_reward(self) -> float | None:
        """Return the mean over the rollouts with a reward, those of earlier processes included."""
        return self._reward_sum / self._rewarded if self._rewarded else None

    @property
    def per_minute(self) -> float:
        elapsed = self._clock() - self._since
        return 60 * self._here / elapsed if elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Return the remaining seconds at the current rate; None if unknown."""
        if self.total is None or not self.per_minute:
            return None
        return 60 * (self.total - self.sealed) / self.per_minute

    def steps_line(self) -> str | None:
        """Return how many steps were found and made; None if none was needed."""
        found = sum(self._steps.values())
        made = len(self._steps) - found
        return f"Steps of Dockerfiles and setups: {found} found stored, {made} made." if self._steps else None

    def line(self) -> str:
        total = "?" if self.total is None else str(self.total)
        parts = [f"{self.sealed}/{total} rollouts", f"{len(self.running)} running"]
        if self.waiting:
            parts.append(f"{len(self.waiting)} waiting for the model")
        if self.silence is not None:
            parts.append(f"no answer from the model for {duration(self.silence.seconds)}")
        order = [outcome.value for outcome in Outcome]
        parts += [f"{self.outcomes[name]} {name}" for name in order if self.outcomes[name]]
        parts.append(f"mean reward {number(self.mean_reward)}")
        parts.append(f"{self.per_minute:.0f}/min")
        if self.seconds_left is not None and self.sealed != self.total:
            parts.append(f"{duration(self.seconds_left)} left")
        return ", ".join(parts)


def _about_isolation(missing: Sequence[str]) -> list[str]:
    """Return one short line for all that the sandboxes do not isolate: every run prints it."""
    if not missing:
        return []
    most, *others = missing
    shown = most if len(most) <= ISOLATION_CHARACTERS else f"{most[: ISOLATION_CHARACTERS - 1]}…"
    more = f" (and {len(others)} more)" if others else ""
    return [f"Isolation: {shown}{more}. See `rolloutctl doctor` and docs/workspaces.md."]


def _lines(event: Event) -> list[tuple[str, str]]:
    """Return the lines to print for an event, with their styles; empty for most events."""
    if isinstance(event, JobStarted):
        of_total = "" if event.total is None else f" of {event.total}"
        resumed = f"Resuming {event.name}: {event.sealed}{of_total} rollouts are finished already."
        if event.sealed == event.total:
            resumed += " Nothing is left to run. To run the job again, for example with changed code, use --new."
        total = "a stream of" if event.total is None else event.total
        started = f"Running {event.name}: {total} rollout{'s' * (event.total != 1)}."
        lines = [(resumed if event.resumed else started, "bold"), (f"Recording to {event.uri}", "")]
        warnings = [*event.warnings, *_about_isolation(event.isolation)]
        return lines + [(f"Warning: {warning}", "yellow") for warning in warnings]
    if isinstance(event, AttemptFailed):
        then = "it is retried" if event.retry else "no attempts are left, so the rollout is masked"
        return [(f"Rollout {event.index}, attempt {event.attempt}: {event.reason}: {event.message} ({then})", "yellow")]
    if isinstance(event, ModelCallFailing) and event.message is not None:
        return [(f"A model call of rollout {event.index} failed and is retried: {event.message}", "yellow")]
    if isinstance(event, StepBuilt) and not event.was_stored and event.seconds >= SHOWN_BUILD_SECONDS:
        return [(f"Built in {duration(event.seconds)}, {event.bytes / 1e6:.1f} MB: {event.step}", "")]
    if isinstance(event, ModelSilent) and not event.calls:
        return [("The model answers again.", "green")]
    if isinstance(event, ModelSilent):
        waits = "1 call has waited" if event.calls == 1 else f"{event.calls} calls have waited"
        none = "no call was answered in this time" if event.has_answered else "no call has been answered yet"
        hint = "Check the server's log; the run continues as soon as it answers."
        return [(f"{waits} for {duration(event.seconds)} for an answer of {event.place}; {none}. {hint}", "yellow")]
    if isinstance(event, PluginFailed):
        return [(f"Plugin {event.plugin} failed in {event.hook} of {event.key}: {event.message}", "yellow")]
    return []


def _raised(event: Event) -> tuple[str, str, str] | None:
    """Return whose code has raised, what it did, and the traceback; None for other events."""
    if isinstance(event, AgentFailed):
        return "agent", f"The agent's own code raised in {event.task}/{event.member} (AgentError):", event.traceback
    if isinstance(event, VerifierFailed):
        what = f"The verifier of {event.task}/{event.member} raised, or wrote no usable report: {event.message}"
        return "verifier", f"{what}\nThe reward counts. The end of its output:", event.output or "(nothing)"
    if isinstance(event, ToolEnded) and event.traceback is not None:
        what = f"The code of tool {event.tool} raised in rollout {event.index}, and the model sees the error:"
        return f"tool {event.tool}", what, event.traceback
    if isinstance(event, PluginFailed) and event.traceback is not None:
        return f"{event.hook} of plugin {event.plugin}", "", event.traceback
    return None


class Display:
    """Prints notable events. A repeated failure is printed a few times and then counted."""

    SAME_FAILURE = 5

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._tally = console, Tally(clock)
        self._failures: Counter[str] = Counter()
        self._is_silent = False
        self._raised: set[str] = set()
        """Agent, verifier, tools and hooks of plugins whose own code has raised. Their first traceback is printed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop, and print what is known only at the end."""
        if (steps := self._tally.steps_line()) is not None:
            self._console.print(Text(steps), soft_wrap=True)

    def __call__(self, event: Event) -> None:
        self._say(event)
        self._tally.add(event)

    def _say(self, event: Event) -> None:
        if isinstance(event, ModelSilent):
            was_silent, self._is_silent = self._is_silent, event.calls > 0
            if was_silent and self._is_silent:
                return  # printed at the start; the tally continues
        if isinstance(event, ModelCallFailing) and event.message == self._tally.waiting.get(event.index):
            return  # printed at the first retry
        many, further = "", ""
        if isinstance(event, AttemptFailed) and event.retry:
            many, further = event.reason, f"attempts lost to {event.reason}"
        elif isinstance(event, PluginFailed):
            many = f"{event.hook} of plugin {event.plugin}"
            further = f"failures of {many}"
        elif isinstance(event, ModelCallFailing) and event.message is not None:
            many, further = "model calls", "failures of model calls"
        if further:
            self._failures[many] += 1
            if self._failures[many] == self.SAME_FAILURE + 1:
                self._console.print(Text(f"Further {further} are not shown.", "yellow"))
            if self._failures[many] > self.SAME_FAILURE:
                return
        lines = _lines(event)
        if (raised := _raised(event)) and raised[0] not in self._raised:
            whose, what, traceback = raised
            self._raised.add(whose)
            lines += [(what, "bold red"), (traceback, "")] if what else [(traceback, "")]
        for line, style in lines:
            self._console.print(Text(harmless(line), style), soft_wrap=True)


class Plain(Display):
    """Prints a line every few seconds, for logs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._clock, self._last = clock, clock()

    def __exit__(self, *exception: object) -> None:
        if self._tally.sealed:
            self._print()
        super().__exit__(*exception)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if self._clock() - self._last >= PLAIN_SECONDS:
            self._print()

    def _print(self) -> None:
        self._last = self._clock()
        self._console.print(Text(self._tally.line()), soft_wrap=True)


class Live(Display):
    """Shows one bar that is redrawn a few times a second."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = TextColumn("{task.description}"), BarColumn(bar_width=24), _TallyColumn(self._tally)
        self._progress = Progress(*columns, console=console, refresh_per_second=4)
        self._bar = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        super().__exit__(*exception)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, JobStarted):
            self._progress.update(self._bar, description=event.name, total=event.total)
        self._progress.update(self._bar, completed=self._tally.sealed)


class _TallyColumn(ProgressColumn):
    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def render(self, task: Task) -> Text:
        return Text(self._tally.line())


def display_for(console: Console) -> Display:
    """Return a live bar on a terminal, plain lines elsewhere."""
    return Live(console) if console.is_terminal and not console.is_dumb_terminal else Plain(console)
