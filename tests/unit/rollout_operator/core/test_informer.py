"""Informers: they ask again soon after an outage, and never in a tight loop."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from rollout_operator.api import ApiError, KubeApi
from rollout_operator.informer import ABSENT_LIMIT_SECONDS, RETRY_LIMIT_SECONDS, Informer


class Api:
    """Lists are empty; watches end as they are told to."""

    def __init__(self, error: ApiError | None, events: int) -> None:
        self.error, self.events, self.lists = error, events, 0

    async def pages(self, kind: str, namespace: str, selector: str) -> AsyncIterator[tuple[list[Any], str]]:
        self.lists += 1
        yield [], "1"

    async def watch(self, *_: str) -> AsyncIterator[tuple[str, Any]]:
        for number in range(self.events):
            yield "BOOKMARK", {"metadata": {"resourceVersion": str(number + 2)}}
        if self.error:
            raise self.error


class Sink:
    """Remembers what it is shown, and fails on one object."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def seen(self, kind: str, obj: Any, listed: bool) -> None:
        if obj["metadata"]["name"] == "evil":
            raise TypeError("None")
        self.names.append(obj["metadata"]["name"])

    def gone(self, kind: str, obj: Any) -> None: ...

    def relisted(self, kind: str, namespace: str, present: set[tuple[str, str]]) -> None: ...


class Stop(Exception):
    """Enough was seen."""


def pauses(api: Api, monkeypatch: pytest.MonkeyPatch, rounds: int = 10, kind: str = "Pod") -> list[float]:
    """How long an informer waits between its watches."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:
            found.append(seconds)
        if len(found) == rounds:
            raise Stop

    monkeypatch.setattr("rollout_operator.informer.asyncio.sleep", sleep)
    with pytest.raises(Stop):
        asyncio.run(Informer(cast("KubeApi", api), kind, "", "", Sink()).run())
    return found


@pytest.mark.parametrize("error", [None, ApiError(410, "too old resource version"), ApiError(500, "no")])
@pytest.mark.parametrize("events", [0, 1])
def test_an_informer_backs_off_however_its_watches_end(
    error: ApiError | None, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pauses(Api(error, events), monkeypatch)
    assert found[-1] >= RETRY_LIMIT_SECONDS / 2
    assert all(later > earlier / 2 for earlier, later in itertools.pairwise(found))


@pytest.mark.parametrize(("kind", "at_least"), [("LeaderWorkerSet", ABSENT_LIMIT_SECONDS / 2), ("Pod", 0.0)])
def test_an_informer_lists_an_absent_optional_kind_every_five_minutes(
    kind: str, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent(Api):
        def pages(self, *_: str) -> AsyncIterator[tuple[list[Any], str]]:
            raise ApiError(404, "the server could not find the requested resource")

    last = pauses(Absent(None, 0), monkeypatch, rounds=20, kind=kind)[-1]
    assert at_least <= last <= (ABSENT_LIMIT_SECONDS if at_least else RETRY_LIMIT_SECONDS)


def test_an_informer_lists_again_when_its_version_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(ApiError(410, "too old resource version"), 0)
    pauses(api, monkeypatch, rounds=3)
    assert api.lists == 3


def test_an_object_that_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listing(Api):
        async def pages(self, *_: str) -> AsyncIterator[tuple[list[Any], str]]:
            yield [{"metadata": {"name": name}} for name in ("evil", "good")], "1"

    sink = Sink()

    async def run() -> None:
        informer = Informer(cast("KubeApi", Listing(None, 0)), "Pod", "", "", sink)
        work = asyncio.create_task(informer.run())
        await asyncio.wait_for(informer.synced.wait(), 30)
        work.cancel()

    asyncio.run(run())
    assert sink.names == ["good"]
