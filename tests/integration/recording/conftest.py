"""One S3 server for all tests of this folder; each test has a prefix of its own."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from agent_runtime.recording.store import Store
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import S3, serve_s3


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A real S3 server on loopback."""
    with serve_s3() as server:
        yield server


@pytest.fixture
def uri(s3: S3) -> str:
    """A prefix that no other test uses."""
    return s3.uri(uuid.uuid4().hex)


@pytest.fixture
async def proxy(s3: S3) -> AsyncIterator[FaultProxy]:
    """A proxy in front of the server, without faults until a test sets them."""
    async with FaultProxy(s3.port).serve() as proxy:
        yield proxy


@pytest.fixture
def through(s3: S3, proxy: FaultProxy, uri: str) -> Store:
    """The prefix, reached through the proxy."""
    return Store.open(uri, s3.environ(proxy.port), patience_seconds=60)


@pytest.fixture
def direct(s3: S3, uri: str) -> Store:
    """The prefix, reached without the proxy."""
    return Store.open(uri, s3.environ())
