"""Detects a model server that accepts calls but does not answer them. Without this, no error appears for minutes."""

import asyncio
import contextlib
from collections.abc import Iterator

from agent_runtime.engine.events import ModelSilent, Observer
from agent_runtime.models.base import CallHealth

SILENT_SECONDS = 10.0
"""Limit without any answer: longer than a loaded server needs for its first one, but acceptable for a waiting person. It is
raised to `PATIENCE` times the slowest answer so far.
"""
PATIENCE = 3


class ModelWatch:
    """Watches the calls of one run to its model at `place`. Notifies the observer while all calls wait and none is
    answered.
    """

    def __init__(self, place: str = "the model", observer: Observer = lambda event: None) -> None:
        self._place, self._observer = place, observer
        self._waiting: dict[int, float] = {}
        """Begin of each call without a response so far, by call number; the oldest first."""
        self._begun = 0
        self._slowest: float | None = None
        """Longest time until the first part of an answer; None before the first."""
        self._heard_at = 0.0
        self._is_silent = False
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def call(self, health: CallHealth) -> Iterator[None]:
        """Watch a call until it ends or its `health` reports a response. It is not watched while on hold."""
        hold = health.on_hold
        self._begun += 1
        number = self._begun

        def on_hold(held: bool) -> None:
            hold(held)
            if held:
                self._waiting.pop(number, None)
            else:
                self._wait(number)

        health.on_hold, health.on_sign = on_hold, lambda answered: self._sign(number, answered)
        self._wait(number)
        try:
            yield
            self._sign(number, True)
        finally:
            self._waiting.pop(number, None)

    def _wait(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[number] = loop.time()
        if self._timer is None:
            self._set_timer(loop, SILENT_SECONDS)

    def _sign(self, number: int, answered: bool) -> None:
        """Record the first part of a call's answer. A failure does not count."""
        began = self._waiting.pop(number, None)
        if began is None or not answered:
            return
        self._heard_at = asyncio.get_running_loop().time()
        self._slowest = max(self._slowest or 0.0, self._heard_at - began)
        if self._is_silent:
            self._is_silent = False
            self._observer(ModelSilent(self._place, 0, 0.0, has_answered=True))

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._waiting:
            return  # the next call sets the timer again
        seconds = loop.time() - max(self._heard_at, next(iter(self._waiting.values())))
        patience = max(SILENT_SECONDS, PATIENCE * (self._slowest or 0.0))
        if seconds < patience:
            self._set_timer(loop, patience - seconds)
            return
        self._is_silent = True
        self._observer(ModelSilent(self._place, len(self._waiting), seconds, has_answered=self._slowest is not None))
        self._set_timer(loop, SILENT_SECONDS)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._timer = loop.call_later(seconds, self._look, loop)
