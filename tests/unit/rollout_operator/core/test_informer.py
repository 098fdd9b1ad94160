"""Informers: they list again soon after an outage, and never in a tight loop."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from rollout_operator.api import FIRST_PAGE, PAGE_BYTES, UNREACHABLE, ApiError, KubeApi, Page
from rollout_operator.informer import ABSENT_LIMIT_SECONDS, RETRY_LIMIT_SECONDS, Informer
from tests.support.virtual_time import virtual_time


class Api:
    """Lists are empty; watches end as the test sets."""

    def __init__(self, error: ApiError | None, events: int) -> None:
        self.error, self.events, self.lists = error, events, 0

    async def page(self, kind: str, namespace: str, selector: str, limit: int, token: str) -> Page:
        self.lists += 1
        return Page([], 100, "", "1")

    async def watch(self, *_: str) -> AsyncIterator[tuple[str, Any]]:
        for number in range(self.events):
            yield "BOOKMARK", {"metadata": {"resourceVersion": str(number + 2)}}
        if self.error:
            raise self.error


class Sink:
    """Records what it gets, and fails for one object."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def seen(self, kind: str, obj: Any, listed: bool) -> None:
        if obj["metadata"]["name"] == "evil":
            raise TypeError("None")
        self.names.append(obj["metadata"]["name"])

    def gone(self, kind: str, obj: Any) -> None: ...

    def relisted(self, kind: str, namespace: str, present: set[tuple[str, str]]) -> None: ...


class Stop(Exception):
    """Raised when enough was seen."""


def pauses(api: Api, monkeypatch: pytest.MonkeyPatch, rounds: int = 10, kind: str = "Pod") -> list[float]:
    """Return how long an informer waits between its watches."""
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
def test_informer_backs_off_after_every_kind_of_end_of_a_watch(
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
        async def page(self, *_: object) -> Page:
            raise ApiError(404, "the server could not find the requested resource")

    last = pauses(Absent(None, 0), monkeypatch, rounds=20, kind=kind)[-1]
    assert at_least <= last <= (ABSENT_LIMIT_SECONDS if at_least else RETRY_LIMIT_SECONDS)


@pytest.mark.parametrize("namespace", ["", "team-b"])
def test_refused_list_delays_only_its_own_namespace(namespace: str) -> None:
    """A tenant can remove the operator's Role from one namespace. The operator must still start for the others."""

    class Refused(Api):
        refuses = True

        async def page(self, *how: Any) -> Page:
            if self.refuses:
                raise ApiError(403, "pods is forbidden")
            return await super().page(*how)

    async def run() -> None:
        api = Refused(None, 0)
        informer = Informer(cast("KubeApi", api), "Pod", namespace, "", Sink())
        with virtual_time():
            work = asyncio.create_task(informer.run())
            await asyncio.sleep(0.05)
            assert informer.answered.is_set() == bool(namespace)
            assert not informer.synced.is_set()
            api.refuses = False
            await asyncio.wait_for(informer.synced.wait(), 30)
            assert informer.answered.is_set()
            work.cancel()

    asyncio.run(run())


def test_an_informer_lists_again_when_its_version_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(ApiError(410, "too old resource version"), 0)
    pauses(api, monkeypatch, rounds=3)
    assert api.lists == 3


class Listing:
    """Lists one object after another in pages of one. `answers` are the results of requests before they get a page."""

    def __init__(self, names: list[str], answers: list[ApiError | Page]) -> None:
        self.names, self.answers = names, answers
        self.asked: list[tuple[int, str]] = []

    async def page(self, kind: str, namespace: str, selector: str, limit: int, token: str) -> Page:
        self.asked.append((limit, token))
        if self.answers and token:
            answer = self.answers.pop()
            if isinstance(answer, ApiError):
                raise answer
            return answer
        at = int(token or 0)
        following = str(at + 1) if at + 1 < len(self.names) else ""
        return Page([{"metadata": {"name": self.names[at]}}], PAGE_BYTES, following, "1")

    async def watch(self, *_: str) -> AsyncIterator[tuple[str, Any]]:
        await asyncio.sleep(60)
        yield "", {}


def listed(api: Listing) -> list[str]:
    """Return the names that an informer has seen when its first list is complete."""
    sink = Sink()

    async def run() -> None:
        informer = Informer(cast("KubeApi", api), "Pod", "", "", sink)
        work = asyncio.create_task(informer.run())
        await asyncio.wait_for(informer.synced.wait(), 30)
        work.cancel()

    asyncio.run(run())
    return sink.names


def test_an_object_that_cannot_be_read_hides_no_other() -> None:
    assert listed(Listing(["evil", "good"], [])) == ["good"]


def test_a_list_resumes_at_the_page_that_failed() -> None:
    errors = [ApiError(429, "slow down"), ApiError(500, "no"), ApiError(UNREACHABLE, "no answer")]
    api = Listing(["a", "b", "c"], [*errors])
    assert listed(api) == ["a", "b", "c"]
    assert [token for _, token in api.asked] == ["", "1", "1", "1", "1", "2"]


def test_list_starts_again_when_its_continuation_has_expired() -> None:
    api = Listing(["a", "b"], [ApiError(410, "the provided continue parameter is too old")])
    assert listed(api) == ["a", "a", "b"]


def test_page_with_too_many_bytes_is_requested_again_with_fewer_objects() -> None:
    api = Listing(["a", "b", "c"], [Page(None, 5 * PAGE_BYTES)])
    assert listed(api) == ["a", "b", "c"]
    assert api.asked == [(FIRST_PAGE, ""), (FIRST_PAGE, "1"), (FIRST_PAGE // 5, "1"), (FIRST_PAGE // 5, "2")]
