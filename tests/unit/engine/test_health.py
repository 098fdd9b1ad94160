"""The reports that the processes of a run write."""

import asyncio
import time
from collections.abc import Mapping
from unittest import mock

import pytest

from agent_runtime.builds.provider import BuildingProvider
from agent_runtime.engine import health
from agent_runtime.engine.events import AttemptFailed, ModelCallFailing, ModelSilent, StorageRequested
from agent_runtime.engine.health import Health
from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.recording.health import ALIVE_SECONDS, HealthReport, health_reports, is_working, last_error
from agent_runtime.recording.store import Store


def test_troubles_are_counted_until_they_end() -> None:
    found = Health()
    for message in ("RateLimited: status 429", "RateLimited: status 429", "ServerError: status 503"):
        found.observe(ModelCallFailing(1, message))
    found.observe(ModelCallFailing(2, "503"))
    found.observe(ModelCallFailing(1, None))
    found.observe(ModelSilent("http://model", calls=3, seconds=12.0, has_answered=True))
    found.observe(AttemptFailed(1, 0, "SandboxLost", "node lost", retry=True))
    found.observe(StorageRequested("put", 0.1, failed=True))
    report = found.report()
    assert (report.failing_calls, report.call_retries, report.rate_limited_calls) == (1, 4, 2)
    assert report.call_problem == "503"
    assert (report.silent_seconds, report.silent_place, report.storage_failures) == (12.0, "http://model", 1)
    assert report.lost_attempts == {"SandboxLost": 1}
    found.observe(ModelSilent("http://model", calls=0, seconds=0.0, has_answered=True))
    assert found.report().silent_seconds == 0


class Sandboxes:
    name, warnings = "", ()

    def sandbox_states(self) -> Mapping[str, int]:
        return {"Ready": 2, "Starting": 1}

    def waits_for(self) -> str:
        return "1 sandbox does not start: ImagePullBackOff: no tag"


@pytest.mark.parametrize("provider", [Sandboxes(), BuildingProvider(mock.Mock(wraps=Sandboxes()), mock.Mock())])
def test_report_has_sandboxes_and_why_some_do_not_start(provider: object) -> None:
    found = Health()
    found.watch(provider)
    report = found.report()
    assert report.sandboxes == {"Ready": 2, "Starting": 1}
    assert report.sandbox_problem == "1 sandbox does not start: ImagePullBackOff: no tag"


def test_report_of_a_provider_that_does_not_report_has_no_sandboxes() -> None:
    found = Health()
    found.watch(object())
    assert (found.report().sandboxes, found.report().sandbox_problem) == ({}, None)


async def reported(store: Store, failing_calls: int) -> HealthReport:
    async with asyncio.timeout(60):
        while True:
            for report in await health_reports(store):
                if report.failing_calls == failing_calls:
                    return report
            await asyncio.sleep(0.01)


async def test_a_process_reports_while_it_works_and_at_its_end(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WRITE_SECONDS", 0.01)
    store, found = Store.open(str(tmp_path), {}), Health()
    async with found.written(store, 3):
        report = await reported(store, failing_calls=0)
        assert is_working(report, time.time())
        assert not is_working(report, time.time() + 2 * ALIVE_SECONDS)
        found.observe(ModelCallFailing(1, "429"))
        await reported(store, failing_calls=1)
    (report,) = await health_reports(store)
    assert report.ended
    assert not is_working(report, time.time())
    await store.put("health/9.json", b"{}")
    assert len(await health_reports(store)) == 1, "one that cannot be read is left out"


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (AgentBroken("Traceback"), str(AgentBroken("Traceback"))),
        (KeyError("x"), "KeyError: 'x'"),
        (asyncio.CancelledError(), None),
    ],
)
async def test_error_that_ends_a_run_is_recorded_until_a_process_resumes_it(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, error: BaseException, recorded: str | None
) -> None:
    monkeypatch.setattr(health, "WRITE_SECONDS", 0.01)
    store = Store.open(str(tmp_path), {})
    with pytest.raises(type(error)):
        async with Health().written(store, 0):
            raise error
    assert await last_error(store) == recorded
    async with Health().written(store, 0):
        async with asyncio.timeout(60):
            while await last_error(store) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
