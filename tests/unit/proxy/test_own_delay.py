"""A client that gives a call up is excused by what this process or its storage delayed, and by nothing that it causes."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from agent_runtime.engine.program.program_rules import delayed_calls
from agent_runtime.models.base import PROCESS_STOPPED, STORAGE_SILENT, ModelError
from agent_runtime.proxy import keys, own_delay
from agent_runtime.proxy.call import Call, Identity
from agent_runtime.proxy.chat import ChatRequest
from agent_runtime.proxy.http import Incoming
from agent_runtime.proxy.own_delay import OWN_SECONDS
from agent_runtime.proxy.session import Session, SessionSettings
from tests.support.proxied_model import MemoryJournal, TokenModel
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.usefixtures("virtual_clock")


@dataclass
class StoredJournal(MemoryJournal):
    """Its storage does not answer the small read while `silent` is not set."""

    silent: asyncio.Event | None = None

    async def test_storage(self) -> None:
        if self.silent is not None:
            await self.silent.wait()


class Bench:
    def __init__(self) -> None:
        self.model, self.journal = TokenModel(), StoredJournal()
        settings = SessionSettings(id="s", key_digest=keys.digest("k"), created=time.time())
        self.session = Session(settings, self.model, self.journal)

    def begin(self, *, retry: bool = False) -> Call:
        request = ChatRequest(model="tiny", messages=[{"role": "user", "content": "hello"}])
        return self.session.begin(request, Identity("digest", None, retry))

    async def recorded(self) -> list[str]:
        """End the session; return why its calls were delayed, by the record."""
        if self.journal.hold is not None:
            self.journal.hold.set()
        await self.session.end()
        return [error.reason for error in delayed_calls(self.journal.records).values()]


def reason(session: Session) -> str | None:
    return session.failure.reason if isinstance(session.failure, ModelError) else None


@pytest.mark.parametrize(("seconds", "found"), [(OWN_SECONDS - 1, []), (OWN_SECONDS + 1, [PROCESS_STOPPED])])
async def test_client_that_gives_up_while_the_process_is_stopped_is_excused(
    virtual_clock: VirtualClock, seconds: float, found: list[str]
) -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    await asyncio.sleep(3)
    virtual_clock.now += seconds
    call.leave(False)
    await call.ended()
    assert reason(bench.session) == (found[0] if found else None)
    assert await bench.recorded() == found


async def test_call_that_was_sent_to_a_stopped_process_is_excused(virtual_clock: VirtualClock) -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    await asyncio.sleep(3)
    virtual_clock.now += 20
    await asyncio.sleep(0.5)
    call = bench.begin()
    await asyncio.sleep(0)
    call.leave(False)
    assert await bench.recorded() == [PROCESS_STOPPED]


async def test_earlier_standstill_excuses_no_later_call(virtual_clock: VirtualClock) -> None:
    bench = Bench()
    bench.model.hold = asyncio.Event()
    virtual_clock.now += 20
    await asyncio.sleep(5)
    call = bench.begin()
    await asyncio.sleep(12)
    call.leave(False)
    assert await bench.recorded() == []


async def test_busy_process_and_machine_excuse_no_call(
    virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_delay, "_busy_seconds", lambda: virtual_clock.now)
    bench = Bench()
    bench.model.hold = asyncio.Event()
    call = bench.begin()
    virtual_clock.now += 20
    call.leave(False)
    assert await bench.recorded() == []


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize(
    ("is_silent", "seconds", "found"),
    [(True, 12, [STORAGE_SILENT]), (True, OWN_SECONDS, []), (False, 60, [])],
    ids=["silent", "given up early", "slow write"],
)
async def test_client_that_gives_up_is_excused_by_silent_storage_only(
    is_answered: bool, is_silent: bool, seconds: float, found: list[str]
) -> None:
    """A write may be slow because the request is large; storage that answers a small read meanwhile is no excuse."""
    bench = Bench()
    bench.journal.silent = asyncio.Event() if is_silent else None
    bench.model.hold, blocked = asyncio.Event(), asyncio.Event()
    if not is_answered:
        bench.journal.hold = blocked
    call = bench.begin()
    await asyncio.sleep(0.1)
    bench.journal.hold = blocked
    bench.model.hold.set()
    await asyncio.sleep(seconds)
    assert call.answered == is_answered
    call.leave(False)
    assert await bench.recorded() == found


async def test_slow_model_is_no_delay_of_the_process() -> None:
    bench = Bench()
    bench.journal.silent, bench.model.hold = asyncio.Event(), asyncio.Event()
    call = bench.begin()
    await asyncio.sleep(60)
    call.leave(False)
    assert await bench.recorded() == []


async def test_delay_is_forgotten_when_a_retry_gets_the_answer(virtual_clock: VirtualClock) -> None:
    bench = Bench()
    call = bench.begin()
    await call.answer()
    virtual_clock.now += 20
    call.leave(False)
    assert reason(bench.session) == PROCESS_STOPPED
    again = bench.begin(retry=True)
    await again.answer()
    again.leave(True)
    assert reason(bench.session) is None
    assert await bench.recorded() == []


async def test_request_given_up_before_its_body_was_read_is_excused_until_the_next_one(
    virtual_clock: VirtualClock,
) -> None:
    bench = Bench()

    async def read(_most: int) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def receive() -> None:
        async with bench.session.incoming(Incoming("POST", "/v1/chat/completions", {}, read)):
            pass

    for seconds, found in ((1.0, None), (20.0, PROCESS_STOPPED)):
        receiving = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        virtual_clock.now += seconds
        receiving.cancel()
        await asyncio.wait([receiving])
        assert reason(bench.session) == found
    call = bench.begin()
    await call.answer()
    call.leave(True)
    assert reason(bench.session) is None
