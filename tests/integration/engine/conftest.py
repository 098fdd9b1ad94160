"""A real S3 server, and a slow one with failures, for tests whose runs are separate processes."""

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterator

import pytest

from agent_runtime.models import answers
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import S3, serve_s3


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat failed calls to models in this process without the pauses in which a gateway would recover."""
    monkeypatch.setattr(answers, "REPEAT_PAUSES", (0.01,) * len(answers.REPEAT_PAUSES))


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Variables for a runner: TMPDIR is a new folder with a short path, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        yield dict(os.environ, TMPDIR=temporary)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A real S3 server on loopback."""
    with serve_s3() as server:
        yield server


@pytest.fixture
def faulty_port(s3: S3) -> Iterator[int]:
    """Port of a proxy in front of it. Each request takes 30 ms. Of 100 requests, one gets a busy answer, one a
    conflict, and one no reply.
    """
    ports: list[int] = []
    loop = asyncio.new_event_loop()
    ready, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with FaultProxy(
            s3.port, delay_seconds=0.03, unavailable=0.01, conflict=0.01, lost_reply=0.01
        ).serve() as proxy:
            ports.append(proxy.port)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield ports[0]
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()
