"""A model server that accepts calls and answers none is reported within seconds, and a slow one is not."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime.engine.events import Event, ModelSilent
from agent_runtime.engine.scheduling.model_watch import PATIENCE, SILENT_SECONDS, ModelWatch
from agent_runtime.models.base import CallHealth


class Calls:
    """Watched calls with a clock that the test moves; it replaces the event loop."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self._now = 1000.0
        self._calls: list[contextlib.ExitStack] = []
        self._timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self._watch = ModelWatch("http://model/v1", self.told.append)

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> object:
        self._timers.append((self._now + seconds, callback, arguments))
        return self._timers[-1]

    def begin(self) -> tuple[CallHealth, Callable[[], None]]:
        """Begin a call; return its health, and a function that ends it with an answer."""
        health, stack = CallHealth(), contextlib.ExitStack()
        stack.enter_context(self._watch.call(health))
        self._calls.append(stack)
        return health, stack.close

    def wait(self, seconds: float) -> None:
        until = self._now + seconds
        while due := [timer for timer in self._timers if timer[0] <= until]:
            timer = min(due, key=lambda timer: timer[0])
            self._timers.remove(timer)
            self._now = timer[0]
            timer[1](*timer[2])
        self._now = until


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: calls)
    return calls


def test_watch_tells_how_many_calls_wait_when_none_is_answered(calls: Calls) -> None:
    for _ in range(3):
        calls.begin()
    calls.wait(SILENT_SECONDS)
    assert calls.told == [ModelSilent("http://model/v1", 3, SILENT_SECONDS, has_answered=False)]


def test_watch_tells_when_the_model_answers_after_all(calls: Calls) -> None:
    _, answer = calls.begin()
    calls.wait(SILENT_SECONDS)
    answer()
    calls.wait(60 * SILENT_SECONDS)
    assert calls.told[1:] == [ModelSilent("http://model/v1", 0, 0.0, has_answered=True)]


def test_watch_is_quiet_while_calls_are_streamed_or_retried_or_on_hold(calls: Calls) -> None:
    (streamed, _), (retried, _), (held, _) = calls.begin(), calls.begin(), calls.begin()
    streamed.note(None)
    retried.note("Unreachable: connection refused")
    held.on_hold(True)
    calls.wait(60 * SILENT_SECONDS)
    assert calls.told == []
    held.on_hold(False)
    calls.wait(SILENT_SECONDS)
    assert [type(event) for event in calls.told] == [ModelSilent]


def test_watch_is_patient_with_a_model_that_has_answered_and_tells_when_it_stops(calls: Calls) -> None:
    _, answer = calls.begin()
    calls.wait(SILENT_SECONDS - 1)
    answer()
    calls.begin()
    limit = PATIENCE * (SILENT_SECONDS - 1)
    calls.wait(limit - 1)
    assert calls.told == [], "it is slow, and has answered others"
    calls.wait(1)
    assert calls.told == [ModelSilent("http://model/v1", 1, limit, has_answered=True)]


def test_watch_tells_within_seconds_when_a_fast_model_stops(calls: Calls) -> None:
    _, answer = calls.begin()
    answer()
    calls.begin()
    calls.wait(SILENT_SECONDS)
    assert calls.told == [ModelSilent("http://model/v1", 1, SILENT_SECONDS, has_answered=True)]
