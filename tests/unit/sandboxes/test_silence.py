"""While an executor does not answer, that is no time of those who wait for it."""

import asyncio

import pytest

from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.executor_client import silence
from agent_runtime.sandboxes.executor_client.silence import SilenceWatch


class Executor:
    """Answers, or stands still."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None

    async def health(self) -> None:
        await self.answers.wait()
        if self.error is not None:
            raise self.error


class Waiting:
    """Something that waits for the executor: the changes that it was told."""

    def __init__(self) -> None:
        self.changes: list[bool] = []

    def __call__(self, is_paused: bool) -> None:
        if is_paused != (self.changes[-1] if self.changes else False):
            self.changes.append(is_paused)

    async def until(self, *changes: bool) -> None:
        async with asyncio.timeout(10):
            while self.changes != list(changes):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(silence, "SILENT_SECONDS", 0.05)


async def test_standstill_is_a_pause_of_all_that_wait() -> None:
    executor, first, second, later = Executor(), Waiting(), Waiting(), Waiting()
    watch = SilenceWatch(executor.health)
    with watch.watched(first), watch.watched(second):
        await asyncio.sleep(0.1)
        assert first.changes == second.changes == []
        executor.answers.clear()
        await first.until(True)
        await second.until(True)
        with watch.watched(later):
            await later.until(True)
            executor.answers.set()
            for waiting in (first, second, later):
                await waiting.until(True, False)
        executor.answers.clear()
        await first.until(True, False, True)
    assert later.changes == [True, False]
    assert first.changes == [True, False, True, False], "the end of a wait ends its pause"
    watch.close()


@pytest.mark.parametrize("error", [SandboxFailure("SandboxLost", "connection refused"), ValueError("no JSON")])
async def test_executor_that_fails_at_once_does_not_stand_still(error: Exception) -> None:
    executor, waiting = Executor(), Waiting()
    executor.error = error
    watch = SilenceWatch(executor.health)
    with watch.watched(waiting):
        await asyncio.sleep(0.2)
        assert waiting.changes == []
        executor.answers.clear()
        await waiting.until(True)
    watch.close()
