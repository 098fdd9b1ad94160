"""Scalars of a running job for TensorBoard and Weights & Biases."""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from agent_runtime.engine.events import Event, GroupFinished, JobStarted, Observer
from agent_runtime.statistics import scalars
from rollout_api.records import Result
from rolloutctl.errors import CommandError

FLUSH_SECONDS: Final = 1
"""Most seconds of points that a killed process loses until the run is resumed."""

_Values = Mapping[str, float]
_Writer = tuple[Callable[[_Values, int], None], Callable[[], None]]
"""Two functions: one writes values at a step, the other closes the writer."""


class ScalarLog:
    """An observer that writes one point for each finished group, and forwards all events to another observer.

    It is a context manager, and writes nothing without a target. Each run has its own curve, named like its folder. The
    step is the number of finished groups. A resumed run writes its earlier points again, because the process before it
    may have been killed before they were written. Raises CommandError for a missing package.
    """

    def __init__(self, observer: Observer, group_size: int, *, tensorboard: Path | None, wandb: str | None) -> None:
        self._observer, self._group_size = observer, group_size
        self._openers: list[Callable[[str], _Writer]] = []
        self._writers: list[_Writer] = []
        self._step = 0
        if tensorboard is not None:
            self._openers.append(_tensorboard(tensorboard))
        if wandb is not None:
            self._openers.append(_weights_and_biases(wandb))

    def __call__(self, event: Event) -> None:
        self._observer(event)
        if isinstance(event, JobStarted) and self._openers:
            self._writers = [opened(event.folder) for opened in self._openers]
            for values in _earlier(event.results, self._group_size):
                self._write(values)
        elif isinstance(event, GroupFinished) and self._writers and not event.earlier:
            self._write(scalars(event.results))

    def _write(self, values: _Values) -> None:
        self._step += 1
        for write, _ in self._writers:
            write(values, self._step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _write, close in self._writers:
            close()


def _earlier(results: Iterable[Result], group_size: int) -> list[_Values]:
    """Return the points of the groups that have all their results, in the order in which they ended."""
    unfinished: dict[int, list[Result]] = defaultdict(list)
    points = []
    for result in results:
        members = unfinished[result.group]
        members.append(result)
        if len(members) == group_size:
            points.append((max(member.ended or 0.0 for member in members), result.group, scalars(members)))
            del unfinished[result.group]
    return [values for _ended, _group, values in sorted(points, key=lambda point: point[:2])]


def _tensorboard(folder: Path) -> Callable[[str], _Writer]:
    package = _import_or_explain("--tensorboard", "tensorboardX", "agent-rollouts[tensorboard]")

    def opened(run: str) -> _Writer:
        # `purge_step` makes TensorBoard discard the points that earlier processes wrote, all of which are written again.
        writer = package.SummaryWriter(str(folder / run), purge_step=1, flush_secs=FLUSH_SECONDS)

        def write(values: _Values, step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write, writer.close

    return opened


def _weights_and_biases(project: str) -> Callable[[str], _Writer]:
    package = _import_or_explain("--wandb", "wandb", "wandb")

    def opened(name: str) -> _Writer:
        # A run with the same id is continued: its `step` is then the first one that it lacks, and it ignores those before.
        run = package.init(project=project, name=name, id=name, resume="allow")
        first = run.step

        def write(values: _Values, step: int) -> None:
            if step >= first:
                run.log(dict(values), step=step)

        return write, run.finish

    return opened


def _import_or_explain(option: str, package: str, requirement: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise CommandError(
            f"{option} needs {package}, which is not installed.", hint=f"pip install '{requirement}'"
        ) from error
