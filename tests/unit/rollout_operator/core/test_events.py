"""The Events of `kubectl describe`: each one once, counted when it repeats, and limited in a storm."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from rollout_api.on_cluster.objects import Manifest
from rollout_operator import events
from rollout_operator.actions import Event
from rollout_operator.api import ApiError
from rollout_operator.events import COUNT_AGAIN_SECONDS, MOST_WAITING, EventRecorder
from rollout_operator.tenant_limits import MOST_CHARACTERS

pytestmark = pytest.mark.usefixtures("virtual_clock")

FAILED = Event("Warning", "RunnerRestarted", "it died")


class Api:
    """Keeps Events by name."""

    def __init__(self) -> None:
        self.there: dict[str, dict[str, Any]] = {}
        self.writes = 0
        self.refuses = False

    async def create(self, body: Manifest) -> Manifest:
        self.writes += 1
        if self.refuses:
            raise ApiError(403, "forbidden")
        assert body["metadata"]["name"] not in self.there
        self.there[body["metadata"]["name"]] = dict(body)
        return body

    async def merge(self, kind: str, namespace: str, name: str, change: Manifest) -> Manifest:
        self.writes += 1
        if name not in self.there:
            raise ApiError(404, "not found")
        self.there[name] |= change
        return self.there[name]


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(events, "time", clock)
    return clock


@pytest.fixture
async def recorder(api: Any, clock: Clock) -> AsyncIterator[EventRecorder]:
    recorder = EventRecorder(api)
    running = asyncio.create_task(recorder.run())
    yield recorder
    running.cancel()


def about(name: str) -> Manifest:
    """Return an object that an Event is about."""
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-of-{name}"},
    }


async def tell(recorder: EventRecorder, *told: Event, name: str = "job") -> None:
    """Record the events, and let them be written."""
    for event in told:
        recorder.record(about(name), "RolloutJob", event)
    for _ in range(10 * len(told)):
        await asyncio.sleep(0)


async def test_repeated_event_is_updated_at_most_once_a_minute(recorder: EventRecorder, api: Api, clock: Clock) -> None:
    await tell(recorder, *[FAILED] * 5)
    assert api.writes == 1
    clock.now += COUNT_AGAIN_SECONDS
    await tell(recorder, *[FAILED] * 3)
    assert api.writes == 2
    (event,) = api.there.values()
    assert (event["reason"], event["count"]) == (FAILED.reason, 6)


async def test_different_events_are_reported_separately(recorder: EventRecorder, api: Api) -> None:
    await tell(recorder, FAILED, replace(FAILED, message="it was killed"), replace(FAILED, reason="Lost"))
    await tell(recorder, FAILED, name="another")
    told = {(event["involvedObject"]["name"], event["reason"], event["message"]) for event in api.there.values()}
    assert len(told) == len(api.there) == 4


async def test_event_that_the_api_server_dropped_is_created_again(
    recorder: EventRecorder, api: Api, clock: Clock
) -> None:
    await tell(recorder, FAILED)
    api.there.clear()
    clock.now += COUNT_AGAIN_SECONDS
    await tell(recorder, FAILED)
    (event,) = api.there.values()
    assert event["count"] == 1


async def test_a_refused_event_ends_neither_the_next_one_nor_its_own_second_chance(
    recorder: EventRecorder, api: Api
) -> None:
    api.refuses = True
    await tell(recorder, FAILED)
    api.refuses = False
    await tell(recorder, FAILED)
    assert len(api.there) == 1


async def test_burst_of_events_is_limited_to_a_few_a_second(recorder: EventRecorder, api: Api) -> None:
    for number in range(2 * MOST_WAITING):
        recorder.record(about("job"), "RolloutJob", Event("Warning", "Storm", str(number)))
    await asyncio.sleep(0.05)
    assert 0 < len(api.there) < MOST_WAITING / 10


async def test_long_message_is_shortened_to_the_limit_of_the_api_server(recorder: EventRecorder, api: Api) -> None:
    await tell(recorder, Event("Normal", "Told", f"refused: {'x' * 5000}: must be a label"))
    (event,) = api.there.values()
    assert len(event["message"]) == MOST_CHARACTERS
    assert event["message"].startswith("refused: x")
    assert event["message"].endswith("x: must be a label")


async def test_recorder_keeps_neither_long_messages_nor_objects_of_tenants(api: Any, clock: Clock) -> None:
    recorder, large = EventRecorder(api), "x" * 60_000
    recorder.record({**about("job"), "spec": {"image": large}}, "Sandbox", Event("Warning", "Refused", large))
    assert len(repr(recorder._waiting)) < 2 * MOST_CHARACTERS
    running = asyncio.create_task(recorder.run())
    for _ in range(10):
        await asyncio.sleep(0)
    running.cancel()
    assert len(api.there) == len(recorder._known) == 1
    assert len(repr(recorder._known)) < 300
