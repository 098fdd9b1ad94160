"""Scalars of a running job for TensorBoard and Weights & Biases."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from agent_runtime.engine.events import Event, GroupFinished, Observer
from agent_runtime.statistics import scalars
from rolloutctl.errors import CommandError

_Writer = tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]
"""Two functions: one writes values at a step, the other closes the writer."""


class ScalarLog:
    """An observer that writes one point for each finished group, and forwards all events to another observer.

    It is a context manager, and writes nothing without a target. The step is the number of finished groups, including those
    of earlier processes, so that a resumed run continues its curve. Raises CommandError for a missing package.
    """

    def __init__(self, observer: Observer, name: str, *, tensorboard: Path | None, wandb: str | None) -> None:
        self._observer = observer
        self._writers: list[_Writer] = []
        self._step = 0
        if tensorboard is not None:
            self._writers.append(_tensorboard(tensorboard / name))
        if wandb is not None:
            self._writers.append(_weights_and_biases(wandb, name))

    def __call__(self, event: Event) -> None:
        self._observer(event)
        if isinstance(event, GroupFinished):
            self._step += 1
            if not event.earlier:
                for write, _ in self._writers:
                    write(scalars(event.results), self._step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _write, close in self._writers:
            close()


def _tensorboard(folder: Path) -> _Writer:
    package = _import_or_explain("--tensorboard", "tensorboardX", "agent-rollouts[tensorboard]")
    writer = package.SummaryWriter(str(folder))

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _weights_and_biases(project: str, name: str) -> _Writer:
    # A run with the same id is continued.
    run = _import_or_explain("--wandb", "wandb", "wandb").init(project=project, name=name, id=name, resume="allow")
    return lambda values, step: run.log(dict(values), step=step), run.finish


def _import_or_explain(option: str, package: str, requirement: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise CommandError(
            f"{option} needs {package}, which is not installed.", hint=f"pip install '{requirement}'"
        ) from error
